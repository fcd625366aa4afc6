"""The methods that minimise a divergence: presets, who demonstrates, which rows learn, and what masked rows leave behind."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from factories import group, log_probs_like, rollout, same_bits, token_batch

from cepo.algorithms import build_config, build_estimator
from cepo.algorithms.references import positive_references
from cepo.algorithms.settings import PositiveConfig
from cepo.algorithms.teacher_contexts import possible_rows
from cepo.config import check_config, load_config
from cepo.errors import ConfigError
from cepo.files.trees import leaves
from cepo.losses.aggregation import AGGREGATIONS, LossDenominators, token_weights
from cepo.losses.divergence import chunked_divergence, distillation_losses
from cepo.metrics import results
from cepo.types import TextReference, TokenBatch, TokenReference, TokenSignal

both = pytest.mark.parametrize("method", ["opsd", "sdpo"])


def batch_of(shown: list[bool]) -> TokenBatch:
    """Two groups of two; old log-probs are -1, the teacher's -0.5 throughout."""
    old = torch.full((4, 3), -1.0)
    views = {"correct": torch.full((4, 3), -0.5)}
    batch = token_batch([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], lengths=[3, 1, 2, 3], old=old, views=views)
    return dataclasses.replace(batch, has_reference={"correct": torch.tensor(shown)})


def signal_of(method: str, batch: TokenBatch, **config: Any) -> TokenSignal:
    return build_estimator(method, config).signal(batch, step=0)


@both
def test_rows_with_a_reference_or_an_advantage_are_updated(method: str) -> None:
    """Rows 0 and 2 have a reference; with a policy loss the first group, whose rewards differ, learns as well."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5])
    groups = torch.tensor([0, 0, 1, 1])
    has_reference = {"correct": torch.tensor([True, False, True, False])}
    assert build_estimator(method).live_rows(rewards, groups, has_reference).tolist() == [True, False, True, False]
    blended = build_estimator(method, {"distillation": {"policy_weight": 0.5}})
    assert blended.live_rows(rewards, groups, has_reference).tolist() == [True, True, True, False]


@both
def test_rows_with_a_reference_weigh_2_5_and_others_0(method: str) -> None:
    """Whatever the rewards and the teacher's log-probs are."""
    batch = batch_of([True, False, True, False])
    unrewarded = {"token_level_rewards": torch.zeros(4, 3), "correct": torch.zeros(4, dtype=torch.bool)}
    for changed in ({}, unrewarded, {"teacher_log_probs": {}}):
        signal = signal_of(method, dataclasses.replace(batch, **changed), distillation={"weight": 2.5})
        actual = signal.distillation
        assert actual is not None
        assert actual.view == "correct"
        assert actual.divergence == build_config(method, None).distillation.divergence
        assert actual.token_weight.tolist() == [[2.5, 2.5, 2.5], [0.0, 0.0, 0.0], [2.5, 2.5, 0.0], [0.0, 0.0, 0.0]]
        assert torch.count_nonzero(signal.advantages) == 0


@both
def test_a_policy_weight_blends_in_the_group_advantage(method: str) -> None:
    """Weight 0.1 gives a tenth of it. Weight 0 with policy_weight 1 is the group method, bit for bit."""
    batch = batch_of([True] * 4)
    # Rewards 1 and 0: the deviation is sqrt(1/2), the advantage +-sqrt(1/2).
    blended = signal_of(method, batch, distillation={"policy_weight": 0.1})
    assert blended.distillation is not None
    assert blended.advantages[0].tolist() == pytest.approx([0.1 * math.sqrt(0.5)] * 3, rel=1e-5)
    assert blended.advantages[1].tolist() == pytest.approx([-0.1 * math.sqrt(0.5), 0.0, 0.0], rel=1e-5)
    untaught = dataclasses.replace(batch, teacher_log_probs={})
    alone = signal_of(method, untaught, distillation={"weight": 0.0, "policy_weight": 1.0})
    assert alone.distillation is None
    equal = signal_of(method, batch, distillation={"weight": 1.0, "policy_weight": 1.0})
    assert equal.distillation is not None
    for each in (alone, equal):
        assert same_bits(each.advantages, build_estimator("grpo").signal(batch, step=0).advantages)


@both
def test_weight_0_asks_no_teacher_and_leaves_flat_groups_out(method: str) -> None:
    estimator = build_estimator(method, {"distillation": {"weight": 0.0, "policy_weight": 1.0}})
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5])
    groups = torch.tensor([0, 0, 1, 1])
    assert not estimator.needs_teacher(step=0)
    assert possible_rows(estimator, rewards, groups, with_teachers=False).tolist() == [True, True, False, False]
    assert build_estimator(method).needs_teacher(step=10_000)
    assert possible_rows(build_estimator(method), rewards, groups, with_teachers=True).tolist() == [True] * 4


