"""The methods that minimise a divergence: presets, who demonstrates, which rows learn, and what masked rows leave behind."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from factories import group, log_probs_like, rollout, same_bits, signal_of, token_batch

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
from cepo.types import TextReference, TokenBatch, TokenReference

both_methods = pytest.mark.parametrize("method", ["opsd", "sdpo"])


def batch_of(shown: list[bool]) -> TokenBatch:
    """Two groups of two; old log-probs are -1, the teacher's -0.5 throughout."""
    old = torch.full((4, 3), -1.0)
    views = {"correct": torch.full((4, 3), -0.5)}
    batch = token_batch([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], lengths=[3, 1, 2, 3], old=old, views=views)
    return dataclasses.replace(batch, has_reference={"correct": torch.tensor(shown)})


REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.5])
GROUPS = torch.tensor([0, 0, 1, 1])


@both_methods
def test_rows_with_a_reference_or_an_advantage_are_updated(method: str) -> None:
    """Rows 0 and 2 have a reference; with a policy loss the first group, whose rewards differ, learns as well."""
    has_reference = {"correct": torch.tensor([True, False, True, False])}
    distilled = build_estimator(method)
    live = distilled.live_rows(REWARDS, GROUPS, has_reference)
    assert live.tolist() == [True, False, True, False]
    blended = build_estimator(method, {"distillation": {"policy_weight": 0.5}})
    live = blended.live_rows(REWARDS, GROUPS, has_reference)
    assert live.tolist() == [True, True, True, False]


@both_methods
def test_rows_with_a_reference_weigh_2_5_and_others_0(method: str) -> None:
    """Whatever the rewards and the teacher's log-probs are."""
    batch = batch_of([True, False, True, False])
    unrewarded = dataclasses.replace(batch, token_level_rewards=torch.zeros(4, 3), correct=torch.zeros(4).bool())
    unscored = dataclasses.replace(batch, teacher_log_probs={})
    expected = [[2.5, 2.5, 2.5], [0.0, 0.0, 0.0], [2.5, 2.5, 0.0], [0.0, 0.0, 0.0]]
    for changed in (batch, unrewarded, unscored):
        signal = signal_of(method, changed, distillation={"weight": 2.5})
        distillation = signal.distillation
        assert distillation is not None
        assert distillation.view == "correct"
        assert distillation.divergence == build_config(method, None).distillation.divergence
        assert distillation.token_weight.tolist() == expected
        assert torch.count_nonzero(signal.advantages) == 0


@both_methods
def test_a_policy_weight_blends_in_the_group_advantage(method: str) -> None:
    """Rewards of 1 and 0 have the deviation sqrt(1/2) and the advantages +-sqrt(1/2), of which weight 0.1 is a tenth."""
    blended = signal_of(method, batch_of([True] * 4), distillation={"policy_weight": 0.1})
    assert blended.distillation is not None
    tenth = 0.1 * math.sqrt(0.5)
    assert blended.advantages[0].tolist() == pytest.approx([tenth, tenth, tenth], rel=1e-5)
    assert blended.advantages[1].tolist() == pytest.approx([-tenth, 0.0, 0.0], rel=1e-5)


@both_methods
def test_a_policy_weight_of_1_is_the_group_method_bit_for_bit(method: str) -> None:
    batch = batch_of([True] * 4)
    grpo = signal_of("grpo", batch)

    with_distillation = signal_of(method, batch, distillation={"weight": 1.0, "policy_weight": 1.0})
    assert with_distillation.distillation is not None
    assert same_bits(with_distillation.advantages, grpo.advantages)

    untaught = dataclasses.replace(batch, teacher_log_probs={})
    policy_alone = signal_of(method, untaught, distillation={"weight": 0.0, "policy_weight": 1.0})
    assert policy_alone.distillation is None
    assert same_bits(policy_alone.advantages, grpo.advantages)


@both_methods
def test_weight_0_asks_no_teacher_and_leaves_flat_groups_out(method: str) -> None:
    policy_alone = build_estimator(method, {"distillation": {"weight": 0.0, "policy_weight": 1.0}})
    assert not policy_alone.needs_teacher(step=0)
    rows = possible_rows(policy_alone, REWARDS, GROUPS, with_teachers=False)
    assert rows.tolist() == [True, True, False, False]
    distilled = build_estimator(method)
    assert distilled.needs_teacher(step=10_000)
    rows = possible_rows(distilled, REWARDS, GROUPS, with_teachers=True)
    assert rows.tolist() == [True, True, True, True]


