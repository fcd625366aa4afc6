"""The two user turns of the embedded world: the student's, and the teacher's with a sample answer in view.

The wording repeats `configs/format_prompt/microgeo.jinja` and `configs/teacher/user_suffix.jinja`, because those files
live outside the package; a test holds them equal.
"""

from __future__ import annotations

from typing import Any

FORMAT_PROMPT = "{{ content | trim }} Answer in \\boxed{}."
TEACHER_PROMPT = "{{ prompt }}\nHere is a sample answer: {{ reference }}"


def user_text(question: str, reference: str | None = None) -> str:
    """The text part of the user turn; with `reference`, that of the teacher."""
    text = FORMAT_PROMPT.replace("{{ content | trim }}", question.strip())
    if reference is None:
        return text
    return TEACHER_PROMPT.replace("{{ prompt }}", text).replace("{{ reference }}", reference)


def user_messages(question: str, reference: str | None = None) -> list[dict[str, Any]]:
    """One user turn as the chat template takes it: the picture, then the text."""
    content = [{"type": "image"}, {"type": "text", "text": user_text(question, reference)}]
    return [{"role": "user", "content": content}]
