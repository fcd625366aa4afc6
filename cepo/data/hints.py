"""Renders users' Jinja templates, and sanitises text from models and datasets before it enters a context."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from jinja2 import StrictUndefined
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment

from cepo.errors import ConfigError, ForeignFileError
from cepo.foreign_files import read_text

TEMPLATES = {
    "user_suffix": "{{ prompt }}\nHere is a sample answer: {{ reference }}",
    "assistant_prefix": "{{ reference }}\n",
}
"""The built-in template of each placement: the whole user text, or the text between assistant header and response."""
_PROBE = "Question"

_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
"""Matches control, invisible and direction characters, tags, and lone surrogates, which cannot be encoded."""


def template_text(path: str, origin: str, accepted: str) -> str:
    """Returns the text of a template file; raises `ConfigError` if it is no regular file in UTF-8."""
    try:
        return read_text(Path(path))
    except ForeignFileError as error:
        raise ConfigError(f"{origin} {error.fault}; give a Jinja file {accepted}") from error


class UserTemplate:
    """Parses and renders a template. `origin` names it in errors; `variables` are those that it uses."""

    def __init__(self, source: str, origin: str, *, keep_trailing_newline: bool = False) -> None:
        environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=keep_trailing_newline)
        self._origin = origin
        try:
            self._template = environment.from_string(source)
            self.variables = find_undeclared_variables(environment.parse(source))
        except Exception as error:  # Jinja also raises the errors of expressions that it evaluates in advance
            raise ConfigError(f"{origin} does not parse: {error}") from error

    def render(self, **values: str) -> str:
        """Returns the text with the values filled in. The values themselves are not treated as templates."""
        try:
            return self._template.render(**values)
        except Exception as error:  # a template is a program: it can raise anything
            raise ConfigError(f"{self._origin} cannot be rendered: {type(error).__name__}: {error}") from error


class HintTemplate(UserTemplate):
    """Renders a sandboxed Jinja template with the variables `prompt` (the student's user text) and `reference`.

    The placement determines what the template produces. `user_suffix`: the user text, which begins with the prompt, so
    that student and teacher contexts share their tokens up to the reference. `free`: any user text that contains the
    prompt exactly once. `assistant_prefix`: the text right before the response.

    Raises:
        ConfigError: the file is missing or not text, does not parse, does not use `reference`, uses an unknown
            variable, or does not place the prompt as required.
    """

    def __init__(self, placement: str, path: str | None = None) -> None:
        source, origin = TEMPLATES.get(placement, ""), f"the built-in wording of {placement}"
        if path is None and not source:
            raise ConfigError(
                f"teacher.placement {placement} has no built-in wording; name a Jinja file in teacher.template"
            )
        if path is not None:
            origin = f"teacher.template {path}"
            source = template_text(path, origin, "that uses prompt and reference").removesuffix("\n")
        super().__init__(source, origin, keep_trailing_newline=True)
        if "reference" not in self.variables:
            raise ConfigError(f"{origin} never uses the variable reference, so teachers would see no hint")
        if unknown := sorted(self.variables - {"prompt", "reference"}):
            raise ConfigError(f"{origin} uses {', '.join(unknown)}; accepted variables: prompt, reference")
        text = self.render(prompt=_PROBE, reference="1")
        if placement == "user_suffix" and not text.startswith(_PROBE):
            raise ConfigError(
                f"{origin} must begin with the prompt for teacher.placement user_suffix; use placement free"
            )
        if placement == "free" and text.count(_PROBE) != 1:
            raise ConfigError(f"{origin} must contain the prompt exactly once, so no image is lost or repeated")


def sanitise_reference(text: str, special_texts: Iterable[str]) -> str:
    """Removes everything from a model's or dataset's text that no context may contain.

    White space, including every kind of line break, is collapsed to single spaces. Control characters are removed.
    Special-token texts (control tokens, image placeholders) are removed until none is left, because removing one, or
    the spaces within one, can join the halves of another. This takes one pass, since texts may nest a million deep.
    """
    specials = sorted({special for special in special_texts if special}, key=len, reverse=True)
    # Spaces first: line breaks are control characters too, and removing them would turn "1\r2" into "12".
    text = " ".join(_CONTROL_CHARACTERS.sub("", " ".join(text.split())).split())
    if not any(special in text for special in specials):
        return text
    ending: dict[str, list[str]] = {}
    for special in specials:
        ending.setdefault(special[-1], []).append(special)
    kept: list[str] = []
    for character in text:
        if character == " " and (not kept or kept[-1] == " "):
            continue
        kept.append(character)
        for special in ending.get(character, ()):
            if "".join(kept[-len(special) :]) == special:
                del kept[-len(special) :]
                break
    return "".join(kept).rstrip()
