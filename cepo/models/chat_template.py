"""Chat templates: rendering in a sandbox, variables that settings give, and what one writes around an assistant's answer.

A template is a program of a model folder. transformers' sandbox lets it change nothing and call nothing of Python's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from cepo.errors import ConfigError, DataError, did_you_mean
from cepo.files.trees import Fields, is_mapping

Message = dict[str, Any]
"""A `role`, and a `content` that is a text or a list of parts of the types `text`, `image` and `video`."""

_SLOT = "CEPO-TEXT-SLOT-"
_MOST_ERROR_CHARACTERS = 1000
_NAME = re.compile(r"[A-Za-z_]\w*")
_NOT_SETTABLE = {"messages", "add_generation_prompt"}
"""Variables that every rendering has, whose values no setting may replace."""
TAG = re.compile(r"[<\[◁]/?[^\s<>\[\]◁▷]+[>\]▷]")
_THOUGHT_TAG = re.compile(r"<[\w:.-]*(?:think|reason|thought)[\w:.-]*>", re.IGNORECASE)
_THOUGHT_MARK = re.compile(r"[<\[◁]/?[|\w:.-]*(?:think|reason|thought)[|\w:.-]*[>\]▷]", re.IGNORECASE)
"""A tag at the beginning or the end of a thought, in any family's brackets."""


class ChatTemplate:
    """A chat template with the variables that each rendering gets beside the messages.

    `text` is None for a model without one, and `name` is what errors call it. `special_tokens` are the tokenizer's, by
    name. `settings` are further variables, such as those of `data.chat_template_kwargs`.
    """

    def __init__(self, text: object, name: str, *, special_tokens: Fields, settings: Fields | None = None) -> None:
        if is_mapping(text):
            text = text.get("default")
        self.text = None if text is None else str(text)
        self.name = name
        self._variables = {**special_tokens, **(settings or {})}

    def render(self, messages: Sequence[Message], *, opens_answer: bool = True) -> str:
        """Returns the conversation as text, which ends with the assistant's header if `opens_answer`.

        Raises `ConfigError`: there is no template, or it does not parse.
        Raises `DataError`: the template refuses the roles, their order, or the content.
        """
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.text is None:
            raise self.error("is missing")
        try:
            rendered, _ = render_jinja_template(
                [list(messages)], chat_template=self.text, add_generation_prompt=opens_answer, **self._variables
            )
        except TemplateSyntaxError as error:
            raise self.error(f"does not parse: {_described(error)}") from error
        except Exception as error:  # a template is a program: it can raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(f"{self.name} refuses messages of the roles {roles}: {_described(error)}") from error
        # No tokenizer accepts a lone surrogate.
        return rendered[0].encode("utf-8", errors="replace").decode("utf-8")

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.name} {problem}; name another template in data.override_chat_template")

    def require_read(self, settings: Fields) -> None:
        """Raises `ConfigError` for a variable in `settings` whose name does not stand in the template."""
        names = set(_NAME.findall(self.text or "")) - _NOT_SETTABLE
        for name in settings:
            if name not in names:
                raise ConfigError(
                    f"data.chat_template_kwargs.{name}: {self.name} reads no such variable.{did_you_mean(str(name), names)}"
                )

    def pieces(self, roles: Sequence[str], *, opens_answer: bool, as_parts: bool) -> list[str] | None:
        """Returns what the template writes before, between and after texts of these roles; None if it takes none such.

        `as_parts` tells whether the content of a message is a list of parts.
        """
        slots = [slot(number) for number in range(len(roles))]
        messages: list[Message] = []
        for role, text in zip(roles, slots, strict=True):
            content: Any = [{"type": "text", "text": text}] if as_parts else text
            messages.append({"role": role, "content": content})
        try:
            remainder = self.render(messages, opens_answer=opens_answer)
        except (ConfigError, DataError):  # a prompt that the template refuses says so itself
            return None
        pieces: list[str] = []
        for text in slots:
            piece, separator, remainder = remainder.partition(text)
            if not separator:
                return None
            pieces.append(piece)
        if _SLOT in "".join([*pieces, remainder]):  # a text is written twice
            return None
        return [*pieces, remainder]

    def after_answer(self, *, as_parts: bool) -> str:
        """Returns what follows an assistant's text: at the end of a conversation, or if that is nothing, before a user's."""
        last = self.pieces(("user", "assistant"), opens_answer=False, as_parts=as_parts)
        if last is not None and last[-1].strip():
            return last[-1]
        earlier = self.pieces(("user", "assistant", "user"), opens_answer=True, as_parts=as_parts)
        return "" if earlier is None else earlier[2]

    def prefilled(self, control_texts: Iterable[str], *, as_parts: bool) -> str:
        """Returns the beginning of a response that the template writes itself; see `prefilled_text`."""
        pieces = self.pieces(("user", "assistant", "user"), opens_answer=True, as_parts=as_parts)
        if pieces is None:
            return ""
        return prefilled_text(pieces[1], pieces[-1], control_texts)


def slot(number: int) -> str:
    """Returns the text that stands for a text of a conversation in a rendering."""
    return f"{_SLOT}{number:03d}"


def num_slots(rendered: str) -> int:
    return rendered.count(_SLOT)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_ERROR_CHARACTERS]


def marks_thought(text: str) -> bool:
    """Returns whether a token begins or ends a thought, so that a reasoning model must be able to write it."""
    return _THOUGHT_MARK.fullmatch(text) is not None


def prefilled_text(before_earlier_answer: str, before_response: str, control_texts: Iterable[str]) -> str:
    r"""Returns the beginning of the response that the template writes after the assistant's header; empty without one.

    For `<|im_end|>\n<|im_start|>assistant\n<think>\n` it is `<think>\n`.

    Args:
        before_earlier_answer: what the template writes between a user's text and the answer of an earlier turn.
        before_response: what it writes after the last user's text.
        control_texts: the control tokens, which no response has.
    """
    start = _length_of_equal_beginning(before_earlier_answer, before_response)
    thought = _THOUGHT_TAG.search(before_response[:start])  # of a template that also writes one before earlier answers
    if thought is not None:
        start = thought.start()
    written = before_response[start:]
    if TAG.search(written) is None:
        return ""
    for control in control_texts:
        last = before_response.rfind(control)
        if control and last >= 0 and last + len(control) > start:
            return ""
    return written


def _length_of_equal_beginning(first: str, second: str) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length
