"""Renders chat templates, which are untrusted programs, in transformers' sandbox; `cepo.models.limited_process` calls it."""

from __future__ import annotations

from typing import Any

from cepo.files.trees import Fields

_MOST_ERROR_CHARACTERS = 1000


def render(request: Fields) -> tuple[str, Any]:
    """Returns ("text", the conversation), ("characters", how many are too many), or the kind of an error and its text.

    `request` has `messages`, the template's `variables`, its own text among them, and `most_characters`.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([request["messages"]], add_generation_prompt=True, **request["variables"])
        if len(texts[0]) > request["most_characters"]:
            return "characters", len(texts[0])
        # No tokenizer accepts a lone surrogate.
        return "text", texts[0].encode("utf-8", errors="replace").decode("utf-8")
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it can raise anything
        kind = "unparsable" if isinstance(error, TemplateSyntaxError) else "raised"
        return kind, f"{type(error).__name__}: {error}"[:_MOST_ERROR_CHARACTERS]
