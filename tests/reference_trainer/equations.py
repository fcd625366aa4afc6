"""The equations: advantages in NumPy, in loops over groups and tokens, and the losses of one response, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from reference_trainer.settings import Divergence, Settings

Rows = list[numpy.ndarray]
"""One array per response, one number per token."""
Sides = tuple[numpy.ndarray, numpy.ndarray] | None
"""Log-probs of a response's tokens with the right reference and with the wrong one; None if it lacks either."""


def group_advantages(rewards: Sequence[float], size: int) -> list[float]:
    """GRPO: (R - mean) / (std + 1e-6) with std over n - 1; 0 where all rewards of the group are equal."""
    result: list[float] = []
    for start in range(0, len(rewards), size):
        group = numpy.array(rewards[start : start + size], dtype=numpy.float64)
        if group.max() - group.min() < 1e-6:
            result += [0.0] * size
        else:
            result += list((group - group.mean()) / (group.std(ddof=1) + 1e-6))
    return result


def leave_one_out(rewards: Sequence[float], size: int) -> list[float]:
    """RLOO: R less the mean of the others."""
    result = []
    for index, reward in enumerate(rewards):
        start = index // size * size
        other_rewards = [rewards[place] for place in range(start, start + size) if place != index]
        result.append(reward - sum(other_rewards) / len(other_rewards))
    return result


def best_of_group(rewards: Sequence[float], size: int) -> list[float]:
    """GRPO for pass@k: (best - second) / (std + 1e-6) for the single best response, 0 for all others."""
    result = [0.0] * len(rewards)
    for start in range(0, len(rewards), size):
        group = list(rewards[start : start + size])
        second, best = sorted(group)[-2:]
        if best - second > 1e-6:
            result[start + group.index(best)] = (best - second) / (float(numpy.std(group, ddof=1)) + 1e-6)
    return result


def returns(token_rewards: Rows, gamma: float) -> Rows:
    """G_t = r_t + gamma G_{t+1}."""
    result = []
    for rewards in token_rewards:
        sums = numpy.zeros(len(rewards))
        for start in range(len(rewards)):
            sums[start] = sum(gamma ** (token - start) * rewards[token] for token in range(start, len(rewards)))
        result.append(sums)
    return result


def generalised(token_rewards: Rows, values: Rows, gamma: float, decay: float) -> Rows:
    """A_t = sum_l (gamma lambda)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}), V 0 behind the end."""
    result = []
    for rewards, value in zip(token_rewards, values, strict=True):
        behind = numpy.append(value[1:], 0.0)
        errors = rewards + gamma * behind - value
        result.append(returns([errors], gamma * decay)[0])
    return result


def hindsight(rewards: Sequence[float], deltas: Rows, size: int) -> Rows:
    """(R - V_t) / sigma, V_t = 1 / (1 + (1 - p) / p e^(-sum of earlier deltas)), p of the others, sigma of p over n - 1."""
    result = []
    for index, (reward, delta) in enumerate(zip(rewards, deltas, strict=True)):
        start = index // size * size
        other_rewards = [rewards[place] for place in range(start, start + size) if place != index]
        rate = (sum(other_rewards) + 0.5) / size
        sigma = math.sqrt(rate * (1 - rate) * size / (size - 1))
        values = numpy.zeros(len(delta))
        for token in range(len(delta)):
            odds_against = (1 - rate) / rate * math.exp(-sum(delta[:token]))
            values[token] = 1 / (1 + odds_against)
        result.append((reward - values) / sigma)
    return result


def whitened(rows: Rows) -> Rows:
    """(x - mean) / sqrt(var + 1e-8) over all tokens of the batch, var over n - 1."""
    everything = numpy.concatenate(rows)
    return [(row - everything.mean()) / math.sqrt(everything.var(ddof=1) + 1e-8) for row in rows]


def mixing_at(step: int, initial: float, decay_steps: int) -> float:
    """lambda, from its first value down to 0."""
    return initial * max(0.0, 1.0 - step / decay_steps)


def evidence_advantages(advantages: Rows, deltas: Rows, mixing: float, radius: float) -> Rows:
    """A ((1 - lambda) + lambda clip(e^(sign(A) delta), 1 - r, 1 + r))."""
    result = []
    for of_row, delta in zip(advantages, deltas, strict=True):
        tokens = []
        for advantage, value in zip(of_row, delta, strict=True):
            weight = min(max(math.exp(numpy.sign(advantage) * value), 1 - radius), 1 + radius)
            tokens.append(advantage * ((1 - mixing) + mixing * weight))
        result.append(numpy.array(tokens))
    return result


