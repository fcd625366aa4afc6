"""Chat templates in the form of each family's own: the same headers, ends and image marks, and the same quirks."""

from __future__ import annotations

_CHATML = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' and DEFAULT -%}
{{- '<|im_start|>system\\n' + DEFAULT + '<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- IMAGE -}}
{%- elif part.type == 'video' -%}{{- VIDEO -}}
{%- else -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' + OPENING -}}{%- endif -%}
"""

# Content that is a string instead of a list of parts is lost here, as in the real ones.
_TURNS = """\
{{- BEGIN -}}
{%- for message in messages -%}
{{- message.role | capitalize -}}
{{- ':' if message.content[0].type == 'image' else ': ' -}}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<image>' -}}
{%- elif part.type == 'text' -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""

# All images of a message stand before its text, wherever they are among its parts.
LLAVA_ONEVISION = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + ' ' -}}
{%- for part in message.content if part.type == 'image' -%}{{- '<image>' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'video' -%}{{- '<video>' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{- '\\n' + part.text -}}{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# The system's text opens the first user turn, roles must alternate, and texts are trimmed.
GEMMA3 = """\
{{- bos_token -}}
{%- set opening = namespace(text='') -%}
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content -%}
{%- set opening.text = (first if first is string else first[0].text) + '\\n\\n' -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{{- opening.text if loop.first else '' -}}
{%- if message.content is string -%}{{- message.content | trim -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<start_of_image>' -}}
{%- elif part.type == 'text' -%}{{- part.text | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


GEMMA4 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- if message.content is string -%}{{- message.content | trim -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|image|>' -}}
{%- elif part.type == 'text' -%}{{- part.text | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""

# A turn ends where the next one begins: there is no mark of its end.
GLM4V = """\
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{{- '<|' + message.role + '|>\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
{%- elif part.type == 'video' -%}{{- '<|begin_of_video|><|video|><|end_of_video|>' -}}
{%- else -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}
"""


def _chatml(*, image: str = "", video: str = "", default: str = "", opening: str = "") -> str:
    """Qwen's form. `default` is the system's text where none is given, `opening` what an answer starts with."""
    values = {"IMAGE": image, "VIDEO": video, "DEFAULT": default, "OPENING": opening}
    return "".join(map(_setting, values, values.values())) + _CHATML


def _turns(begin: str) -> str:
    return _setting("BEGIN", begin) + _TURNS


def _setting(name: str, text: str) -> str:
    return "{%- set " + f"{name} = {text!r}" + " -%}\n"


_QWEN_IMAGE, _QWEN_VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))

QWEN2 = _chatml(default="You are a helpful assistant.")
QWEN3 = _chatml()
QWEN2_VL = _chatml(image=_QWEN_IMAGE, video=_QWEN_VIDEO, default="You are a helpful assistant.")
QWEN3_VL = _chatml(image=_QWEN_IMAGE, video=_QWEN_VIDEO)
QWEN3_5 = _chatml(image=_QWEN_IMAGE, video=_QWEN_VIDEO, opening="<think>\n\n</think>\n\n")
LFM2_VL = "{{- bos_token -}}" + _chatml(image="<image>")
INTERNVL = _chatml(image="<IMG_CONTEXT>\n", video="<video>\n")
SMOLVLM = _turns("<|im_start|>")
IDEFICS3 = _turns("<|begin_of_text|>")
