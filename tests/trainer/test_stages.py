"""The stages of a step on small rollouts: filtering, what references are chosen from, the KL in the reward, optimizer batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from factories import response_mask, rollouts_of
from torch import Tensor

from cepo.algorithms import build_estimator
from cepo.algorithms.references import wrong_candidates, wrong_reference
from cepo.algorithms.settings import NegativeConfig
from cepo.config.schema import AlgorithmConfig
from cepo.config.worker_schema import RewardConfig
from cepo.data.batch import token_array
from cepo.data.prompts import Problem
from cepo.losses.kl import kl_penalty
from cepo.metrics import results
from cepo.models.interface import EncodedPrompt
from cepo.rewards.pool import RewardPool
from cepo.rollout.generator import Generation
from cepo.trainer.batches import actor_batches, restricted, scored_batch
from cepo.trainer.checkpoints import TrainerState
from cepo.trainer.filtering import sample_until_enough
from cepo.trainer.penalty import penalise
from cepo.trainer.planning import ScoringPlan, make_plan
from cepo.trainer.recording import reward_metrics
from cepo.trainer.rollout_groups import PromptResponses, described_groups, rollout_groups
from cepo.trainer.rollouts import Rollouts
from cepo.types import Distillation, DivergenceConfig, RolloutGroup, TokenSignal

PROMPT = EncodedPrompt(token_ids=(7,), engine_ids=(7,), images=None)


def rounds_mixed_from(first: int) -> Callable[[int], Rollouts]:
    """Rounds of one prompt with two responses, both wrong before round `first`, of which one is right from then on."""

    def next_round(before: int) -> Rollouts:
        return rollouts_of([(1,), (1,)], [float(before + 1 >= first), 0.0], num_raised=2, num_timed_out=1)

    return next_round


@pytest.mark.parametrize(
    ("max_rounds", "rounds_per_pass", "rounds", "filled"),
    [
        (20, 1, 20, 2), (40, 1, 26, 0), (1, 9, 2, 2),
        # Without a limit three passes over the data without a gain end it: 27 rounds reach the 25th, 24 do not.
        (0, 9, 26, 0), (-1, 9, 26, 0), (0, 8, 24, 2),
    ],
)  # fmt: skip
def test_rounds_are_asked_up_to_the_limit(max_rounds: int, rounds_per_pass: int, rounds: int, filled: int) -> None:
    """Without one, as long as 3 passes over the data keep a group."""
    rollouts = sample_until_enough(
        rounds_mixed_from(25), AlgorithmConfig(), num_groups=2, max_rounds=max_rounds, rounds_per_pass=rounds_per_pass
    )
    values = results(rollouts.metrics)
    assert (values["filter/rounds"], values["filter/filled_groups"]) == (rounds, filled)
    assert values["filter/kept_fraction"] == (2 - filled) / rounds, "a round has one group"
    assert rollouts.rewards.tolist() == ([0.0] * 4 if filled else [1.0, 0.0] * 2)
    failed = rollouts.num_raised, rollouts.num_timed_out
    assert failed == (2 * rounds, rounds), "failures of dropped groups count too"


def test_a_kept_group_begins_the_count_of_rounds_anew() -> None:
    """Every third round has a mixed group; three passes of one round each without any would end the sampling."""

    def next_round(before: int) -> Rollouts:
        return rollouts_of([(1,), (1,)], [float(before % 3 == 2), 0.0])

    rollouts = sample_until_enough(next_round, AlgorithmConfig(), num_groups=3, max_rounds=0, rounds_per_pass=1)
    values = results(rollouts.metrics)
    assert (values["filter/rounds"], values["filter/filled_groups"]) == (9, 0)


LOG2 = math.log(2)
REWARDS = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
"""Two responses of 2 and 1 tokens, with rewards 1 and 0. The log-prob of each token is that of 1/2."""
# x - y is log 2, 0 and 2 log 2; the 7 stands on padding.
KL = kl_penalty(
    torch.tensor([[-LOG2, -LOG2], [-LOG2, 0.0]]), torch.tensor([[-2 * LOG2, -LOG2], [-3 * LOG2, 7.0]]), "kl"
)


def penalised(penalties: Tensor, **settings: Any) -> tuple[Tensor, dict[str, float], float]:
    """The rewards, the metrics, and the coefficient afterwards, which is 0.1 before."""
    mask = torch.tensor([[True, True], [True, False]])
    state = TrainerState(kl_coefficient=0.1)
    rewards, metrics = penalise(REWARDS, penalties, mask, AlgorithmConfig(**settings), state)
    return rewards, results(metrics), state.kl_coefficient


def test_each_token_loses_the_coefficient_times_its_kl() -> None:
    rewards, metrics, coefficient = penalised(KL, kl_penalty="kl")
    torch.testing.assert_close(rewards, torch.tensor([[-0.1 * LOG2, 1.0], [-0.2 * LOG2, 0.0]]), atol=1e-7, rtol=0)
    assert metrics == {"critic/kl": pytest.approx(1.25 * LOG2), "critic/kl_coef": 0.1}
    assert coefficient == 0.1


def test_an_adaptive_coefficient_follows_the_mean_over_rows() -> None:
    """As in EasyR1: the rows' means are log 2 / 2 and 2 log 2, a tenth too far; 2 sequences of a horizon of 20: 1 % more."""
    adaptive = {"kl_type": "adaptive", "kl_target": 1.25 * LOG2 / 1.1, "kl_horizon": 20.0}
    _, metrics, coefficient = penalised(KL, kl_penalty="kl", **adaptive)
    assert metrics["critic/kl_coef"] == 0.1
    assert coefficient == pytest.approx(0.1 * 1.01)


