"""The clip rates of responses under RLSD and CEPO, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import response_mask, token_batch
from run_folders import group, rollout, write_run

from cepo.algorithms import build_estimator, statistics
from cepo.files.trees import Tree
from cepo.report.credit_view import clip_rates, step_credit
from cepo.report.recorded_run import load_run
from cepo.run_folder.trace import GroupRecord, RolloutRecord
from cepo.types import TokenBatch, TokenSignal

STUDENT = [-1.0, -1.0, -1.0, -1.0]


def response(correct: list[float], wrong: list[float], *, right: bool, reward: float) -> RolloutRecord:
    """A response of four tokens, given how far the teachers' log-probs are from the student's."""
    plain = rollout(right=right, tokens=list("abcd"), delta=None)
    of_correct = [value + shift for value, shift in zip(STUDENT, correct, strict=True)]
    of_wrong = [value + shift for value, shift in zip(STUDENT, wrong, strict=True)]
    return replace(
        plain,
        reward=reward,
        log_probs={"student": STUDENT, "correct": of_correct, "wrong": of_wrong},
        references={"correct": "24", "wrong": "7"},
    )


def three_responses() -> GroupRecord:
    """One with A > 0, one with A < 0, and one in the middle with A = 0."""
    right = response([0.5, 0.5, -0.9, 0.0], [0.4, -0.2, 0.1, 0.0], right=True, reward=1.0)
    wrong = response([0.5, 0.9, -0.5, 0.1], [0.9, 0.0, 0.0, 0.0], right=False, reward=0.0)
    middle = response([2.0] * 4, [0.0] * 4, right=False, reward=0.5)
    return group(1, [right, wrong, middle])


RATES = {
    # The bounds are ln 0.5 = -0.693 and ln 1.5 = 0.405. The right response has the log-weights 0.5, 0.5, -0.9, 0 under rlsd,
    # and 0.1, 0.7, -1.0, 0 under cepo; the wrong one -0.5, -0.9, 0.5, -0.1, and 0.4, -0.9, 0.5, -0.1.
    "rlsd": [{"lower": 0.25, "upper": 0.5, "tokens": 4}, {"lower": 0.25, "upper": 0.25, "tokens": 4}, None],
    "cepo": [{"lower": 0.25, "upper": 0.25, "tokens": 4}, {"lower": 0.25, "upper": 0.25, "tokens": 4}, None],
    "hindsight": [None, None, None],
    "grpo": [None, None, None],
}


def step_of(folder: Path) -> Tree:
    groups = [three_responses()]
    write_run(folder, [(1, {"loss": 1.0})], groups=groups)
    return step_credit(load_run(folder), groups)


@pytest.mark.parametrize("method", RATES)
def test_each_response_has_its_clip_rates_by_method(method: str, tmp_path: Path) -> None:
    step = step_of(tmp_path)
    place = step["methods"].index(method)
    assert [entry["clip_rates"][place] for entry in step["rollouts"]] == RATES[method]


def test_a_weight_at_a_bound_is_not_clipped() -> None:
    low = math.log1p(-0.5)
    high = math.log1p(0.5)
    delta = torch.tensor([[low, high, low - 1e-9, high + 1e-9]], dtype=torch.float64)
    for sign, expected in ((1.0, [0.0, 0.0, -1.0, 1.0]), (0.0, [0.0] * 4)):
        assert statistics.clipping(delta, torch.tensor([[sign]]), clip_radius=0.5).tolist() == [expected]


def random_batch(seed: int) -> TokenBatch:
    """Six rollouts of two groups, of up to nine tokens; a reward of 1/2 makes the third one's advantage 0."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [9, 4, 6, 1, 7, 9]
    mask = response_mask(lengths)
    student, correct, wrong = -3 * torch.rand(3, 6, 9, generator=generator) * mask
    batch = token_batch(
        [1.0, 0.0, 0.5, 1.0, 0.0, 0.0],
        [0, 0, 0, 1, 1, 1],
        lengths=lengths,
        old=student,
        views={"correct": correct, "wrong": wrong},
    )
    return replace(batch, correct=batch.rewards == 1.0)


@pytest.mark.parametrize("baseline", ["group", "hindsight"])
@pytest.mark.parametrize("method", ["rlsd", "cepo"])
def test_rates_over_all_tokens_are_the_training_metrics(method: str, baseline: str) -> None:
    for seed in range(20):
        batch = random_batch(seed)
        estimator = build_estimator(method, {"advantage": {"baseline": baseline}})
        signal: TokenSignal = estimator.signal(batch, step=0)
        rates = clip_rates(signal, batch.response_mask)
        num_tokens = sum(rate["tokens"] for rate in rates.values())
        for metric, bound in (("evidence/clip_low_rate", "lower"), ("evidence/clip_high_rate", "upper")):
            pooled = sum(rate[bound] * rate["tokens"] for rate in rates.values()) / num_tokens
            assert pooled == pytest.approx(signal.metrics[metric].result, abs=1e-6)
