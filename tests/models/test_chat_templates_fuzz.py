"""Any chat template, a stranger's program, gives prompts or an error that names it, and runs no code. It may take long."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from case_files import cases
from fuzzing import only_our_errors
from hypothesis import given
from hypothesis import strategies as st

from cepo.errors import ConfigError, DataError
from cepo.models.chat_template import ChatTemplate
from cepo.models.interface import Turn
from cepo.models.processing import Processing
from cepo.models.text_codec import IMAGE_MARK


@pytest.mark.parametrize(
    ("template", "what"),
    cases(__file__, "unusable_chat_templates.yaml"),
)
def test_an_unusable_or_failing_chat_template_is_named(tiny_model_folder: Path, template: str, what: str) -> None:
    processing = Processing(str(tiny_model_folder), chat_template=template)
    question = "What is <image>?" if "reverse %}" in template else "What is it? <image>"
    refuses = what.startswith("refuses")
    said = f"^the chat template in data.override_chat_template {what}" + ("" if refuses else ".*; name another")
    with pytest.raises(DataError if refuses else ConfigError, match=said):
        processing.template_ids(question)


def test_a_chat_template_of_the_folder_is_named(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].role }}")
    with pytest.raises(ConfigError, match=f"^the chat template of worker.actor.model.model_path '{folder}' drops"):
        Processing(str(folder)).template_ids("What is x?")
    (folder / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ConfigError, match=f"'{folder}': no model can be read there .*utf-8"):
        Processing(str(folder))


TURNS = """\
{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}IMAGE{%- else -%}TEXT{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGES = [
    IMAGE, IMAGE, IMAGE, "", IMAGE * 2, "<|image_pad|>", "<|vision_start|>", "{{ part.image }}",
    "{{ raise_exception('no') }}",
]  # fmt: skip
TEXTS = [
    "{{ part.text }}", "{{ part.text }}", "{{ part.text }}", "", "{{ part.text * 2 }}", "{{ part.text | upper }}",
    "{{ part.text | lower }}", "{{ part.text | trim }}", "{{ part.text[::-1] }}", "{{ part.text.format(1) }}",
    "{{ part['text'] }} {{ part.text }}", "{{ part.nosuch }}", "{{ part.text + 1 }}", "{{ part.text | tojson }}",
    "{{ part.text | nosuch }}", "{{ part }}", "<|im_end|>{{ part.text }}",
]  # fmt: skip
ESCAPES = [
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ lipsum.__globals__['os'].popen('touch MARK') }}",
    "{{ joiner.__init__.__globals__.os.mkdir('MARK') }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].pop('role') }}",
    "{{ (messages | attr('__class__')).mro() }}",
    "{{ (messages | map(attribute='__class__') | first).mro() }}",
    "{{ self._TemplateReference__context.eval_ctx }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% from '/etc/passwd' import x %}",
]
"""Templates that call what they may not, change what they get, or read a file."""


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_leaves_its_sandbox_in_no_way(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.chdir(tmp_path)
    processing = Processing(str(tiny_model_folder), chat_template=template)
    with pytest.raises(DataError, match=r"refuses messages of the roles user: (Security|Type|Undefined)Error"):
        processing.template_ids("What is x?")
    assert not os.listdir(tmp_path)


PIECES = [
    *ESCAPES,
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{{ range(10 ** 12) }}",
    "{{ nosuch }}", "{{ nosuch.x }}", "{{ messages[99].role }}", "{{ messages[0].content[99].text }}", "{{ 1 / 0 }}",
    "{{ raise_exception('roles must alternate') }}", "{{ raise_exception(messages) }}", "{{ strftime_now('%Y') }}",
    "{{ strftime_now(7) }}", "{{ bos_token }}{{ eos_token }}", "{{ tools }}{{ documents }}", "{{ messages | tojson }}",
    "{% generation %}x{% endgeneration %}", "{% generation %}", "{% break %}", "{% set messages = 7 %}",
    "{% set messages = [] %}",
    "{% set messages = messages[1:] %}", "{% set add_generation_prompt = false %}", "{% if %}", "{% endfor %}", "{{", "%}",
    "{% raw %}", "{# ", "\0", "\ud800", "<|im_start|>", "<|image_pad|>", "CEPO-TEXT-SLOT-000", "CEPO-TEXT-SLOT-001", "é\n",
    "{{ messages[0].content[1].text }}", "{{ messages | first }}", "{{ messages | string | urlize }}",
    "{{ 'x' | center(99999) }}",
]  # fmt: skip
QUESTIONS = ["Find x.", "", "{{ 7 * 7 }}", "CEPO-TEXT-SLOT-000", "<|im_end|>", "\ud800", "{% raw %}", "a\nb", " x "]
HISTORIES = ["", "", "user assistant", "system", "assistant", "system user assistant user", "tool"]

PIECE = st.sampled_from(PIECES) | st.text(max_size=4)
TEMPLATES = st.builds(
    lambda image, text, around: around[0] + TURNS.replace("IMAGE", image).replace("TEXT", text) + around[1],
    st.sampled_from(IMAGES),
    st.sampled_from(TEXTS),
    st.tuples(st.just("") | PIECE, st.just("") | PIECE),
) | st.lists(PIECE | st.sampled_from(TEXTS + IMAGES), max_size=4).map("".join)


@pytest.fixture(scope="module")
def processing(tiny_model_folder: Path) -> Processing:
    """One of our own, whose template changes."""
    return Processing(str(tiny_model_folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, into which hostile templates write their mark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("templates"))
        yield Path.cwd()


@given(
    source=TEMPLATES,
    question=st.lists(st.sampled_from([*QUESTIONS, IMAGE_MARK, IMAGE_MARK]), max_size=4).map("".join),
    roles=st.sampled_from([*map(str.split, HISTORIES), [""]]),
)
def test_any_chat_template_gives_prompts_or_our_error(
    folder: Path, processing: Processing, source: str, question: str, roles: list[str]
) -> None:
    processing.template = ChatTemplate(source, "the template mine.jinja", special_tokens={"eos_token": "<|im_end|>"})
    history = [Turn(role, question) for role in roles]
    with only_our_errors(naming="the template mine.jinja "):
        token_ids = processing.template_ids(question, history=history)
        assert token_ids.count(processing.image_token_id or 0) == question.count(IMAGE_MARK) * (1 + len(history))
        assert "CEPO-TEXT-SLOT" in question + source or "CEPO-TEXT-SLOT" not in processing.decode(token_ids)
    assert not os.listdir(folder)
