"""Policy losses, KL penalties, the KL coefficient's controller and the critic's loss: by hand, and however the batch is cut."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import pytest
import torch
from case_files import cases
from factories import log_probs_like, response_mask
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad
from worked_examples import tensor

from cepo.config.schema import AlgorithmConfig
from cepo.config.worker_schema import ActorConfig
from cepo.errors import ConfigError
from cepo.losses import PolicyLoss, PolicyTokens, build_loss
from cepo.losses.aggregation import AGGREGATIONS, LossDenominators, token_weights
from cepo.losses.kl import KL_PENALTIES, adapted_coefficient, kl_penalty
from cepo.losses.objective import ObjectiveSettings, policy_metrics, step_metrics
from cepo.losses.registry import section_of
from cepo.losses.value import value_loss, value_metrics
from cepo.metrics import merge_metrics, results

LOSS_TYPES = ("default", "gspo", "gspo_token", "cispo", "sapo")
LOSSES = {name: build_loss(name) for name in LOSS_TYPES}
TWO_AND_ONE = response_mask([2, 1])
ONE_TOKEN_EACH = response_mask([1, 1])


def built(loss_type: str, **actor: float | None) -> PolicyLoss:
    """The loss with these settings of `worker.actor`; it ignores those that it does not read."""
    return build_loss(loss_type, section_of(loss_type, actor))


def unpadded(log_probs: Tensor, old: Tensor, advantages: Tensor) -> PolicyTokens:
    """Responses whose every place is a token."""
    return PolicyTokens(
        log_probs=log_probs,
        old_log_probs=old,
        advantages=advantages,
        response_mask=torch.ones_like(old, dtype=torch.bool),
    )


def of_ratios(ratios: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTokens:
    """Tokens with these ratios, whose old probability is 1."""
    return PolicyTokens(
        log_probs=ratios.log(),
        old_log_probs=torch.zeros_like(ratios),
        advantages=advantages,
        response_mask=mask,
    )


def test_averages_and_penalties_are_those_that_the_config_takes() -> None:
    averages = get_type_hints(ActorConfig)["loss_avg_mode"]
    penalties = get_type_hints(AlgorithmConfig)["kl_penalty"]
    assert get_args(averages) == AGGREGATIONS
    assert get_args(penalties) == KL_PENALTIES


@pytest.mark.parametrize("loss_type", ["gspo", "gspo_token"])
def test_padding_has_no_part_in_the_sequences_mean(loss_type: str) -> None:
    ratios = torch.tensor([[1.1, 1.1], [1.2, math.exp(50.0)]])
    tokens = of_ratios(ratios, torch.ones(2, 2), TWO_AND_ONE)
    losses = LOSSES[loss_type].token_losses(tokens)
    assert losses[0].tolist() == pytest.approx([-1.1, -1.1])
    assert losses[1, 0].item() == pytest.approx(-1.2)


EXAMPLES = cases(__file__, "worked_losses.yaml")


@pytest.mark.parametrize("name", EXAMPLES)
def test_losses_and_gradients_are_those_worked_out_by_hand(name: str) -> None:
    example = EXAMPLES[name]
    ratio = tensor(example["ratios"]).unsqueeze(0)
    advantages = tensor(example["advantages"]).expand_as(ratio)
    old = torch.full_like(ratio, -1.0)
    log_probs = (old + ratio.log()).requires_grad_()
    tokens = unpadded(log_probs, old, advantages)
    for loss_type in example["methods"]:
        loss = built(loss_type, **example.get("settings", {}))
        losses = loss.token_losses(tokens)
        (gradients,) = torch.autograd.grad(losses.sum(), log_probs)
        for name, actual in {"losses": losses, "gradients": gradients}.items():
            if name in example:
                expected = tensor(example[name])
                torch.testing.assert_close(actual[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("advantage", [1.7, -1.7])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_at_ratio_1_every_loss_has_the_gradient_minus_advantage(loss_type: str, advantage: float) -> None:
    log_probs = torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True)
    tokens = unpadded(log_probs, log_probs.detach(), torch.full_like(log_probs, advantage))
    losses = LOSSES[loss_type].token_losses(tokens)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert gradient[0].tolist() == pytest.approx([-advantage] * 3)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_log_ratios_of_10000_give_finite_losses_and_gradients(loss_type: str) -> None:
    log_probs = torch.tensor([[-1e4, -1.0], [-1.0, -1e4]], requires_grad=True)
    old = torch.tensor([[-1.0, -1e4], [-1e4, -1.0]])
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    tokens = unpadded(log_probs, old, advantages)
    losses = LOSSES[loss_type].token_losses(tokens)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


def test_clip_fractions_use_each_types_own_ratio() -> None:
    """Ratios 4 and 1 in one response, 1.2 in the other, with 9 on its padding; A > 0."""
    ratios = torch.tensor([[4.0, 1.0], [1.2, 9.0]])
    tokens = of_ratios(ratios, torch.ones(2, 2), TWO_AND_ONE)
    denominators = LossDenominators(3, 2, 2)
    kl = -(math.log(4.0) + math.log(1.2)) / 3
    metrics: dict[str, dict[str, float]] = {}
    for loss_type, loss in LOSSES.items():
        of_tokens = policy_metrics(loss, tokens)
        of_step = step_metrics(ObjectiveSettings(loss=loss), denominators, distils=False)
        metrics[loss_type] = results(merge_metrics([of_tokens, of_step]))
        assert metrics[loss_type]["actor/live_ppo_kl"] == pytest.approx(kl)
    higher = "actor/pg_clipfrac_higher"
    assert metrics["default"][higher] == pytest.approx(1 / 3)
    assert metrics["gspo"][higher] == pytest.approx(2 / 3)  # both tokens share the ratio 2
    assert metrics["gspo_token"] == metrics["gspo"]
    assert metrics["cispo"][higher] == pytest.approx(1 / 3)
    assert higher not in metrics["sapo"]
    assert "actor/pg_clipfrac_lower" not in metrics["cispo"]


@pytest.mark.parametrize("loss_type", ["default", "gspo", "gspo_token", "cispo"])
def test_tokens_without_an_advantage_are_not_counted_as_clipped(loss_type: str) -> None:
    """Ratios 1/4 and 4 in responses of one token, both beyond every bound; A = 0 has no loss that a bound could change."""
    ratios = torch.tensor([[0.25], [4.0]])
    tokens = of_ratios(ratios, torch.zeros(2, 1), ONE_TOKEN_EACH)
    metrics = policy_metrics(LOSSES[loss_type], tokens)
    fractions = [metric.value for name, metric in metrics.items() if "clipfrac" in name]
    assert fractions
    assert not any(fractions)


@pytest.mark.parametrize("loss_type", ["default", "gspo", "cispo"])
@pytest.mark.parametrize(("low", "high", "clipped"), [(0.5, 1.0, 0), (0.25, 1.0, 1), (0.5, 0.75, 1)])
def test_a_ratio_on_its_bound_is_not_counted_as_clipped(loss_type: str, low: float, high: float, clipped: int) -> None:
    """Responses of one token: a ratio of 1/2 with A < 0 and one of 2 with A > 0, of which one is beyond its bound."""
    ratios = torch.tensor([[0.5], [2.0]])
    advantages = torch.tensor([[-1.0], [1.0]])
    tokens = of_ratios(ratios, advantages, ONE_TOKEN_EACH)
    loss = built(loss_type, clip_ratio_low=low, clip_ratio_high=high)
    metrics = policy_metrics(loss, tokens)
    assert metrics["actor/pg_clipfrac_higher"].value == clipped


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ("kl", [0.5, -2.0]),
        ("abs", [0.5, 2.0]),
        ("mse", [0.125, 2.0]),
        ("low_var_kl", [math.exp(-0.5) + 0.5 - 1, math.exp(2.0) - 2.0 - 1]),
    ],
)
def test_kl_penalties_of_differences_of_one_half_and_minus_2(penalty: str, expected: list[float]) -> None:
    log_probs = torch.tensor([[-1.0, -3.0]])
    reference = torch.tensor([[-1.5, -1.0]])
    penalties = kl_penalty(log_probs, reference, penalty)
    assert penalties[0].tolist() == pytest.approx(expected)


def test_low_var_kl_is_cut_at_10_and_all_kinds_are_finite() -> None:
    """The log-ratios are 10000."""
    log_probs = torch.tensor([[-1e4, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.0, -1e4]])
    assert kl_penalty(log_probs, reference, "low_var_kl").tolist() == [[10.0, 10.0]]
    for penalty in KL_PENALTIES:
        total = kl_penalty(log_probs, reference, penalty).sum()
        (gradient,) = torch.autograd.grad(total, log_probs)
        assert gradient.isfinite().all(), penalty


@pytest.mark.parametrize(
    ("observed", "error"),
    [(0.1, 0.0), (0.11, 0.1), (5.0, 0.2), (0.0, -0.2)],
)
def test_the_adaptive_coefficient_moves_by_a_bounded_share(observed: float, error: float) -> None:
    """The relative error to the target 0.1 is cut at 0.2; of it 256 sequences of 10,000 take their share."""
    adapted = adapted_coefficient(0.01, observed, num_sequences=256, kl_target=0.1, kl_horizon=10000.0)
    assert adapted == pytest.approx(0.01 * (1 + error * 256 / 10000), rel=1e-12)


def test_the_adaptive_coefficient_never_turns_negative() -> None:
    """0.01 (1 - 0.2 * 256 / 10) is below 0."""
    adapted = adapted_coefficient(0.01, 0.0, num_sequences=256, kl_target=0.1, kl_horizon=10.0)
    assert adapted == 0.0


def test_the_critics_loss_is_half_the_worse_squared_error() -> None:
    """Old value 0, clip 0.5, target 1.

    Value 0.4 is not clipped: 0.36 / 2. Value 0.9 is clipped to 0.5: 0.25 / 2. Value -2 is clipped to -0.5, but 3^2 is
    worse: 9 / 2. The metrics count the first two alone.
    """
    values = torch.tensor([[0.4, 0.9, -2.0]], requires_grad=True)
    old_values = torch.zeros(1, 3)
    targets = torch.ones(1, 3)
    losses = value_loss(values, old_values, targets, 0.5)
    assert losses[0].tolist() == pytest.approx([0.18, 0.125, 4.5])
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert gradient[0].tolist() == pytest.approx([-0.6, 0.0, -3.0])
    mask = torch.tensor([[True, True, False]])
    metrics = results(value_metrics(values.detach(), old_values, targets, mask, 0.5))
    assert metrics == pytest.approx({"critic/vf_clipfrac": 0.5, "critic/vpred_mean": 0.65})


def test_weights_of_each_aggregation_are_worked_out_by_hand() -> None:
    """The sequences have lengths 1 and 3."""
    mask = response_mask([1, 3], width=4)
    denominators = LossDenominators(4, 2, 8)
    expected = {
        "token": [[1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0]],
        "seq": [[1 / 2, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]],
        "seq_sum": [[1 / 2, 0, 0, 0], [1 / 2, 1 / 2, 1 / 2, 0]],
        "constant": [[1 / 16, 0, 0, 0], [1 / 16, 1 / 16, 1 / 16, 0]],
    }
    assert set(expected) == set(AGGREGATIONS)
    for name, weights in expected.items():
        actual = token_weights(mask, name, denominators)
        torch.testing.assert_close(actual, torch.tensor(weights))


LENGTHS = [3, 6, 2, 5]  # 16 tokens


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@given(seed=st.integers(0, 10_000), dead=st.sets(st.integers(0, 3), min_size=1, max_size=3))
def test_losses_depend_on_no_micro_batch_padding_or_dead_row(
    loss_type: str, aggregation: str, seed: int, dead: set[int]
) -> None:
    """Leaving out rows without advantage changes no bit."""
    log_probs, old = log_probs_like((2, 4, 6), seed, scale=0.3)
    advantages = torch.tensor([[0.9], [-0.9], [0.4], [-1.3]], dtype=torch.float64).repeat(1, 6)
    advantages[sorted(dead)] = 0.0
    denominators = LossDenominators(16, 4, 6)

    def total(micro_batches: list[list[int]], padding: int = 0) -> tuple[Tensor, Tensor]:
        """The loss over micro-batches of these rows, and its gradient in the log-probs."""
        leaf = log_probs.clone().requires_grad_()
        total_loss = torch.zeros((), dtype=torch.float64)
        for rows in micro_batches:
            tokens = PolicyTokens(
                log_probs=pad(leaf[rows], (0, padding), value=-7.0),
                old_log_probs=pad(old[rows], (0, padding), value=-7.0),
                advantages=pad(advantages[rows], (0, padding), value=-7.0),
                response_mask=response_mask([LENGTHS[row] for row in rows], 6 + padding),
            )
            losses = LOSSES[loss_type].token_losses(tokens)
            weights = token_weights(tokens.response_mask, aggregation, denominators)
            total_loss = total_loss + (losses * weights.double()).sum()
        (gradient,) = torch.autograd.grad(total_loss, leaf)
        return total_loss.detach(), gradient

    whole = total([[0, 1, 2, 3]])
    one_by_one = total([[0], [1], [2], [3]])
    in_pairs = total([[3, 1], [0, 2]])
    padded_more = total([[0, 1, 2, 3]], padding=5)
    for divided in (one_by_one, in_pairs, padded_more):
        torch.testing.assert_close(divided, whole, rtol=1e-6, atol=1e-12)
    live_alone = total([[row] for row in range(4) if row not in dead])
    torch.testing.assert_close(live_alone, one_by_one, rtol=0.0, atol=0.0)


class FaultyLoss(PolicyLoss):
    """A loss whose functions return what the test sets."""

    def __init__(self, *, losses: Any = None, counts: Any = None, metrics: Any = None) -> None:
        super().__init__(None)
        self.losses = losses
        self.counts = counts
        self.further_metrics = metrics
        self.fractions = ("faulty/share",)

    def token_losses(self, tokens: PolicyTokens) -> Tensor:
        return self.losses

    def counted(self, tokens: PolicyTokens) -> Any:
        return self.counts

    def metrics(self, tokens: PolicyTokens) -> Any:
        return self.further_metrics


FAULTY_TOKENS = PolicyTokens(
    log_probs=torch.full((2, 3), -1.0, requires_grad=True),
    old_log_probs=torch.full((2, 3), -1.0),
    advantages=torch.ones(2, 3),
    response_mask=torch.ones(2, 3, dtype=torch.bool),
)
RATIO = FAULTY_TOKENS.ratio


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (RATIO.mean(), r"FaultyLoss.token_losses returned losses of shape \(\) for \(2, 3\); return the"),
        (RATIO.mean(dim=1, keepdim=True), r"losses of shape \(2, 1\) for \(2, 3\)"),
        ((RATIO, {}), "token_losses returned a tuple; return the loss of each token"),
        (None, "token_losses returned a NoneType"),
        (RATIO.detach(), "without a gradient, from which nothing is learnt"),
        (FAULTY_TOKENS.log_probs.log(), "returned NaN for 6 tokens with finite log-probs and advantages"),
    ],
)
def test_a_loss_that_is_no_loss_of_each_token_is_refused(losses: Any, message: str) -> None:
    """A scalar would be added to itself for every token, and a loss of each response would be spread over its tokens."""
    with pytest.raises(ConfigError, match=message):
        FaultyLoss(losses=losses).checked_token_losses(FAULTY_TOKENS)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, r"counted returned \[\]; return a tensor \(R, T\) for each of fractions \['faulty/share'\]"),
        ({"faulty/size": torch.ones(2, 3)}, r"counted returned \['faulty/size'\]; return"),
    ],
)
def test_counts_that_mark_no_tokens_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FaultyLoss(counts=counts).checked_counts(FAULTY_TOKENS)


def test_metrics_without_their_reduction_are_refused() -> None:
    with pytest.raises(ConfigError, match="metrics returned a float for the metric 'faulty/size'; give it with its"):
        FaultyLoss(metrics={"faulty/size": 0.5}).checked_metrics(FAULTY_TOKENS)
