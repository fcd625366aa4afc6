"""The former place of what `cepo.answers` has; it stays for one release."""

import warnings

from cepo.answers import (
    decimal_value,
    is_rounding,
    states_the_same,
    value_key,
)
from cepo.answers import equal as answers_equal
from cepo.answers import is_number as is_numeric_answer
from cepo.answers import marked_answer as extract_answer
from cepo.answers import normal_form as normalise_answer

__all__ = [
    "answers_equal",
    "decimal_value",
    "extract_answer",
    "is_numeric_answer",
    "is_rounding",
    "normalise_answer",
    "states_the_same",
    "value_key",
]

warnings.warn("cepo.rewards.answers is now cepo.answers", DeprecationWarning, stacklevel=2)