def test_a_kl_in_the_loss_leaves_the_rewards_alone() -> None:
    rewards, metrics, _ = penalised(KL, kl_penalty="kl", use_kl_loss=True)
    assert metrics == {"critic/kl": pytest.approx(1.25 * LOG2)}
    assert torch.equal(rewards, REWARDS)


@pytest.mark.parametrize("on_policy", [True, False])
def test_an_entropy_in_the_loss_updates_rows_without_a_signal(on_policy: bool) -> None:
    """Equal rewards leave no row live; the update needs all rows, and the log-probs of those that it finds off policy."""
    plan = make_plan(
        rollouts_of([(1, 2), (3,)], [1.0, 1.0], prompts=[PROMPT]),
        [],
        build_estimator("grpo"),
        cast("Any", None),
        on_policy=torch.tensor([on_policy, on_policy]),
        every_row=False,
        updates_every_row=True,
    )
    assert plan.live.tolist() == [False, False]
    assert plan.updated.tolist() == [True, True]
    assert sorted(plan.student) == ([] if on_policy else [0, 1])


LENGTHS = (4, 2, 3, 4)
MASK = response_mask(LENGTHS)
ENTROPIES = torch.tensor([[0.1, 2.0, 0.5, 0.0], [1.5, 0.2, 0, 0], [0.3, 0.9, 0.4, 0], [9.0, 9.0, 9.0, 9.0]])


