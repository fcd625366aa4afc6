"""Policy losses, KL penalties, the KL coefficient's controller and the critic's loss: by hand, and however the batch is cut."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import pytest
import torch
from factories import log_probs_like, outcome_rewards, response_mask
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cepo.algorithms import build_estimator
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
from cepo.types import TokenBatch

LOSS_TYPES = ("default", "gspo", "gspo_token", "cispo", "sapo")
LOSSES = {name: build_loss(name) for name in LOSS_TYPES}
MASK = response_mask([2, 1])


def loss_of(loss_type: str, ratios: list[list[float]], advantages: list[float], **changes: float) -> list[float]:
    """Token losses of the one row of ratios; old log-probs are -1, `changes` go to the settings."""
    return losses_of(built(loss_type, **changes), *inputs(ratios, advantages))[0].tolist()


def built(loss_type: str, **actor: float | None) -> PolicyLoss:
    """The loss with these settings of `worker.actor`; it ignores those that it does not read."""
    return build_loss(loss_type, section_of(loss_type, actor))


def tokens_of(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTokens:
    return PolicyTokens(log_probs=log_probs, old_log_probs=old, advantages=advantages, response_mask=mask)


def losses_of(loss: PolicyLoss, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return loss.token_losses(tokens_of(log_probs, old, advantages, mask))


def inputs(ratios: list[list[float]], advantages: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ratio = torch.tensor(ratios, dtype=torch.float64)
    old = torch.full_like(ratio, -1.0)
    spread = torch.tensor(advantages, dtype=torch.float64).unsqueeze(1).expand_as(ratio)
    return old + ratio.log(), old, spread, torch.ones_like(ratio, dtype=torch.bool)


def gradient_of(policy_loss: PolicyLoss, ratios: list[list[float]], advantages: list[float]) -> list[list[float]]:
    log_probs, old, spread, mask = inputs(ratios, advantages)
    loss = losses_of(policy_loss, log_probs.requires_grad_(), old, spread, mask)
    return torch.autograd.grad(loss.sum(), log_probs)[0].tolist()


def test_averages_and_penalties_are_those_that_the_config_takes() -> None:
    actor, algorithm = get_type_hints(ActorConfig), get_type_hints(AlgorithmConfig)
    assert get_args(actor["loss_avg_mode"]) == AGGREGATIONS
    assert get_args(algorithm["kl_penalty"]) == (*KL_PENALTIES, "full")


@pytest.mark.parametrize("loss_type", ["gspo", "gspo_token"])
def test_gspo_gives_tokens_their_sequences_geometric_mean_ratio(loss_type: str) -> None:
    for ratios, advantage, expected in [
        ([1.21, 1.0], 2.0, -2.2),  # the mean is 1.1, inside the clip
        ([4.0, 1.0], 2.0, -2.56),  # 2, cut at 1.28 for A > 0
        ([4.0, 1.0], -2.0, 4.0),  # for A < 0: max(2 rho, 2 clip(rho)) with rho = 2
        ([16.0, 1.0], -2.0, 6.0),  # the dual clip 3 binds for rho = 4
    ]:
        assert loss_of(loss_type, [ratios], [advantage]) == pytest.approx([expected, expected])


@pytest.mark.parametrize(("loss_type", "expected"), [("gspo", [-2.0, -2.0]), ("gspo_token", [-3.0, -1.0])])
def test_gspo_spreads_its_gradient_and_gspo_token_does_not(loss_type: str, expected: list[float]) -> None:
    log_probs, old, _, mask = inputs([[1.0, 1.0]], [0.0])
    advantages = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    loss = losses_of(LOSSES[loss_type], log_probs.requires_grad_(), old, advantages, mask)
    assert torch.autograd.grad(loss.sum(), log_probs)[0][0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", ["gspo", "gspo_token"])
def test_padding_has_no_part_in_the_sequences_mean(loss_type: str) -> None:
    log_probs = torch.tensor([[math.log(1.1), math.log(1.1)], [math.log(1.2), 50.0]])
    found = losses_of(LOSSES[loss_type], log_probs, torch.zeros(2, 2), torch.ones(2, 2), MASK)
    assert found[0].tolist() == pytest.approx([-1.1, -1.1])
    assert found[1, 0].item() == pytest.approx(-1.2)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    # Ratios 2, 1.1 and 0.5 are clipped to 1.28, 1.1 and 0.8; log-probs are -1 + log ratio.
    found = loss_of("cispo", [[2.0, 1.1, 0.5]], [1.5])
    assert found == pytest.approx(
        [-1.5 * 1.28 * (math.log(2.0) - 1), -1.5 * 1.1 * (math.log(1.1) - 1), -1.5 * 0.8 * (math.log(0.5) - 1)]
    )
    assert gradient_of(LOSSES["cispo"], [[2.0, 1.1, 0.5]], [1.5])[0] == pytest.approx([-1.92, -1.65, -1.2])
    assert gradient_of(LOSSES["default"], [[2.0, 1.1, 0.5]], [1.5])[0] == pytest.approx([0.0, -1.65, -0.75])
    # A lower radius of 1 bounds nothing below.
    wide = built("cispo", clip_ratio_low=1.0, clip_ratio_high=4.0)
    assert gradient_of(wide, [[1e-3, 9.0]], [1.0])[0] == pytest.approx([-1e-3, -5.0])


def test_sapo_gates_with_a_sigmoid_by_the_advantages_sign() -> None:
    for advantage, expected in ((1.0, [-2.0, -4.0 / (1 + math.exp(-1.0))]), (-1.0, [1.0, 2.0 / (1 + math.exp(-2.0))])):
        found = loss_of("sapo", [[1.0, 2.0]], [advantage], tau_positive=1.0, tau_negative=2.0)
        assert found == pytest.approx(expected)
    # d/d log rho of -(4 / tau) sigmoid(tau (rho - 1)) is -4 rho s (1 - s).
    gate = 1 / (1 + math.exp(-1.0))
    assert gradient_of(LOSSES["sapo"], [[2.0]], [1.0])[0] == pytest.approx([-8.0 * gate * (1 - gate)])


@pytest.mark.parametrize("advantage", [1.7, -1.7])
def test_at_ratio_1_every_loss_has_the_gradient_minus_advantage(advantage: float) -> None:
    for loss in LOSSES.values():
        assert gradient_of(loss, [[1.0, 1.0, 1.0]], [advantage])[0] == pytest.approx([-advantage] * 3), loss.name


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_log_ratios_of_10000_give_finite_losses_and_gradients(loss_type: str) -> None:
    log_probs = torch.tensor([[-1e4, -1.0], [-1.0, -1e4]], requires_grad=True)
    old, mask = torch.tensor([[-1.0, -1e4], [-1e4, -1.0]]), torch.ones(2, 2, dtype=torch.bool)
    loss = losses_of(LOSSES[loss_type], log_probs, old, torch.tensor([[1.0], [-1.0]]).expand(2, 2), mask)
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), log_probs)[0].isfinite().all()


def test_clip_fractions_use_each_types_own_ratio() -> None:
    # Ratios 4 and 1 in one response, 1.2 in the other, with 9 on its padding; A > 0.
    log_probs, advantages = torch.tensor([[4.0, 1.0], [1.2, 9.0]]).log(), torch.ones(2, 2)
    found = {}
    for loss_type, loss in LOSSES.items():
        metrics = policy_metrics(loss, tokens_of(log_probs, torch.zeros(2, 2), advantages, MASK))
        counted = step_metrics(ObjectiveSettings(loss=loss), LossDenominators(3, 2, 2), distils=False)
        found[loss_type] = results(merge_metrics([metrics, counted]))
    assert found["default"]["actor/pg_clipfrac_higher"] == pytest.approx(1 / 3)
    assert found["gspo"]["actor/pg_clipfrac_higher"] == pytest.approx(2 / 3)  # both tokens share the ratio 2
    assert found["gspo_token"] == found["gspo"]
    assert found["cispo"]["actor/pg_clipfrac_higher"] == pytest.approx(1 / 3)
    assert "actor/pg_clipfrac_higher" not in found["sapo"]
    assert "actor/pg_clipfrac_lower" not in found["cispo"]
    kl = -(math.log(4.0) + math.log(1.2)) / 3
    assert [metrics["actor/live_ppo_kl"] for metrics in found.values()] == pytest.approx([kl] * 5)


@pytest.mark.parametrize("loss_type", ["default", "gspo", "gspo_token", "cispo"])
def test_tokens_without_an_advantage_are_not_counted_as_clipped(loss_type: str) -> None:
    """Ratios 1/4 and 4 in responses of one token, both beyond every bound; A = 0 has no loss that a bound could change."""
    log_probs = torch.tensor([[0.25], [4.0]]).log()
    tokens = tokens_of(log_probs, torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1).bool())
    metrics = policy_metrics(LOSSES[loss_type], tokens)
    assert [value.value for name, value in metrics.items() if "clipfrac" in name and value.value] == []


@pytest.mark.parametrize("loss_type", ["default", "gspo", "cispo"])
@pytest.mark.parametrize(("low", "high", "clipped"), [(0.5, 1.0, 0), (0.25, 1.0, 1), (0.5, 0.75, 1)])
def test_a_ratio_on_its_bound_is_not_counted_as_clipped(loss_type: str, low: float, high: float, clipped: int) -> None:
    """Responses of one token: a ratio of 1/2 with A < 0 and one of 2 with A > 0, of which one is beyond its bound."""
    log_probs, advantages = torch.tensor([[0.5], [2.0]]).log(), torch.tensor([[-1.0], [1.0]])
    loss = built(loss_type, clip_ratio_low=low, clip_ratio_high=high)
    metrics = policy_metrics(loss, tokens_of(log_probs, torch.zeros(2, 1), advantages, torch.ones(2, 1).bool()))
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
    found = kl_penalty(torch.tensor([[-1.0, -3.0]]), torch.tensor([[-1.5, -1.0]]), penalty)
    assert found[0].tolist() == pytest.approx(expected)


def test_low_var_kl_is_cut_at_10_and_all_kinds_are_finite() -> None:
    """The log-ratios are 10000."""
    log_probs, reference = torch.tensor([[-1e4, -1.0]], requires_grad=True), torch.tensor([[-1.0, -1e4]])
    assert kl_penalty(log_probs, reference, "low_var_kl").tolist() == [[10.0, 10.0]]
    for penalty in KL_PENALTIES:
        (gradient,) = torch.autograd.grad(kl_penalty(log_probs, reference, penalty).sum(), log_probs)
        assert gradient.isfinite().all(), penalty


def test_low_var_kl_averages_to_the_kl_over_samplings() -> None:
    policy, reference = (torch.tensor([row], dtype=torch.float64).log() for row in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
    exact = float((policy.exp() * (policy - reference)).sum())
    for penalty in ("kl", "low_var_kl"):
        assert float((policy.exp() * kl_penalty(policy, reference, penalty)).sum()) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (0.1, 0.01),  # on target
        (0.11, 0.01 * (1 + 0.1 * 256 / 10000)),
        (5.0, 0.01 * (1 + 0.2 * 256 / 10000)),  # the error is cut at 0.2
        (0.0, 0.01 * (1 - 0.2 * 256 / 10000)),
    ],
)
def test_the_adaptive_coefficient_moves_by_a_bounded_share(observed: float, expected: float) -> None:
    found = adapted_coefficient(0.01, observed, num_sequences=256, kl_target=0.1, kl_horizon=10000.0)
    assert found == pytest.approx(expected, rel=1e-12)
    hasty = adapted_coefficient(0.01, 0.0, num_sequences=256, kl_target=0.1, kl_horizon=10.0)
    assert hasty == 0.0, "it never turns negative"


def test_the_critics_loss_is_half_the_worse_squared_error() -> None:
    # Old value 0, clip 0.5, target 1. Value 0.4: not clipped, 0.36 / 2. Value 0.9: clipped to 0.5, 0.25 / 2.
    # Value -2: clipped to -0.5, but 3^2 is worse, 9 / 2.
    values = torch.tensor([[0.4, 0.9, -2.0]], requires_grad=True)
    loss = value_loss(values, torch.zeros(1, 3), torch.ones(1, 3), 0.5)
    assert loss[0].tolist() == pytest.approx([0.18, 0.125, 4.5])
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([-0.6, 0.0, -3.0])
    mask = torch.tensor([[True, True, False]])
    found = results(value_metrics(values.detach(), torch.zeros(1, 3), torch.ones(1, 3), mask, 0.5))
    assert found == pytest.approx({"critic/vf_clipfrac": 0.5, "critic/vpred_mean": 0.65})


CLIPPED = built("default", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_dual=3.0)
VOCABULARY = 7
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0])
LENGTHS = [3, 6, 2, 5]  # 16 tokens


def sampled_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def cepo_signal(old: Tensor, correct: Tensor, wrong: Tensor) -> Tensor:
    mask = response_mask(LENGTHS)
    batch = TokenBatch(
        token_level_rewards=outcome_rewards(REWARDS.to(old.dtype), mask),
        response_mask=mask,
        old_log_probs=old.detach(),
        group_ids=torch.zeros(4, dtype=torch.int64),
        teacher_log_probs={"correct": correct, "wrong": wrong},
        correct=REWARDS > 0.5,
    )
    return build_estimator("cepo").signal(batch, step=0).advantages


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student logits, two teachers' logits and sampled tokens for the four rows, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 6, VOCABULARY)
    logits, correct, wrong = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return logits, correct, wrong, torch.randint(VOCABULARY, (4, 6), generator=generator)


def clipped_loss(log_probs: Tensor, old: Tensor, advantages: Tensor, loss: PolicyLoss = CLIPPED) -> Tensor:
    return losses_of(loss, log_probs, old, advantages, torch.ones_like(old, dtype=torch.bool))


@given(seed=st.integers(0, 10_000), temperature=st.floats(0.3, 2.0))
def test_at_ratio_1_the_gradient_is_minus_a_times_onehot_minus_p(seed: int, temperature: float) -> None:
    """Teachers receive none."""
    logits, correct, wrong, tokens = random_case(seed)
    for tensor in (logits, correct, wrong):
        tensor.requires_grad_()
    log_probs, *views = (sampled_log_probs(each, tokens, temperature) for each in (logits, correct, wrong))
    advantages = cepo_signal(log_probs, *views)
    weights = token_weights(response_mask(LENGTHS), "token", LossDenominators(16, 4, 6))
    (clipped_loss(log_probs, log_probs.detach(), advantages) * weights).sum().backward()
    onehot = torch.nn.functional.one_hot(tokens, VOCABULARY).double()
    probabilities = torch.softmax(logits.detach() / temperature, dim=-1)
    expected = -advantages.detach().unsqueeze(-1) * (onehot - probabilities) / (temperature * 16)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-10, atol=1e-12)
    assert torch.count_nonzero(expected) == 16 * VOCABULARY
    assert correct.grad is None
    assert wrong.grad is None


def one_token(ratio: float, advantage: float, policy_loss: PolicyLoss) -> tuple[float, float]:
    """Loss and its derivative in the log-prob of a single token."""
    log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss = clipped_loss(log_probs, torch.zeros_like(log_probs), torch.full_like(log_probs, advantage), policy_loss)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return float(loss.detach()), float(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.56, 0.0),  # clipped above at 1.28
        (0.5, 2.0, -1.0, -1.0),  # a positive advantage is not clipped below
        (0.5, -2.0, 1.6, 0.0),  # clipped below at 0.8
        (2.0, -2.0, 4.0, 4.0),  # a negative advantage is not clipped above,
        (4.0, -2.0, 6.0, 0.0),  # until the dual bound 3 |A|
        (4.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_losses_and_gradients_worked_out_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    assert one_token(ratio, advantage, CLIPPED) == pytest.approx((loss, gradient), abs=1e-12)
    if ratio == 4.0:
        undual = built("default", clip_ratio_dual=None)
        assert one_token(ratio, advantage, undual) == pytest.approx((-4.0 * advantage, -4.0 * advantage))


def test_weights_of_each_aggregation_are_worked_out_by_hand() -> None:
    """The sequences have lengths 1 and 3."""
    mask, denominators = response_mask([1, 3], width=4), LossDenominators(4, 2, 8)
    expected = {
        "token": [[1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 0]],
        "seq": [[1 / 2, 0, 0, 0], [1 / 6, 1 / 6, 1 / 6, 0]],
        "seq_sum": [[1 / 2, 0, 0, 0], [1 / 2, 1 / 2, 1 / 2, 0]],
        "constant": [[1 / 16, 0, 0, 0], [1 / 16, 1 / 16, 1 / 16, 0]],
    }
    assert set(expected) == set(AGGREGATIONS)
    for name, weights in expected.items():
        torch.testing.assert_close(token_weights(mask, name, denominators), torch.tensor(weights))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@given(seed=st.integers(0, 10_000), dead=st.sets(st.integers(0, 3), min_size=1, max_size=3))
def test_losses_depend_on_no_micro_batch_padding_or_dead_row(
    loss_type: str, aggregation: str, seed: int, dead: set[int]
) -> None:
    """Leaving out rows without advantage changes no bit."""
    log_probs, old = log_probs_like((2, 4, 6), seed, scale=0.3)
    advantages = torch.tensor([0.9, -0.9, 0.4, -1.3], dtype=torch.float64).unsqueeze(1).repeat(1, 6)
    advantages[sorted(dead)] = 0.0

    def total(parts: list[list[int]], padding: int = 0) -> tuple[Tensor, Tensor]:
        leaf = log_probs.clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            mask = response_mask([LENGTHS[row] for row in rows], 6 + padding)
            padded = [
                torch.nn.functional.pad(tensor[rows], (0, padding), value=-7.0) for tensor in (leaf, old, advantages)
            ]
            weights = token_weights(mask, aggregation, LossDenominators(16, 4, 6)).double()
            losses = losses_of(LOSSES[loss_type], *padded, mask)
            loss = loss + (losses * weights).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    whole, one_by_one = total([[0, 1, 2, 3]]), total([[0], [1], [2], [3]])
    for found in (one_by_one, total([[3, 1], [0, 2]]), total([[0, 1, 2, 3]], padding=5)):
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-12)
    without_dead = total([[row] for row in range(4) if row not in dead])
    assert all(torch.equal(one, other) for one, other in zip(without_dead, one_by_one, strict=True))


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


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (FAULTY_TOKENS.ratio.mean(), r"FaultyLoss.token_losses returned losses of shape \(\) for \(2, 3\); return the"),
        (FAULTY_TOKENS.ratio.mean(dim=1, keepdim=True), r"losses of shape \(2, 1\) for \(2, 3\)"),
        ((FAULTY_TOKENS.ratio, {}), "token_losses returned a tuple; return the loss of each token"),
        (None, "token_losses returned a NoneType"),
        (FAULTY_TOKENS.ratio.detach(), "without a gradient, from which nothing is learnt"),
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
