"""Does this answer state this truth? Readers of final answers, and the one comparison of answers.

    >>> from cepo.answers import equal, final_answer
    >>> equal(final_answer(r"... so it is \\boxed{500 cm}."), "5 m")
    True

The package imports nothing else of cepo. `trl_reward` and `verl_reward` are reward functions for other trainers.

No function here has a time limit of its own: reading and comparing is bounded, but simplifying a relation may take long.
cepo's own training calls them in the worker processes of `cepo.rewards.pool`, which are killed after a time limit.
"""

from cepo.answers.choices import LETTERS, chosen
from cepo.answers.comparison import equal
from cepo.answers.final_answers import AnswerKind, final_answer, is_number, kind_of, marked_answer, yes_or_no
from cepo.answers.reward_functions import trl_reward, verl_reward
from cepo.answers.values import decimal_value, is_rounding, normal_form, states_the_same, value_key

__all__ = [
    "LETTERS",
    "AnswerKind",
    "chosen",
    "decimal_value",
    "equal",
    "final_answer",
    "is_number",
    "is_rounding",
    "kind_of",
    "marked_answer",
    "normal_form",
    "states_the_same",
    "trl_reward",
    "value_key",
    "verl_reward",
    "yes_or_no",
]
