"""Which problems a validation reads, and how many responses it asks for leaks, by batches of problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from factories import rollouts_of

from cepo.config.schema import TrainerConfig
from cepo.metrics import Metrics, results, sum_value
from cepo.rollout.generator import SamplingSettings
from cepo.trainer import validation
from cepo.trainer.rollouts import Rollouts
from cepo.trainer.validation import Validator


class Sampler:
    """Answers each problem, a number, with two right responses; remembers the problems."""

    contexts = None

    def __init__(self) -> None:
        self.asked: list[int] = []

    def sample(self, problems: Sequence[int], *_: object, **__: object) -> Rollouts:
        self.asked += problems
        return rollouts_of(
            [(1,)] * 2 * len(problems),
            [1.0] * 2 * len(problems),
            problems=list(problems),
            prompts=[None] * len(problems),
        )


def validator(sampler: Sampler, num_problems: int, batch_size: int, **settings: Any) -> Validator:
    sampling = SamplingSettings(num_samples=2, max_response_length=1)
    trainer = TrainerConfig(val_generations_to_log=0, **settings)
    problems: Any = list(range(num_problems))
    return Validator(problems, cast("Any", sampler), settings=sampling, batch_size=batch_size, trainer=trainer)


@pytest.mark.parametrize(
    ("probe_size", "probed"), [(0, []), (3, [3]), (4, [4]), (5, [4, 1]), (9, [4, 4, 1]), (100, [4, 4, 2])]
)
def test_the_leak_probe_reads_the_first_responses_of_all_batches(
    monkeypatch: pytest.MonkeyPatch, probe_size: int, probed: list[int]
) -> None:
    """Five problems in batches of two, two responses each: a probe ends in the batch that it reaches."""
    num_probed_of_batches: list[int] = []

    def counted(rollouts: Rollouts, num_probed: int, *_: object) -> Metrics:
        num_probed_of_batches.append(num_probed)
        return {"probed": sum_value(num_probed)}

    monkeypatch.setattr(validation, "leak_metrics", counted)
    metrics, _ = validator(Sampler(), 5, 2, leak_probe_size=probe_size).run(cast("Any", None))
    assert num_probed_of_batches == probed
    assert results(metrics).get("probed", 0) == min(probe_size, 10)
    assert results(metrics)["val/num_samples"] == 10


def test_the_subset_follows_the_seed() -> None:
    """The same problems in each validation and each run of a seed, and others with another one."""

    def subset(seed: int) -> list[int]:
        sampler = Sampler()
        seeded_validator = validator(sampler, 1_000, 4, val_max_samples=8, seed=seed, leak_probe_size=0)
        for _ in range(2):
            seeded_validator.run(cast("Any", None))
        assert sampler.asked[:8] == sampler.asked[8:]
        return sampler.asked[:8]

    assert subset(1) == subset(1) == sorted(subset(1))
    assert len({tuple(subset(seed)) for seed in range(4)}) == 4