def gated_advantages(
    advantages: Rows, teachers: Sequence[Sides], mixing: float, threshold: float, floor: float
) -> Rows:
    """A where the contrast stands out from its noise and has A's sign, floor A elsewhere; A without teachers.

    The noise is the lower median of the contrasts that contradict A, of tokens whose mean probability is below 0.9.
    """
    contradicting = []
    for of_row, sides in zip(advantages, teachers, strict=True):
        if sides is None:
            continue
        for advantage, right, wrong in zip(of_row, *sides, strict=True):
            if (right - wrong) * advantage < 0 and (math.exp(right) + math.exp(wrong)) / 2 < 0.9:
                contradicting.append(abs(right - wrong))
    noise = 0.05
    if contradicting:
        noise = max(0.05, sorted(contradicting)[(len(contradicting) - 1) // 2] / 0.6745)
    result = []
    for of_row, sides in zip(advantages, teachers, strict=True):
        gates = numpy.ones(len(of_row))
        if sides is not None:
            for token, (advantage, right, wrong) in enumerate(zip(of_row, *sides, strict=True)):
                agrees = (right > wrong and advantage > 0) or (right < wrong and advantage < 0)
                gates[token] = 1.0 if agrees and abs(right - wrong) > threshold * noise else floor
        result.append(of_row * ((1 - mixing) + mixing * gates))
    return result


def dependences(deltas: Rows) -> Rows:
    """k = e^-d + d - 1 of each token, at most 10."""
    return [numpy.minimum(numpy.exp(-delta) + delta - 1, 10.0) for delta in deltas]


def vppo_advantages(
    advantages: Sequence[float], deltas: Rows, sees_image: Sequence[bool], *, share: float, lowest: float, bonus: float
) -> Rows:
    """A scale at the tokens with the highest k, plus the bonus; the scale grows with the mean of k over the response."""
    tokens = dependences(deltas)
    scores = [float(row.mean()) for row in tokens]
    counted = [scores[row] for row, sees in enumerate(sees_image) if sees and advantages[row] != 0]
    span = max(counted) - min(counted)
    mean = sum((score - min(counted)) / span for score in counted) / len(counted)
    result = []
    for row, advantage in enumerate(advantages):
        if advantage == 0:
            result.append(numpy.full(len(tokens[row]), bonus))
        elif not sees_image[row]:
            result.append(numpy.full(len(tokens[row]), advantage + bonus))
        else:
            scale = lowest + (scores[row] - min(counted)) / span * (1 - lowest) / mean
            number = math.ceil(share * len(tokens[row]))
            best = sorted(range(len(tokens[row])), key=lambda token: -tokens[row][token])[:number]
            learning = numpy.isin(numpy.arange(len(tokens[row])), best)
            result.append(advantage * scale * learning + bonus)
    return result


def papo_advantages(advantages: Sequence[float], deltas: Rows, *, weight: float, bonus: float) -> Rows:
    """A + weight dk/d(log P) + bonus, the derivative 1 - e^-d, or 0 where k is cut at 10."""
    result = []
    for advantage, delta in zip(advantages, deltas, strict=True):
        derivative = numpy.where(numpy.exp(-delta) + delta - 1 < 10, 1 - numpy.exp(-delta), 0.0)
        result.append(advantage + weight * derivative + bonus)
    return result


def pgpo_advantages(advantages: Sequence[float], deltas: Rows, *, threshold: float, boost: float) -> Rows:
    """A times a gate on log(1 + k), scaled to [0, 1] in the response; the gates of a response average to 1."""
    result = []
    for advantage, tokens in zip(advantages, dependences(deltas), strict=True):
        logs = numpy.log1p(tokens)
        span = logs.max() - logs.min()
        if span <= 1e-6:
            result.append(numpy.full(len(logs), advantage))
            continue
        gates = []
        for value in (logs - logs.min()) / span:
            gates.append(value / threshold if value < threshold else 1 + boost * (value - threshold) / (1 - threshold))
        result.append(advantage * numpy.array(gates) / numpy.mean(gates))
    return result


def residual_advantages(
    advantages: Sequence[float],
    deltas: Rows,
    has_both: Sequence[bool],
    *,
    strength: float,
    tau: float,
    threshold: float,
) -> Rows:
    """RLCSD's selected tokens get A + strength tanh(delta / tau) with the sign of A; two means of the loss are factors."""
    num_tokens = sum(len(delta) for delta in deltas)
    counts = {True: 0, False: 0}  # selected, and not
    rows = []
    for advantage, delta, counted in zip(advantages, deltas, has_both, strict=True):
        tokens = []
        for value in delta:
            residual = strength * math.tanh(value / tau)
            selected = abs(residual) > threshold
            moved = advantage + residual if selected else advantage
            if moved * advantage < 0:
                moved = 0.0
            if counted and advantage != 0:
                counts[selected] += 1
                tokens.append((moved, selected))
            else:
                tokens.append((0.0, selected))
        rows.append(tokens)
    factors = {kind: num_tokens / max(count, 1) for kind, count in counts.items()}
    result = []
    for tokens in rows:
        result.append(numpy.array([value * factors[selected] for value, selected in tokens]))
    return result


def spread(advantages: Sequence[float], lengths: Sequence[int]) -> Rows:
    """Each response's advantage on all of its tokens."""
    return [numpy.full(length, advantage) for advantage, length in zip(advantages, lengths, strict=True)]


def outcome_rewards(rewards: Sequence[float], lengths: Sequence[int]) -> Rows:
    """The reward on the last token."""
    result = [numpy.zeros(length) for length in lengths]
    for row, reward in zip(result, rewards, strict=True):
        row[-1] = reward
    return result


def kl_estimate(policy: numpy.ndarray, reference: numpy.ndarray, penalty: str) -> numpy.ndarray:
    """Schulman's estimators of KL(policy || reference) at sampled tokens; one token's `low_var_kl` is at most 10."""
    difference = policy - reference
    if penalty == "kl":
        return difference
    assert penalty == "low_var_kl", penalty
    return numpy.minimum(numpy.exp(-difference) + difference - 1, 10)


def next_coefficient(coefficient: float, observed: float, target: float, horizon: float, sequences: int) -> float:
    """Ziegler et al.: the coefficient follows the relative error of the KL, cut at 0.2."""
    return coefficient * (1 + min(max(observed / target - 1, -0.2), 0.2) * sequences / horizon)


def policy_losses(log_probs: Tensor, old: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    """(T,) by the name of the loss; rho = P / P_old."""
    low, high, dual = settings.clip
    log_ratio = log_probs - old
    if settings.loss == "cispo":
        return -advantages * log_ratio.exp().clamp(1 - low, 1 + high).detach() * log_probs
    if settings.loss == "sapo":
        ratio = log_ratio.exp()
        losses = []
        for token, advantage in enumerate(advantages.tolist()):
            tau = settings.taus[0] if advantage >= 0 else settings.taus[1]
            losses.append(-advantage * 4 / tau * torch.sigmoid(tau * (ratio[token] - 1)))
        return torch.stack(losses)
    if settings.loss == "gspo":
        log_ratio = log_ratio.mean().expand_as(log_ratio)
    ratio = log_ratio.exp()
    losses = []
    for token, advantage in enumerate(advantages.tolist()):
        clipped = ratio[token].clamp(1 - low, 1 + high)
        loss = torch.maximum(-advantage * ratio[token], -advantage * clipped)
        if advantage < 0:
            loss = torch.minimum(loss, torch.tensor(-advantage * dual))
        losses.append(loss)
    return torch.stack(losses)


def kl_losses(log_probs: Tensor, reference: Tensor, penalty: str) -> Tensor:
    """(T,) as `kl_estimate`, with gradient."""
    difference = log_probs - reference
    return difference if penalty == "kl" else ((-difference).exp() + difference - 1).clamp(max=10)


def divergences(student: Tensor, teacher: Tensor, settings: Divergence) -> Tensor:
    """(T,) from logits (T, V)."""
    of_student = student.double().softmax(dim=1)
    of_teacher = teacher.double().softmax(dim=1)
    if settings.top is not None:
        top_tokens = of_student.detach().topk(settings.top, dim=1).indices
        of_student = _with_tail(of_student, top_tokens)
        of_teacher = _with_tail(of_teacher, top_tokens)
    if settings.kind == "forward_kl":
        return _kl(of_teacher, of_student).float()
    middle = (of_student + of_teacher) / 2
    return (0.5 * _kl(of_teacher, middle) + 0.5 * _kl(of_student, middle)).float()


def _with_tail(probs: Tensor, top_tokens: Tensor) -> Tensor:
    """The probabilities of these tokens, and in a last column what all others have together."""
    of_top = probs.gather(1, top_tokens)
    tail = 1 - of_top.sum(dim=1, keepdim=True)
    return torch.cat([of_top, tail], dim=1)


def _kl(probs: Tensor, other_probs: Tensor) -> Tensor:
    return (probs * (probs.log() - other_probs.log())).sum(dim=1)


def sureness(teacher_logits: Tensor, divergence: Divergence) -> Tensor:
    """exp(-beta H) of the teacher's distributions."""
    log_p = teacher_logits.log_softmax(dim=-1)
    entropies = -(log_p.exp() * log_p).sum(dim=-1)
    return (-divergence.entropy_beta * entropies).exp()


def importance(log_probs: Tensor, old: Tensor, settings: Divergence) -> Tensor:
    """(T,) min(P / P_old, bound), or 1."""
    if settings.importance_clip is None:
        return torch.ones_like(old)
    return (log_probs - old).detach().exp().clamp(max=settings.importance_clip)


def token_weight(length: int, lengths: list[int], settings: Settings) -> float:
    """What each token of a response of `length` counts in an update over responses of `lengths`."""
    if settings.aggregation == "token":
        return 1 / sum(lengths)
    if settings.aggregation == "seq":
        return 1 / len(lengths) / length
    if settings.aggregation == "seq_sum":
        return 1 / len(lengths)
    assert settings.aggregation == "constant", settings.aggregation
    return 1 / (len(lengths) * settings.longest_response)


def learning_rate(step: int, peak: float, horizon: int) -> float:
    """A cosine from the peak to 0."""
    return peak * (1 + math.cos(math.pi * step / horizon)) / 2