@both_methods
def test_metrics_count_demonstrated_rollouts_and_the_gain(method: str) -> None:
    """3 of 4 rollouts in 2 of 2 groups have a demonstration; the right one gains half a nat, the wrong ones a quarter."""
    teacher = torch.tensor([[-0.5], [-0.5], [-0.75], [-0.75]]).expand(4, 3)
    batch = dataclasses.replace(batch_of([True, False, True, True]), teacher_log_probs={"correct": teacher})
    signal = signal_of(method, batch)
    metrics = results(signal.metrics)
    assert metrics["distillation/demonstrated_rollouts"] == 0.75
    assert metrics["distillation/demonstrated_groups"] == 1.0
    assert metrics["distillation/delta_mean_right"] == 0.5
    assert metrics["distillation/delta_mean_wrong"] == 0.25
    delta = signal.diagnostics["delta"]
    assert delta.tolist() == [[0.5, 0.5, 0.5], [0.0, 0.0, 0.0], [0.25, 0.25, 0.0], [0.25, 0.25, 0.25]]


@both_methods
def test_without_a_demonstration_there_is_no_gain(method: str) -> None:
    signal = signal_of(method, batch_of([False] * 4))
    metrics = results(signal.metrics)
    assert metrics["distillation/demonstrated_groups"] == 0.0
    assert "distillation/delta_mean_right" not in metrics


@pytest.mark.parametrize("importance_clip", [None, 2.0])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@both_methods
def test_a_masked_row_has_zero_loss_and_a_zero_gradient(
    method: str, aggregation: str, importance_clip: float | None
) -> None:
    """The gradient is attached: it is 0 and not None. Row 0 has the first 3 of 9 tokens, with 5 hidden values each."""
    batch = batch_of([True, False, False, False])
    mask = batch.response_mask
    signal = signal_of(method, batch, distillation={"divergence": {"importance_clip": importance_clip}})
    distillation = signal.distillation
    assert distillation is not None
    divergence = distillation.divergence

    generator = torch.Generator().manual_seed(3)
    student = torch.randn(9, 5, generator=generator).requires_grad_()
    teacher = torch.randn(9, 5, generator=generator)
    head = torch.randn(11, 5, generator=generator)
    targets = torch.randint(11, (9,), generator=generator)
    of_tokens = chunked_divergence(student, teacher, head, head, targets, divergence, temperature=1.0, chunk_tokens=4)
    log_probs = torch.zeros(4, 3).masked_scatter(mask, of_tokens[0])
    values = torch.zeros(4, 3).masked_scatter(mask, of_tokens[1])
    losses, _ = distillation_losses(values, log_probs, batch.old_log_probs, distillation.token_weight, divergence)
    losses = losses * token_weights(mask, aggregation, LossDenominators(9, 4, 3))

    masked_loss = losses[1:].sum()
    assert masked_loss.item() == 0.0
    (gradient,) = torch.autograd.grad(masked_loss, student, retain_graph=True)
    assert torch.count_nonzero(gradient) == 0
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    assert torch.count_nonzero(gradient[:3]) == 15
    assert torch.count_nonzero(gradient[3:]) == 0


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
    method = build_estimator("sdpo", {"positive": positive})
    references = method.references(group(*rollouts))["correct"]
    contents: list[object] = []
    for reference in references:
        if isinstance(reference, TokenReference):
            contents.append(reference.token_ids)
        else:
            contents.append(reference and reference.text)
    assert contents == expected


def test_a_worked_solution_is_cut_to_num_tokens_or_required() -> None:
    solved = dataclasses.replace(group(FIRST, WRONG), solution="Angles sum to 180, so x = 70.")
    config = PositiveConfig(source="solution", num_tokens=300)
    solution = TextReference(text="Angles sum to 180, so x = 70.", max_tokens=300)
    assert positive_references(solved, config) == [solution, solution]
    lacking = r"positive\.source is 'solution', but problem p has no worked solution\..*column"
    with pytest.raises(ConfigError, match=lacking):
        positive_references(group(FIRST, WRONG), config)
    either = PositiveConfig(source="solution_or_answer", num_tokens=300)
    assert positive_references(solved, either) == [solution, solution]
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
    assert distillation.token_weight[1].tolist() == [1.0, 0.0, 0.0]
    assert torch.count_nonzero(distillation.token_weight) == 1
    size = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert signal.advantages[0].tolist() == pytest.approx([size, size, size])
    assert torch.count_nonzero(signal.advantages[1:]) == 0
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
    grpo = signal_of("grpo", batch)
    assert same_bits(signal.advantages, grpo.advantages)


def test_srpo_updates_taught_rows_and_rows_with_an_advantage() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    has_reference = {"correct": torch.tensor([False, True, False, False])}
    live = build_estimator("srpo").live_rows(rewards, GROUPS, has_reference)
    assert live.tolist() == [True, True, False, False]