@both
def test_metrics_count_demonstrated_rollouts_and_the_gain(method: str) -> None:
    """3 of 4 rollouts in 2 of 2 groups have a demonstration; the right one gains half a nat, the wrong ones a quarter."""
    teacher = torch.tensor([-0.5, -0.5, -0.75, -0.75]).unsqueeze(1).expand(4, 3)
    batch = dataclasses.replace(batch_of([True, False, True, True]), teacher_log_probs={"correct": teacher})
    signal = signal_of(method, batch)
    actual = results(signal.metrics)
    assert actual["distillation/demonstrated_rollouts"] == 0.75
    assert actual["distillation/demonstrated_groups"] == 1.0
    assert actual["distillation/delta_mean_right"] == 0.5
    assert actual["distillation/delta_mean_wrong"] == 0.25
    assert signal.diagnostics["delta"].tolist() == [[0.5] * 3, [0.0] * 3, [0.25, 0.25, 0.0], [0.25] * 3]
    none = results(signal_of(method, batch_of([False] * 4)).metrics)
    assert none["distillation/demonstrated_groups"] == 0.0
    assert "distillation/delta_mean_right" not in none


@pytest.mark.parametrize("importance_clip", [None, 2.0])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@both
def test_a_masked_row_has_zero_loss_and_a_zero_gradient(
    method: str, aggregation: str, importance_clip: float | None
) -> None:
    """The gradient is attached: it is 0 and not None."""
    signal = signal_of(
        method, batch_of([True, False, False, False]), distillation={"divergence": {"importance_clip": importance_clip}}
    )
    distillation = signal.distillation
    assert distillation is not None
    generator = torch.Generator().manual_seed(3)
    mask = batch_of([True] * 4).response_mask
    student, teacher = (torch.randn(9, 5, generator=generator) for _ in range(2))
    head = torch.randn(11, 5, generator=generator)
    targets = torch.randint(11, (9,), generator=generator)
    divergence = distillation.divergence
    weight = distillation.token_weight
    actual = chunked_divergence(
        student.requires_grad_(), teacher, head, head, targets, divergence, temperature=1.0, chunk_tokens=4
    )
    log_probs, values = (torch.zeros(4, 3).masked_scatter(mask, each) for each in actual)
    losses, _ = distillation_losses(values, log_probs, torch.full((4, 3), -1.0), weight, divergence)
    losses = losses * token_weights(mask, aggregation, LossDenominators(9, 4, 3))
    masked = losses[1:].sum()
    assert masked.item() == 0.0
    assert masked.requires_grad
    for loss, numbers in ((masked, (0, 0)), (losses.sum(), (15, 0))):
        (gradient,) = torch.autograd.grad(loss, student, retain_graph=True)
        assert tuple(int(torch.count_nonzero(rows)) for rows in (gradient[:3], gradient[3:])) == numbers


FIRST = rollout(0, 1.0, "70", correct=True, ids=(10, 11, 12))
SECOND = rollout(1, 0.9, "70", correct=True, ids=(20, 21))
WRONG = rollout(2, 0.1, "40", ids=(30,))
ONE = (10, 11, 12)
TWO = (20, 21)
PEER_FULL: dict[str, Any] = {"source": "peer_full", "exclude_self": True}


@pytest.mark.parametrize(
    ("rollouts", "positive", "expected"),
    [
        pytest.param((FIRST, SECOND, WRONG), PEER_FULL, [TWO, ONE, ONE], id="two right, one wrong"),
        pytest.param((FIRST, WRONG), PEER_FULL, [None, ONE], id="the lone success teaches the others only"),
        pytest.param((FIRST, SECOND, WRONG), PEER_FULL | {"success_threshold": 0.95}, [None, ONE, ONE], id="by reward"),
        pytest.param((SECOND, WRONG), PEER_FULL | {"success_threshold": 0.1}, [(30,), TWO], id="the wrong one last"),
        pytest.param((FIRST, WRONG), {"exclude_self": True}, ["70", "70"], id="an answer is nobody's own"),
        pytest.param((FIRST, SECOND, WRONG), {"source": "peer_full"}, [ONE] * 3, id="the own one is not excluded"),
    ],
)
def test_table_of_demonstrations(
    rollouts: tuple[Any, ...], positive: dict[str, Any], expected: list[tuple[int, ...] | str | None]
) -> None:
    references = build_estimator("sdpo", {"positive": positive}).references(group(*rollouts))["correct"]
    contents = [getattr(reference, "token_ids", None) or getattr(reference, "text", None) for reference in references]
    assert contents == expected


