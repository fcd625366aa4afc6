"""Checks the types of arguments of functions that users call from Python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from cepo.errors import ConfigError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def checks_types(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes a function refuse an argument of another type than it declares, by a `ConfigError` that names both.

    Arguments are passed on as they are, which pydantic's own `validate_call` would convert.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        hints = get_type_hints(function)
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"cepo.{function.__name__}: {error}; it takes {', '.join(signature.parameters)}") from None
        for name, value in arguments.items():
            try:
                TypeAdapter(hints[name]).validate_python(value)
            except ValidationError:
                accepted = signature.parameters[name].annotation
                raise ConfigError(
                    f"cepo.{function.__name__}: {name} must be {accepted}, got a {type(value).__name__}: {value!r:.100}"
                ) from None
        return function(*args, **kwargs)

    return checked
