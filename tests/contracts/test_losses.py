"""What every policy loss must do, whoever wrote it: those of the package, and the example of a loss of one's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from factories import log_probs_like, response_mask, same_bits
from torch import Tensor

from cepo.algorithms import load_plugin
from cepo.errors import ConfigError
from cepo.losses import PolicyLoss, PolicyTokens, available_losses, build_loss, loss_class
from cepo.losses.aggregation import AGGREGATIONS, LossDenominators, token_weights
from cepo.losses.objective import ObjectiveSettings, policy_metrics, step_metrics
from cepo.metrics import merge_metrics, results

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loss" / "my_loss.py"
NAMES = [*available_losses(), "my_loss"]
LENGTHS = [6, 3, 1, 4, 0]  # the last row has no response, as the filler of a rank without rows
DENOMINATORS = LossDenominators(num_tokens=14, num_sequences=5, max_response_length=6)
every_loss = pytest.mark.parametrize("name", NAMES)


def built(name: str) -> PolicyLoss:
    if name == "my_loss":
        load_plugin(EXAMPLE)
    return build_loss(name)


def make_tokens(scale: float = 0.4, seed: int = 3) -> PolicyTokens:
    """Five responses in float64 with ratios on both sides of the usual clip ranges, and advantages of both signs."""
    log_probs, old = log_probs_like((2, 5, 6), seed, scale)
    advantages = torch.tensor([0.9, -0.7, 1.3, -1.1, 0.5], dtype=torch.float64).unsqueeze(1).repeat(1, 6)
    return PolicyTokens(
        log_probs=log_probs.double(),
        old_log_probs=old.double(),
        advantages=advantages,
        response_mask=response_mask(LENGTHS, 6),
    )


def rows_of(tokens: PolicyTokens, rows: list[int], *, padding: int = 0) -> PolicyTokens:
    """Some rows with `padding` more columns, on which log-probs and advantages are large."""
    fields = {}
    for name in ("log_probs", "old_log_probs", "advantages"):
        fields[name] = torch.nn.functional.pad(getattr(tokens, name)[rows], (0, padding), value=-7.0)
    mask = torch.nn.functional.pad(tokens.response_mask[rows], (0, padding), value=False)
    return PolicyTokens(**fields, response_mask=mask)


def with_log_probs(tokens: PolicyTokens, log_probs: Tensor) -> PolicyTokens:
    return dataclasses.replace(tokens, log_probs=log_probs)


def gradient_of(loss: PolicyLoss, tokens: PolicyTokens, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of the token losses, and its gradient in the log-probs."""
    leaf = tokens.log_probs.clone().requires_grad_()
    total = (loss.token_losses(with_log_probs(tokens, leaf)) * weights).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient


@every_loss
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
def test_losses_and_gradients_are_finite(name: str, scale: float) -> None:
    loss = built(name)
    tokens = make_tokens(scale)
    in_float32 = PolicyTokens(
        log_probs=tokens.log_probs.float(),
        old_log_probs=tokens.old_log_probs.float(),
        advantages=tokens.advantages.float(),
        response_mask=tokens.response_mask,
    )
    losses = loss.token_losses(in_float32)
    assert losses.shape == in_float32.log_probs.shape
    assert losses.dtype == torch.float32
    assert losses.isfinite().all()
    _, gradient = gradient_of(loss, in_float32, in_float32.response_mask.float())
    assert gradient.isfinite().all()


def frozen(name: str, loss: PolicyLoss, tokens: PolicyTokens) -> PolicyLoss:
    """The loss whose derivative is the gradient: of two losses a part of the value is constant to the gradient."""

    class Cispo(PolicyLoss):
        """The clipped ratio is constant."""

        def token_losses(self, moved: PolicyTokens) -> Tensor:
            bounded = tokens.ratio.clamp(1.0 - loss.config.clip_ratio_low, 1.0 + loss.config.clip_ratio_high)
            return -moved.advantages * bounded * moved.log_probs

    class GspoToken(PolicyLoss):
        """The response's mean log ratio is constant, and each token adds its own change."""

        def token_losses(self, moved: PolicyTokens) -> Tensor:
            mask = tokens.response_mask
            sums = tokens.log_ratio.where(mask, 0.0).sum(1, keepdim=True)
            lengths = mask.sum(1, keepdim=True).clamp(min=1)
            old_log_probs = tokens.log_probs - sums / lengths
            return build_loss("default").token_losses(dataclasses.replace(moved, old_log_probs=old_log_probs))

    return {"cispo": Cispo, "gspo_token": GspoToken}.get(name, lambda _: loss)(loss.config)


