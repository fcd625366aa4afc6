"""Computes the divergence between teacher and student at each token, with gradient for the student alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from cepo.losses.base import bounded_ratio
from cepo.losses.recomputation import recomputed_in_chunks
from cepo.metrics import Metrics, max_of, mean_of
from cepo.types import DivergenceConfig

Head = Tensor | Callable[[Tensor], Tensor]
"""An LM head: a function from hidden states to logits, or the weight (V, H) of a head without bias."""


def token_divergence(
    student_logits: Float[Tensor, "n V"],
    teacher_logits: Float[Tensor, "n V"],
    targets: Int64[Tensor, " n"],
    settings: DivergenceConfig,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Computes the student's log-prob of each target, and the divergence at each token in nats.

    `settings` selects the kind (`DivergenceConfig`).

    With P = softmax(logits) of student (S) and teacher (T), summed over the vocabulary or top-k entries and one bucket:

    - `forward_kl`: sum_v P_T (log P_T - log P_S), with gradient P_S - P_T in the student's logits.
    - `reverse_kl`: sum_v P_S (log P_S - log P_T), with gradient P_S ((log P_S - log P_T) - KL).
    - `jsd`: b KL(P_T || M) + (1-b) KL(P_S || M), M = b P_T + (1-b) P_S.
    - `sampled` (reverse KL): sg(log P_S - log P_T) log P_S at the target. Its expected gradient under P_S is that of
      reverse KL, its value is not a divergence, and `clip` bounds the coefficient sg(.).

    With the bucket the result never exceeds the full divergence, does not decrease in k if the entries nest, and equals
    the full divergence for k >= V. Sources: GKD (Agarwal et al. 2024) for the family, SDPO (2026) for the bucket, OPSD
    (2026) for clipping vocabulary entries.

    Args:
        student_logits, teacher_logits: finite, already divided by the temperature; the teacher's get no gradient.
        targets: the sampled tokens.

    Returns:
        float32, or float64 if the student's logits are float64.
    """
    exact_student_logits = _exact(student_logits)
    with torch.no_grad():
        exact_teacher_logits = _exact(teacher_logits).to(exact_student_logits.dtype)
        teacher = exact_teacher_logits.log_softmax(dim=1)  # (n, V) log P_T
    student = exact_student_logits.log_softmax(dim=1)  # (n, V) log P_S
    log_probs = _at(student, targets)
    if settings.support == "sampled":
        return log_probs, _sampled_divergence(log_probs, _at(teacher, targets), settings)
    if settings.support == "topk" and settings.topk < student.shape[1]:
        ranked = student.detach() if settings.topk_from == "student" else teacher
        top = ranked.topk(settings.topk, dim=1).indices  # (n, k)
        student = _coarse(student, top)  # (n, k + 1)
        teacher = _coarse(teacher, top)
    entries = _entries(student, teacher, settings)
    if settings.clip is not None and settings.clip_mode == "vocab_entry":
        entries = entries.clamp(max=settings.clip)
    divergence = entries.sum(dim=1)
    if settings.clip is not None and settings.clip_mode == "token":
        divergence = divergence.clamp(max=settings.clip)
    return log_probs, divergence


def _at(log_probs: Float[Tensor, "n V"], targets: Int64[Tensor, " n"]) -> Float[Tensor, " n"]:
    return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)