def test_a_worked_solution_is_cut_to_num_tokens_or_required() -> None:
    solved = dataclasses.replace(group(FIRST, WRONG), solution="Angles sum to 180, so x = 70.")
    config = PositiveConfig(source="solution", num_tokens=300)
    wanted = TextReference(text="Angles sum to 180, so x = 70.", max_tokens=300)
    assert positive_references(solved, config) == [wanted, wanted]
    lacking = r"positive\.source is 'solution', but problem p has no worked solution\..*column"
    with pytest.raises(ConfigError, match=lacking):
        positive_references(group(FIRST, WRONG), config)
    either = PositiveConfig(source="solution_or_answer", num_tokens=300)
    assert positive_references(solved, either) == [wanted, wanted]
    assert positive_references(group(FIRST, WRONG), either) == [TextReference(text="70")] * 2


def test_the_sources_of_references_are_those_of_the_settings() -> None:
    sources = ("ground_truth", "solution", "solution_or_answer", "peer_full")
    for source in sources:
        assert build_estimator("opsd", {"positive": {"source": source}}).reference_sources == [source]
    assert build_estimator("cepo").reference_sources == ["ground_truth", "peer_answer"]
    assert build_estimator("grpo").reference_sources == []


@pytest.mark.parametrize(
    ("section", "needed"),
    [
        ({}, False),
        ({"distillation": {"policy_weight": 0.5}}, True),
        ({"positive": {"source": "peer_full"}}, True),
        ({"positive": {"source": "solution"}}, False),
    ],
)
def test_one_rollout_per_prompt_is_enough_without_peers(section: dict[str, Any], needed: bool) -> None:
    assert ("group_ids" in build_estimator("opsd", section).reads) is needed
    arguments = ["worker.rollout.n=1", "algorithm.adv_estimator=opsd"]
    arguments += [f"algorithm.{key}={value}" for key, value in leaves(section) if key]
    run = load_config(["config=configs/microgeo/base.yaml", *arguments])
    if needed:
        with pytest.raises(ConfigError, match=r"worker\.rollout\.n=1 with algorithm\.adv_estimator=opsd"):
            check_config(run)
        return
    assert "samples per step: 32 prompts x 1 responses = 32" in check_config(run)
    old, view = log_probs_like((2, 3, 4), 1)
    batch = token_batch([1.0, 0.0, 1.0], [0, 1, 2], lengths=[4, 2, 3], old=old, views={"correct": view})
    distillation = build_estimator("opsd", section).signal(batch, step=0).distillation
    assert distillation is not None
    assert int(distillation.token_weight.sum()) == 9


def test_right_rollouts_learn_from_advantages_wrong_ones_do_not() -> None:
    """SRPO: row 1 is wrong and taught; row 3 is wrong in a group without a right response, where A is 0."""
    batch = batch_of([False, True, False, False])
    signal = signal_of("srpo", batch)
    distillation = signal.distillation
    assert distillation is not None
    assert distillation.token_weight.tolist() == [[0.0] * 3, [1.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3]
    size = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert signal.advantages.tolist() == [[pytest.approx(size)] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3]
    learned = distillation.token_weight.ne(0) & signal.advantages.ne(0)
    assert not learned.any(), "a token learns from one loss alone"


def test_only_wrong_rollouts_read_the_groups_right_response() -> None:
    """The wrong one reads the first success; in a group without a success nobody reads anything."""
    references = build_estimator("srpo").references(group(FIRST, SECOND, WRONG))["correct"]
    assert references == [None, None, TokenReference(token_ids=ONE, source_index=0)]
    assert build_estimator("srpo").references(group(WRONG))["correct"] == [None]


def test_srpo_weights_by_entropy_as_released() -> None:
    """All configurations of the release have `srpo_beta` 1."""
    srpo = build_estimator("srpo")
    assert srpo.reads_teacher_entropies
    assert srpo.reads == ("group_ids", "old_log_probs")


def test_srpo_without_distillation_is_grpo() -> None:
    batch = dataclasses.replace(batch_of([True] * 4), teacher_log_probs={}, has_reference={})
    signal = signal_of("srpo", batch, distillation={"weight": 0.0, "policy_weight": 1.0})
    assert signal.distillation is None
    assert same_bits(signal.advantages, build_estimator("grpo").signal(batch, step=0).advantages)


def test_srpo_updates_taught_rows_and_rows_with_an_advantage() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    groups = torch.tensor([0, 0, 1, 1])
    has_reference = {"correct": torch.tensor([False, True, False, False])}
    assert build_estimator("srpo").live_rows(rewards, groups, has_reference).tolist() == [True, True, False, False]
