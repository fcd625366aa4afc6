"""Loads reward functions and runs them in a pool of processes, and has names for those who write one.

Names of `cepo.answers` are imported when they are first used: comparing answers needs sympy, which takes a quarter of a
second to load, and a reward of another kind needs none of it.
"""

from typing import TYPE_CHECKING

from cepo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from cepo.answers import decimal_value, value_key
    from cepo.answers import equal as answers_equal
    from cepo.answers import is_number as is_numeric_answer
    from cepo.answers import marked_answer as extract_answer
    from cepo.answers import normal_form as normalise_answer

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
_NAMES_OF_ANSWERS = {
    "answers_equal": "equal",
    "decimal_value": "decimal_value",
    "extract_answer": "marked_answer",
    "is_numeric_answer": "is_number",
    "normalise_answer": "normal_form",
    "value_key": "value_key",
}
"""The name in `cepo.answers` of each name here."""


def __getattr__(name: str) -> object:
    if name not in _NAMES_OF_ANSWERS:
        raise AttributeError(f"module 'cepo.rewards' has no attribute {name!r}")
    from cepo import answers

    return getattr(answers, _NAMES_OF_ANSWERS[name])
