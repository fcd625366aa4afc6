"""Divergences between teacher and student at each token, with the gradient through the student alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from cepo.losses.policy import bounded_ratio
from cepo.metrics import Metrics, max_value, mean_of
from cepo.types import DivergenceConfig

Head = Tensor | Callable[[Tensor], Tensor]
"""From hidden states to logits: a function, or the weight (V, H) of a head without bias."""


def token_divergence(
    student_logits: Float[Tensor, "n V"],
    teacher_logits: Float[Tensor, "n V"],
    targets: Int64[Tensor, " n"],
    settings: DivergenceConfig,
) -> Float[Tensor, " n"]:
    """The divergence of each token in nats, as `settings` says; see `DivergenceConfig` for the kinds.

    With P = softmax(logits) and the sum over the vocabulary v, or over the top-k entries and one bucket for the rest:
    `forward_kl`: sum_v P_T (log P_T - log P_S), gradient P_S - P_T in the student's logits.
    `reverse_kl`: sum_v P_S (log P_S - log P_T), gradient P_S ((log P_S - log P_T) - KL).
    `jsd`: b KL(P_T || M) + (1-b) KL(P_S || M), M = b P_T + (1-b) P_S.
    `sampled` (reverse KL): sg(log P_S - log P_T) log P_S at the target; its gradient's expectation under P_S is that of
    reverse KL, its value is no divergence, and `clip` bounds the coefficient sg(.).

    The bucket makes a coarse-graining: never above the full divergence, non-decreasing in k where the entries nest, the
    full divergence at k >= V. Sources: GKD (Agarwal et al. 2024) for the family, SDPO (2026) for the bucket, OPSD (2026)
    for the clip of vocabulary entries.

    Args:
        student_logits, teacher_logits: finite, already divided by the temperature; no gradient reaches the teacher's.
        targets: the sampled tokens; read with `support="sampled"` only.

    Returns:
        float32, or float64 where the student's logits are float64.
    """
    return _log_probs_and_divergence(student_logits, teacher_logits, targets, settings)[1]


def chunked_divergence(
    student_hidden: Float[Tensor, "N H"],
    teacher_hidden: Float[Tensor, "N K"],
    student_head: Head,
    teacher_head: Head,
    targets: Int64[Tensor, " N"],
    settings: DivergenceConfig,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """The student's log-probs of the targets and the token divergences, from the hidden states that predict them.

    `logits = head(hidden) / temperature`. Runs `chunk_tokens` tokens at a time and recomputes each chunk in the backward
    pass, so that no tensor of tokens x vocabulary outlives its chunk, forward or backward. Gradients reach the student's
    hidden states and whatever trainable weights `student_head` holds; none reach the teacher's side.
    """

    def chunk(student: Tensor, teacher: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_logits = _logits(teacher, teacher_head, temperature)
        student_logits = _logits(student, student_head, temperature)
        return _log_probs_and_divergence(student_logits, teacher_logits, wanted, settings)

    log_probs: list[Tensor] = []
    divergences: list[Tensor] = []
    for start in range(0, max(len(targets), 1), chunk_tokens):
        here = slice(start, start + chunk_tokens)
        inputs = (student_hidden[here], teacher_hidden[here].detach(), targets[here])
        part = _recomputed(chunk, *inputs) if torch.is_grad_enabled() else chunk(*inputs)
        log_probs.append(part[0])
        divergences.append(part[1])
    return torch.cat(log_probs), torch.cat(divergences)


def importance_weight(
    log_probs: Float[Tensor, "*shape"], old_log_probs: Float[Tensor, "*shape"], clip: float
) -> Float[Tensor, "*shape"]:
    """min(P_S(y_t) / P_old(y_t), clip), a constant: a truncated importance weight, not PPO's clip."""
    return bounded_ratio((log_probs - old_log_probs).detach()).clamp(max=clip)


def distillation_losses(
    divergence: Float[Tensor, "*shape"],
    log_probs: Float[Tensor, "*shape"],
    old_log_probs: Float[Tensor, "*shape"],
    token_weight: Float[Tensor, "*shape"],
    settings: DivergenceConfig,
) -> Float[Tensor, "*shape"]:
    """Token losses `token_weight * importance weight * divergence`, to be aggregated like the policy loss.

    Where the weight is 0 the loss is 0 and its gradient is 0 but attached, so that every rank runs the same backward pass.
    """
    losses = divergence * token_weight
    if settings.importance_clip is None:
        return losses
    return losses * importance_weight(log_probs, old_log_probs, settings.importance_clip)


