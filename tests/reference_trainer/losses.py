"""Losses of one response, token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference_trainer.settings import Divergence, Settings


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
    """(T,) as `signals.kl_estimate`, with gradient."""
    difference = log_probs - reference
    return difference if penalty == "kl" else ((-difference).exp() + difference - 1).clamp(max=10)


def divergences(student: Tensor, teacher: Tensor, settings: Divergence) -> Tensor:
    """(T,) from logits (T, V)."""
    of_student, of_teacher = student.double().softmax(dim=1), teacher.double().softmax(dim=1)
    if settings.top is not None:
        kept = of_student.detach().topk(settings.top, dim=1).indices
        of_student, of_teacher = (
            torch.cat([probs.gather(1, kept), 1 - probs.gather(1, kept).sum(dim=1, keepdim=True)], dim=1)
            for probs in (of_student, of_teacher)
        )
    if settings.kind == "forward_kl":
        return (of_teacher * (of_teacher.log() - of_student.log())).sum(dim=1).float()
    middle = (of_student + of_teacher) / 2
    parts = [(probs * (probs.log() - middle.log())).sum(dim=1) for probs in (of_teacher, of_student)]
    return (0.5 * parts[0] + 0.5 * parts[1]).float()


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