@every_loss
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    """Central differences of 1e-6 in float64, at points where no token is within that of a bound."""
    loss = built(name)
    tokens = make_tokens()
    weights = tokens.response_mask.double()
    _, gradient = gradient_of(loss, tokens, weights)
    surrogate = frozen(name, loss, tokens)
    step = 1e-6

    def loss_at(log_probs: Tensor) -> float:
        losses = surrogate.token_losses(with_log_probs(tokens, log_probs))
        return float((losses * weights).sum())

    for row, length in enumerate(LENGTHS):
        for token in range(length):
            change = torch.zeros_like(tokens.log_probs)
            change[row, token] = step
            difference = loss_at(tokens.log_probs + change) - loss_at(tokens.log_probs - change)
            assert gradient[row, token].item() == pytest.approx(difference / (2 * step), abs=1e-7)
    assert torch.count_nonzero(gradient) > 0


@every_loss
def test_padding_has_no_gradient_and_changes_no_bit(name: str) -> None:
    loss = built(name)
    tokens = make_tokens()
    weights = token_weights(tokens.response_mask, "seq", DENOMINATORS).double()
    padding = ~tokens.response_mask
    total, gradient = gradient_of(loss, tokens, weights)
    assert torch.count_nonzero(gradient[padding]) == 0
    moved = dataclasses.replace(
        tokens,
        log_probs=tokens.log_probs.masked_fill(padding, -50.0),
        old_log_probs=tokens.old_log_probs.masked_fill(padding, 3.0),
        advantages=tokens.advantages.masked_fill(padding, 9.0),
    )
    other_total, other_gradient = gradient_of(loss, moved, weights)
    assert torch.equal(total, other_total)
    assert torch.equal(gradient, other_gradient)
    settings = ObjectiveSettings(loss=loss)
    for metrics in (policy_metrics(loss, tokens), step_metrics(settings, DENOMINATORS, distils=False)):
        assert metrics
    assert policy_metrics(loss, tokens) == policy_metrics(loss, moved)


@every_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("parts", "padding"), [([[0], [1], [2], [3], [4]], 0), ([[3, 1, 4], [0, 2]], 0), ([[0, 1, 2, 3, 4]], 5)]
)
def test_no_split_into_micro_batches_changes_the_sum(
    name: str, aggregation: str, parts: list[list[int]], padding: int
) -> None:
    loss = built(name)
    tokens = make_tokens()
    whole = gradient_of(loss, tokens, token_weights(tokens.response_mask, aggregation, DENOMINATORS).double())
    total = torch.zeros((), dtype=torch.float64)
    gradient = torch.zeros_like(tokens.log_probs)
    for rows in parts:
        part = rows_of(tokens, rows, padding=padding)
        weights = token_weights(part.response_mask, aggregation, DENOMINATORS).double()
        of_part, part_gradient = gradient_of(loss, part, weights)
        total = total + of_part
        gradient[rows] = part_gradient[:, :6]
    torch.testing.assert_close(total, whole[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, whole[1], rtol=1e-12, atol=1e-14)


@every_loss
def test_metrics_merge_to_those_of_the_whole_step(name: str) -> None:
    """Each carries its reduction: fractions over 14 response tokens, whichever rows are passed together."""
    loss = built(name)
    tokens = make_tokens()
    of_step = step_metrics(ObjectiveSettings(loss=loss), DENOMINATORS, distils=False)
    whole = results(merge_metrics([policy_metrics(loss, tokens), of_step]))
    parts = [policy_metrics(loss, rows_of(tokens, rows)) for rows in ([3, 0], [1], [2, 4])]
    assert results(merge_metrics([*parts, of_step])) == pytest.approx(whole)

    counted = loss.counted(tokens)
    assert set(counted) == set(loss.fractions)
    without_rows = results(of_step)
    for key, is_counted in counted.items():
        assert is_counted.dtype == torch.bool, key
        assert is_counted.shape == tokens.log_probs.shape, key
        num_counted = (is_counted & tokens.response_mask).sum().item()
        assert whole[key] == pytest.approx(num_counted / 14)
        assert without_rows[key] == 0.0


@every_loss
def test_no_input_is_changed_and_two_calls_agree(name: str) -> None:
    loss = built(name)
    tokens = make_tokens()
    copies = {field.name: getattr(tokens, field.name).clone() for field in dataclasses.fields(tokens)}
    first = loss.token_losses(tokens)
    second = loss.token_losses(tokens)
    assert same_bits(first, second)
    for key, tensor in copies.items():
        assert torch.equal(getattr(tokens, key), tensor), key


@every_loss
def test_a_loss_names_its_source_and_refuses_unknown_settings(name: str) -> None:
    loss = built(name)
    assert loss.name == name
    assert "Source:" in (type(loss).__doc__ or "")
    assert type(loss) is loss_class(name)
    for field in dataclasses.fields(loss.config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(loss.config, field.name, None)
    with pytest.raises(ConfigError, match=rf"^unknown key 'worker\.actor\.loss\.{name}\.no_such_setting'"):
        build_loss(name, {"no_such_setting": 1})


def test_an_unknown_loss_names_the_nearest_and_all_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'gspo_tokn' is unknown\. Did you mean 'gspo_token'\? Known: cispo, default,"
    ):
        build_loss("gspo_tokn")