@torch.no_grad()
def distillation_metrics(
    divergence: Float[Tensor, "*shape"],
    log_probs: Float[Tensor, "*shape"],
    old_log_probs: Float[Tensor, "*shape"],
    token_weight: Float[Tensor, "*shape"],
    settings: DivergenceConfig,
) -> Metrics:
    """Mean and largest divergence of the tokens that learn, and how many were clipped."""
    learning = token_weight > 0
    metrics: Metrics = {"distillation/divergence": mean_of(divergence, learning)}
    if bool(learning.any()):
        metrics["distillation/divergence_max"] = max_value(float(divergence[learning].max()))
    if settings.clip is not None and settings.clip_mode == "token" and settings.support != "sampled":
        metrics["distillation/clip_fraction"] = mean_of((divergence >= settings.clip).float(), learning)
    if settings.importance_clip is not None:
        clipped = (log_probs - old_log_probs) > math.log(settings.importance_clip)
        metrics["distillation/importance_clip_fraction"] = mean_of(clipped.float(), learning)
    return metrics


def _recomputed(chunk: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor) -> tuple[Tensor, Tensor]:
    return cast("tuple[Tensor, Tensor]", checkpoint(chunk, *inputs, use_reentrant=False))


def _logits(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    logits = _exact(functional.linear(hidden, head) if isinstance(head, Tensor) else head(hidden))
    return logits if temperature == 1.0 else logits / temperature


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _log_probs_and_divergence(
    student_logits: Tensor, teacher_logits: Tensor, targets: Tensor, settings: DivergenceConfig
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        teacher = _exact(teacher_logits).to(_exact(student_logits[:0]).dtype).log_softmax(dim=1)
    student = _exact(student_logits).log_softmax(dim=1)
    at_targets = targets.unsqueeze(1)
    log_probs = student.gather(1, at_targets).squeeze(1)
    if settings.support == "sampled":
        coefficient = log_probs.detach() - teacher.gather(1, at_targets).squeeze(1)
        return log_probs, log_probs * (coefficient if settings.clip is None else coefficient.clamp(max=settings.clip))
    if settings.support == "topk" and settings.topk < student.shape[1]:
        ranked = student.detach() if settings.topk_from == "student" else teacher
        top = ranked.topk(settings.topk, dim=1).indices
        student, teacher = _coarse(student, top), _coarse(teacher, top)
    entries = _entries(student, teacher, settings)
    if settings.clip is not None and settings.clip_mode == "vocab_entry":
        entries = entries.clamp(max=settings.clip)
    divergence = entries.sum(dim=1)
    if settings.clip is not None and settings.clip_mode == "token":
        divergence = divergence.clamp(max=settings.clip)
    return log_probs, divergence


def _coarse(log_probs: Tensor, top: Tensor) -> Tensor:
    """(n, k + 1): the log-probs of the entries `top`, and the log of the mass of all others.

    That mass is summed over the others themselves: 1 - (mass of the top) has no correct digit left in float32 where the
    top holds nearly everything.
    """
    rest = log_probs.scatter(1, top, -math.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([log_probs.gather(1, top), rest], dim=1)


def _entries(student: Tensor, teacher: Tensor, settings: DivergenceConfig) -> Tensor:
    """What each vocabulary entry adds to the divergence; the parts can be negative, their sum cannot."""
    if settings.kind == "forward_kl":
        return teacher.exp() * (teacher - student)
    if settings.kind == "reverse_kl":
        return student.exp() * (student - teacher)
    # log P_T - log M = -log(b + (1 - b) e^u) with u = log P_S - log P_T, and alike for P_S: nothing large cancels.
    share, rest = settings.jsd_weight, 1.0 - settings.jsd_weight
    odds = student - teacher + math.log(rest / share)
    of_teacher = share * teacher.exp() * (_softplus(odds) + math.log(share))
    return -(of_teacher + rest * student.exp() * (_softplus(-odds) + math.log(rest)))


def _softplus(values: Tensor) -> Tensor:
    """log(1 + e^x), exact to rounding in float64 too: above torch's own threshold of 20 it would be off by 2e-9."""
    return functional.softplus(values, threshold=60.0)
