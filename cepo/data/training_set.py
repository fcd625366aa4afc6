"""Combines training sets, and decides the order of their problems."""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import numpy

from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.data.prompts import Problem
from cepo.errors import ConfigError
from cepo.models.interface import ImageSource
from cepo.models.processing import Processing

logger = logging.getLogger(__name__)


class TrainingProblems:
    """Concatenates the usable rows of one or several sources. Of several, a problem's id is `<source number>:<row>`.

    `weights` are the sources' shares of the prompts; without them all rows form one set: an epoch uses each row once,
    whatever its source. Without `shuffle` rows are visited in the order of the data.
    """

    def __init__(
        self,
        parts: Sequence[ProblemSet],
        *,
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        seed: int = 1,
    ) -> None:
        self._parts = parts
        self._weights = weights
        self._shuffle = shuffle
        self._seed = seed
        self._ends = list(accumulate(len(part) for part in parts))
        self._begins = [0, *self._ends]
        self.most_visuals = most_visuals(*parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Problem:
        part = bisect_right(self._ends, index)
        problem = self._parts[part][index - self._begins[part]]
        if len(self._parts) == 1:
            return problem
        return replace(problem, prompt_id=f"{part}:{problem.prompt_id}")

    def indices(self, step: int, batch_size: int) -> list[int]:
        """Returns the problems of the 0-based `step`, which depend only on the step and `data.seed`.

        Without weights, each pass over the data has its own order.
        """
        if self._weights is not None and len(self._parts) > 1:
            places = weighted_indices(
                step,
                sizes=[len(part) for part in self._parts],
                weights=self._weights,
                batch_size=batch_size,
                shuffle=self._shuffle,
                seed=self._seed,
            )
            return [self._begins[part] + index for part, index in places]
        steps_per_epoch = self.steps_per_epoch(batch_size)
        assert steps_per_epoch > 0, (
            "a batch must not be larger than the problem set; checked when the run is put together"
        )
        epoch, step_of_epoch = divmod(step, steps_per_epoch)
        order = shuffled(len(self), f"{self._seed}/{epoch}") if self._shuffle else range(len(self))
        begin = step_of_epoch * batch_size
        return [*order[begin : begin + batch_size]]

    def steps_per_epoch(self, batch_size: int) -> int:
        return len(self) // batch_size  # an incomplete last batch is dropped, as in EasyR1

    def content(self) -> str:
        return "; ".join(part.content() for part in self._parts)

    def image_probe(self) -> ImageSource | None:
        """Returns the first source's probe that is not None."""
        for part in self._parts:
            probe = part.image_probe()
            if probe is not None:
                return probe
        return None


def read_training_sets(config: DataConfig, processing: Processing, *, with_solutions: bool = False) -> TrainingProblems:
    """Reads all of `data.train_files` and checks every row.

    Raises as `ProblemSet`, for fewer problems than a step needs, and `with_solutions` for a problem that has none.
    """
    parts: list[ProblemSet] = []
    for source in config.train_sources:
        logger.info("reading and checking %s", source)
        part = ProblemSet(source, config, processing)
        if config.teacher_image_key is not None:
            part.require_column("teacher_image_key")
        if with_solutions:
            part.require_solutions()
        parts.append(part)
    sizes = [len(part) for part in parts]
    if sum(sizes) < config.rollout_batch_size:
        raise ConfigError(
            f"data.rollout_batch_size is {config.rollout_batch_size}, but {config.train_files} has {sum(sizes)} usable "
            "problems; accepted: at most as many"
        )
    if len(parts) > 1:
        weights = config.train_weights or sizes
        for source, size, weight in zip(config.train_sources, sizes, weights, strict=True):
            percentage = 100 * weight / sum(weights)
            logger.info("plan: %.1f %% of the prompts from %s (%d problems)", percentage, source, size)
    problems = TrainingProblems(parts, weights=config.train_weights, shuffle=config.shuffle, seed=config.seed)
    if config.train_weights is None or len(parts) == 1:
        _log_left_out(len(problems) % config.rollout_batch_size, len(problems), shuffle=config.shuffle)
    return problems


def _log_left_out(num_left_out: int, size: int, *, shuffle: bool) -> None:
    """Says how many problems the incomplete last batch of a pass has, which is dropped."""
    if num_left_out and shuffle:
        logger.info(
            "%d of the %d problems are left out of each pass over the data, others in each: the incomplete last batch is dropped",
            num_left_out,
            size,
        )
    elif num_left_out:
        logger.warning(
            "the last %d of the %d problems are never trained: data.shuffle=false has the same order in each pass, and the "
            "incomplete last batch is dropped, as in EasyR1. Set data.shuffle=true, or a data.rollout_batch_size that "
            "divides %d",
            num_left_out,
            size,
            size,
        )


@lru_cache(maxsize=16)
def shuffled(size: int, seed: str) -> tuple[int, ...]:
    """Returns the numbers below `size` in the order of this seed."""
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return tuple(order)


def weighted_indices(
    step: int, *, sizes: Sequence[int], weights: Sequence[float], batch_size: int, shuffle: bool, seed: int
) -> list[tuple[int, int]]:
    """Returns pairs (set, index in the set) for the 0-based `step`, with sets drawn in proportion to `weights`.

    Each set has its own epochs, with every problem once per epoch and a new order for each. As in `datasets`'
    `interleave_datasets`, sets are drawn by numpy's generator; its first numbers do not depend on how many are drawn.
    """
    shares = [weight / sum(weights) for weight in weights]
    generator = numpy.random.default_rng(seed)
    sets = generator.choice(len(sizes), size=(step + 1) * batch_size, p=shares)  # of the prompts of all steps so far
    num_before = step * batch_size
    num_used: list[int] = numpy.bincount(
        sets[:num_before], minlength=len(sizes)
    ).tolist()  # of each set, before this step
    sets_of_step: list[int] = sets[num_before:].tolist()
    places: list[tuple[int, int]] = []
    for number in sets_of_step:
        epoch, index = divmod(num_used[number], sizes[number])
        num_used[number] += 1
        if shuffle:
            index = shuffled(sizes[number], f"{seed}/{number}/{epoch}")[index]
        places.append((number, index))
    return places


def most_visuals(*problem_sets: ProblemSet | TrainingProblems | None) -> tuple[int, int]:
    """Returns the largest numbers of images and videos in a prompt, which the engine must accept; ignores None."""
    counts = [problems.most_visuals for problems in problem_sets if problems is not None]
    most_images = max(num_images for num_images, _ in counts)
    most_videos = max(num_videos for _, num_videos in counts)
    return most_images, most_videos
