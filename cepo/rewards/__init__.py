"""Extracts and compares answers, and loads reward functions and runs them in a pool of processes.

The names below are for reward functions. Each is imported when it is first used: comparing answers needs sympy, which
takes a quarter of a second to load, and a reward of another kind needs none of it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cepo.answers.equality import (
        answers_equal,
        decimal_value,
        extract_answer,
        is_numeric_answer,
        normalise_answer,
        value_key,
    )
    from cepo.errors import ConfigError, DataError

__all__ = [
    "ConfigError",
    "DataError",
    "answers_equal",
    "decimal_value",
    "extract_answer",
    "is_numeric_answer",
    "normalise_answer",
    "value_key",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'cepo.rewards' has no attribute {name!r}")
    if name in ("ConfigError", "DataError"):
        from cepo import errors

        return getattr(errors, name)
    from cepo.answers import equality

    return getattr(equality, name)
