"""Runs a user's Jinja template in a sandbox; every failure becomes an error that names the template."""

from __future__ import annotations

from pathlib import Path

from jinja2 import StrictUndefined
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment

from cepo.errors import ConfigError, ForeignFileError
from cepo.foreign_files import read_text


def template_text(path: str, origin: str, accepted: str) -> str:
    """Returns the text of a template file; raises `ConfigError` if it is no regular file in UTF-8."""
    try:
        return read_text(Path(path))
    except ForeignFileError as error:
        raise ConfigError(f"{origin} {error.fault}; give a Jinja file {accepted}") from error


class UserTemplate:
    """Parses and renders a template. `origin` names it in errors; `variables` are those that it uses.

    Raises:
        ConfigError: the text does not parse.
    """

    def __init__(self, source: str, origin: str, *, keep_trailing_newline: bool = False) -> None:
        environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=keep_trailing_newline)
        self._origin = origin
        try:
            self._template = environment.from_string(source)
            self.variables = find_undeclared_variables(environment.parse(source))
        except Exception as error:  # Jinja also raises the errors of expressions that it evaluates in advance
            raise ConfigError(f"{origin} does not parse: {error}") from error

    def render(self, **values: str) -> str:
        """Returns the text with the values filled in. The values themselves are not treated as templates.

        Raises:
            ConfigError: the template fails for these values.
        """
        try:
            return self._template.render(**values)
        except Exception as error:  # a template is a program: it can raise anything
            raise ConfigError(f"{self._origin} cannot be rendered: {type(error).__name__}: {error}") from error
