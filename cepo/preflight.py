"""What a run looks at before it loads a library or a model, so that a mistake costs a second."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cepo.config import RunConfig
from cepo.errors import RewardError

if TYPE_CHECKING:
    from cepo.data.dataset import ProblemSet
    from cepo.data.mixing import MixedProblems
    from cepo.rewards import RewardPool

logger = logging.getLogger("cepo.train")


def check_before_imports(config: RunConfig) -> None:
    """Looks at what needs neither torch nor an engine.

    Raises:
        RewardError: the reward file is no Python, or imports what is not installed.
    """
    from cepo.rewards.imports import require_imports
    from cepo.rewards.loader import resolve_reward_path

    for spec in config.worker.reward.reward_functions:
        require_imports(resolve_reward_path(spec)[0])


def try_reward(rewards: RewardPool, problems: ProblemSet | MixedProblems) -> None:
    """Asks the reward function about a first problem, with its own answer as the response.

    A function that raises is only warned of: it may be meant to, for such a response.

    Raises:
        RewardError: what it returns is no score.
    """
    from cepo.trainer.measures import reward_input

    problem = problems[0]
    failure = rewards.trial(reward_input(problem, problem.ground_truth, 1))
    if failure is None:
        return
    if failure.breaks_contract:
        raise RewardError(f"worker.reward.reward_function={rewards.spec}: {failure.details}")
    logger.warning(
        "the reward function fails for a first problem's own answer: %s. If it fails for every response of the first step, the "
        "run ends there",
        failure.reason,
    )