def learning(entropies: Tensor | None, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """Which tokens of four responses still learn, of which the second was cut and the fourth is not live.

    Advantages and the weight of the divergence are left out alike.
    """
    whole = rollouts_of([(1,) * length for length in LENGTHS])
    weights = MASK.float()
    cut = [dataclasses.replace(generation, finished=row != 1) for row, generation in enumerate(whole.generations)]
    distillation = Distillation(view="correct", divergence=DivergenceConfig(), token_weight=weights)
    signal = restricted(
        TokenSignal(advantages=2 * weights, distillation=distillation),
        dataclasses.replace(whole, generations=cut),
        torch.tensor([True, True, True, False]),
        entropies,
        AlgorithmConfig(**settings),
    )
    assert signal.distillation is not None
    assert torch.equal(signal.distillation.token_weight * 2, signal.advantages)
    return signal.advantages > 0, results(signal.metrics)


def test_tokens_of_cut_responses_teach_nothing_if_asked() -> None:
    assert torch.equal(learning(None)[0], MASK)
    learns, _ = learning(None, overlong_filter=True)
    assert torch.equal(learns, MASK & torch.tensor([True, False, True, True]).unsqueeze(1))


def test_the_top_share_of_live_tokens_by_entropy_learns() -> None:
    """A third of the 9 tokens of live rows is 3: those of 2.0, 1.5 and 0.9; dead rows do not raise the threshold."""
    learns, metrics = learning(ENTROPIES, top_entropy=1 / 3)
    assert learns[:3].nonzero().tolist() == [[0, 1], [1, 0], [2, 1]]
    assert metrics["rollout/learning_tokens"] == 3 / 9
    assert abs(metrics["rollout/vocabulary_entropy"] - 5.9 / 9) < 1e-6


def test_at_least_one_token_learns_and_none_of_a_cut_response() -> None:
    """Without the cut response 7 tokens are left, of which a seventh is 1."""
    learns, _ = learning(ENTROPIES, top_entropy=1 / 7, overlong_filter=True)
    assert learns[:3].nonzero().tolist() == [[0, 1]]
    assert int(learning(ENTROPIES, top_entropy=1e-9)[0][:3].sum()) == 1


TRAINERS = -1.0
ENGINES = -2.0


def two_prompts() -> Rollouts:
    """Two prompts with two responses of three tokens each; the engine says -2 of every token."""
    generation = Generation.of([1, 2, 3], [ENGINES] * 3, finished=True)
    prompts = [SimpleNamespace(token_ids=(7,))] * 2
    return rollouts_of([(1, 2, 3)] * 4, problems=[None] * 2, prompts=prompts, generations=[generation] * 4)


def test_batches_after_the_first_have_both_log_probs() -> None:
    """Importance weights for the gap between engine and trainer need the engine's too."""
    plan = ScoringPlan(
        rollouts=two_prompts(),
        live=torch.ones(4, dtype=torch.bool),
        updated=torch.ones(4, dtype=torch.bool),
        on_policy=torch.tensor([True, True, False, False]),
        student={},
        views=(),
        metrics={},
    )
    scored = dataclasses.replace(scored_batch(plan, {}), old_log_probs=torch.full((4, 3), TRAINERS))
    signal = TokenSignal(advantages=torch.ones(4, 3))
    first, second = actor_batches(scored, signal, num_prompts=1, max_response_length=3)
    assert first.old_log_probs is None  # the update's own
    assert second.old_log_probs is not None
    assert second.old_log_probs.unique().tolist() == [TRAINERS]
    for batch in (first, second):
        assert batch.sampled_log_probs.unique().tolist() == [ENGINES]


def test_no_score_replaces_a_metric_of_the_rewards() -> None:
    """Rewards 1 and 3: mean 2, deviation 1, one of two right. `accuracy` is the function's own name; `mean` is not."""
    names_of_metrics = {"mean": 0.5, "std": 8.0, "correct": 7.0, "num_raised": 6.0}
    scores = [
        {"overall": 1.0, "accuracy": 1.0, **names_of_metrics},
        {"overall": 3.0, "accuracy": 0.5, **names_of_metrics},
    ]
    prompts = cast("Any", [SimpleNamespace(token_ids=(7,))])
    rollouts = rollouts_of([(1, 2), (1, 2)], [1.0, 3.0], scores=scores, prompts=prompts)
    values = results(reward_metrics(rollouts))
    assert values["reward/mean"] == 2.0
    assert values["reward/std"] == 1.0
    assert values["reward/correct"] == 0.5
    assert values["reward/num_raised"] == 0.0
    assert values["reward/accuracy"] == 0.75
    for name, value in names_of_metrics.items():
        assert values[f"reward/score.{name}"] == value
    assert "reward/score.accuracy" not in values


END = 90
STOP = 91


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(RewardConfig()) as opened:
        yield opened


def group_of(
    pool: RewardPool,
    truth: str,
    responses: list[tuple[str, bool]],
    *,
    ids: list[tuple[int, ...]] | None = None,
    with_values: bool = False,
) -> RolloutGroup:
    """One group of responses with the verifier's verdict on each."""
    texts, right = zip(*responses, strict=True)
    problem = Problem(prompt_id="0", text="?", images=(), ground_truth=truth, solution=None, columns={})
    tokens = ids or [(1, 2, END)] * len(responses)
    rollouts = rollouts_of(tokens, [*map(float, right)], step=3, problems=[problem], responses=texts)
    processing = SimpleNamespace(special_texts=["<|im_end|>"], eos_token_ids=(END, STOP))
    (group,) = rollout_groups(rollouts, pool, cast("Any", processing), seed=7, with_values=with_values)
    return group


def test_an_answer_equal_to_the_truth_is_no_wrong_reference(pool: RewardPool) -> None:
    # A stricter verifier than the grader, one that wants another format or a proof.
    group = group_of(pool, "0.5", [(r"\boxed{0.5}", True), (r"\boxed{1/2}", False), (r"\boxed{3}", False)])
    assert [rollout.answer_equals_ground_truth for rollout in group.rollouts] == [True, True, False]
    assert [rollout.answer for rollout in wrong_candidates(group, NegativeConfig())] == ["3"]
    chosen = wrong_reference(group, NegativeConfig())
    assert chosen is not None
    assert (chosen.text, chosen.source_index) == ("3", 2)


def test_a_rounding_of_the_truth_is_no_wrong_reference(pool: RewardPool) -> None:
    answers = ["8.66", "8.7", "8.6", "9", "10"]
    group = group_of(pool, r"5 \sqrt { 3 }", [(rf"\boxed{{{answer}}}", False) for answer in answers])
    assert [rollout.answer for rollout in wrong_candidates(group, NegativeConfig())] == ["10"]
    whole = group_of(pool, "100", [(rf"\boxed{{{answer}}}", False) for answer in ("101", "99", "100.4")])
    assert [rollout.answer for rollout in wrong_candidates(whole, NegativeConfig())] == ["101", "99"]


def test_the_most_frequent_answer_is_counted_by_value(pool: RewardPool) -> None:
    """0.5 is written in three ways and 7 twice alike: by spelling 7 is the most frequent, by value 0.5."""
    answers = ["7", "7", r"\frac{1}{2}", "0.5", r"50\%"]
    responses = [(rf"\boxed{{{answer}}}", False) for answer in answers]
    chosen = wrong_reference(group_of(pool, "3", responses, with_values=True), NegativeConfig(select="most_frequent"))
    assert chosen is not None
    assert (chosen.text, chosen.source_index) == (r"\frac{1}{2}", 2)


def test_each_prompt_is_judged_by_its_own_truth_and_rows(pool: RewardPool) -> None:
    """Groups of 1 and 3: 0.5 is not 3; of the second, 1/2 states the truth 0.5, and 7 does not."""
    codec = cast("Any", SimpleNamespace(special_texts=[], eos_token_ids=(END,)))
    said = [["0.5"], ["0.5", "1/2", "7"]]
    verdicts = [[False], [True, False, False]]
    prompts: list[PromptResponses] = []
    for number, truth in enumerate(["3", "0.5"]):
        prompt = PromptResponses(
            prompt_id=str(number),
            ground_truth=truth,
            solution=None,
            responses=[rf"\boxed{{{answer}}}" for answer in said[number]],
            response_ids=[token_array([1, END])] * len(said[number]),
            rewards=[float(is_right) for is_right in verdicts[number]],
            correct=verdicts[number],
        )
        prompts.append(prompt)
    first, second = described_groups(prompts, pool, codec, seed=0, step=0, with_values=True)
    (half,) = first.rollouts
    assert half.answer == "0.5"
    assert half.answer_equals_ground_truth is False
    assert half.answer_value == "0.5"
    assert [rollout.answer for rollout in second.rollouts] == said[1]
    assert [rollout.answer_equals_ground_truth for rollout in second.rollouts] == [True, True, False]
    assert [rollout.answer_value for rollout in second.rollouts] == [None, "0.5", "7"]


def test_a_response_without_an_answer_is_wrong_and_no_candidate(pool: RewardPool) -> None:
    """Peers see responses without their end tokens."""
    responses = [("no idea", False), (r"\boxed{<|im_end|>}", False), (r"\boxed{6}", False), (r"\boxed{5}", True)]
    group = group_of(pool, "5", responses, ids=[(4, 5, 6), (1, 2, END), (1, END), (3, STOP, END)])
    assert [rollout.answer for rollout in group.rollouts] == [None, None, "6", "5"]
    assert [rollout.index for rollout in wrong_candidates(group, NegativeConfig())] == [2]
    assert [rollout.response_ids.tolist() for rollout in group.rollouts] == [[4, 5, 6], [1, 2], [1], [3]]
    assert (group.seed, group.step, group.prompt_id) == (7, 3, "0")