def _sampled_divergence(student: Tensor, teacher: Tensor, settings: DivergenceConfig) -> Tensor:
    """Returns `sg(log P_S - log P_T) log P_S` of the sampled tokens, with the coefficient sg(.) at most `clip`."""
    coefficient = student.detach() - teacher
    if settings.clip is not None:
        coefficient = coefficient.clamp(max=settings.clip)
    return student * coefficient


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
    """Computes the student's log-probs of the targets and the token divergences from hidden states, in chunks.

    `logits = head(hidden) / temperature`. A chunk has `chunk_tokens` tokens and the backward pass recomputes it, so no
    tensor of tokens x vocabulary outlives its chunk, forward or backward. The student's hidden states and the trainable
    weights of `student_head` get gradients, the teacher gets none.
    """

    def of_chunk(student: Tensor, teacher: Tensor, chunk_targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_logits = _logits(teacher, teacher_head, temperature)
        student_logits = _logits(student, student_head, temperature)
        return token_divergence(student_logits, teacher_logits, chunk_targets, settings)

    inputs = (student_hidden, teacher_hidden.detach(), targets)
    log_probs, divergences = recomputed_in_chunks(of_chunk, inputs, chunk_tokens)
    return log_probs, divergences


def distillation_losses(
    divergence: Float[Tensor, "*shape"],
    log_probs: Float[Tensor, "*shape"],
    old_log_probs: Float[Tensor, "*shape"],
    token_weight: Float[Tensor, "*shape"],
    settings: DivergenceConfig,
) -> tuple[Float[Tensor, "*shape"], Metrics]:
    """Returns token losses `token_weight * importance weight * divergence`, to be aggregated like the policy loss.

    The metrics are the mean and maximum divergence of tokens with positive weight, and the clipped fractions.

    The importance weight is min(P_S(y_t) / P_old(y_t), importance_clip) without gradient, unlike PPO's clip, or 1.
    Tokens of weight 0 have loss and gradient 0 but remain in the graph, so that every rank runs the same backward pass.
    """
    losses = divergence * token_weight
    is_taught = token_weight > 0
    value = divergence.detach()
    metrics: Metrics = {"distillation/divergence": mean_of(value, is_taught)}
    metrics["distillation/divergence_max"] = max_of(value, is_taught)
    if settings.clip is not None and settings.clip_mode == "token" and settings.support != "sampled":
        is_clipped = value >= settings.clip
        metrics["distillation/clip_fraction"] = mean_of(is_clipped.float(), is_taught)
    if settings.importance_clip is not None:
        log_ratio = (log_probs - old_log_probs).detach()
        is_bounded = log_ratio > math.log(settings.importance_clip)
        metrics["distillation/importance_clip_fraction"] = mean_of(is_bounded.float(), is_taught)
        losses = losses * bounded_ratio(log_ratio).clamp(max=settings.importance_clip)
    return losses, metrics


def _logits(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    logits = functional.linear(hidden, head) if isinstance(head, Tensor) else head(hidden)
    exact_logits = _exact(logits)
    return exact_logits if temperature == 1.0 else exact_logits / temperature


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _coarse(log_probs: Tensor, top: Tensor) -> Tensor:
    """Returns (n, k + 1): the log-probs of the entries `top` and the log of the remaining mass.

    The remaining mass is summed directly, because 1 - (mass of the top) may have no correct digit in float32.
    """
    without_top = log_probs.scatter(1, top, -math.inf)
    tail = without_top.logsumexp(dim=1, keepdim=True)  # (n, 1)
    return torch.cat([log_probs.gather(1, top), tail], dim=1)


def _entries(student: Tensor, teacher: Tensor, settings: DivergenceConfig) -> Tensor:
    """Returns the term of each vocabulary entry in the divergence; terms can be negative, but not their sum."""
    if settings.kind == "forward_kl":
        return teacher.exp() * (teacher - student)
    if settings.kind == "reverse_kl":
        return student.exp() * (student - teacher)
    # log P_T - log M = -log(b + (1 - b) e^u) with u = log P_S - log P_T, and likewise for P_S, avoids cancellation.
    share = settings.jsd_weight  # b
    students_share = 1.0 - share
    odds = student - teacher + math.log(students_share / share)
    teacher_part = share * teacher.exp() * (_softplus(odds) + math.log(share))
    student_part = students_share * student.exp() * (_softplus(-odds) + math.log(students_share))
    return -(teacher_part + student_part)


def _softplus(values: Tensor) -> Tensor:
    """Returns log(1 + e^x), exact to rounding even in float64; torch's default threshold of 20 has errors of 2e-9."""
    return functional.softplus(values, threshold=60.0)
