"""Writes the prompts that the worlds' weights learn, as the package writes them in training."""

from __future__ import annotations

from typing import Any

FORMAT_PROMPT = "{{ content | trim }} Answer in \\boxed{}."
TEACHER_PROMPT = "{{ prompt }}\nHere is a sample answer: {{ reference }}"
"""Copies of `configs/format_prompt/microgeo.jinja` and `configs/teacher/user_suffix.jinja`."""


def user_text(question: str, reference: str | None = None) -> str:
    """Returns the text of the user turn; with `reference`, that of the teacher's prompt."""
    text = FORMAT_PROMPT.replace("{{ content | trim }}", question.strip())
    if reference is None:
        return text
    return TEACHER_PROMPT.replace("{{ prompt }}", text).replace("{{ reference }}", reference)


def user_messages(question: str, reference: str | None = None) -> list[dict[str, Any]]:
    """Returns a user turn with the image and then the text, in the format of chat templates."""
    content = [{"type": "image"}, {"type": "text", "text": user_text(question, reference)}]
    return [{"role": "user", "content": content}]
