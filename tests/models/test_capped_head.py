"""Capped logits give the log-probs, gradients and divergences of a model that caps them itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cepo.losses.divergence import chunked_divergence
from cepo.models.head import CappedHead, capped, output_head, replaced_weight, target_log_probs, use_float32_logits
from cepo.types import DivergenceConfig

CAP = 5.0
TOKENS = 13
HIDDEN = 16
VOCABULARY = 97


def build_head(*, trained: bool = True, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """Most of its logits are beyond the cap."""
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype).requires_grad_(trained)
    head.weight.data.copy_(2 * torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)))
    return head


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def expected_log_p(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """(tokens, vocabulary), as transformers' Gemma 4 computes them: divided, tanh, multiplied."""
    logits = torch.tanh(linear(hidden, weight) / CAP) * CAP
    return (logits / temperature).log_softmax(dim=1)


def test_a_cap_of_5_bends_logits_to_less_than_5() -> None:
    """5 tanh(0.1) = 0.4983, 5 tanh(1) = 3.8080, and 5 tanh(20) rounds to 5."""
    logits = torch.tensor([0.0, 0.5, -5.0, 100.0])
    assert capped(logits, CAP).tolist() == pytest.approx([0.0, 0.498340, -3.807971, 5.0], abs=1e-6)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_gradients_are_those_of_capped_logits(trained: bool, temperature: float) -> None:
    head = build_head(trained=trained)
    hidden, targets = draw()
    capped = CappedHead(head, CAP)
    log_probs = target_log_probs(hidden, capped, targets, temperature=temperature, chunk_tokens=4)
    log_p = expected_log_p(hidden, head.weight, temperature)
    expected = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    assert float((log_probs - expected).detach().abs().max()) < 1e-5, "log-probs are float32"

    inputs: list[Tensor] = [hidden, head.weight] if trained else [hidden]
    weight = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)
    gradients = torch.autograd.grad((log_probs * weight).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        relative_gap = (gradient - expected_gradient).norm() / expected_gradient.norm()
        assert float(relative_gap) < 1e-5


@pytest.mark.parametrize("in_float32", [False, True])
def test_a_teachers_weight_is_capped_like_the_students(in_float32: bool) -> None:
    """Forward KL to a teacher with another weight of the same head, which computes float32 logits or its own type's."""
    model: Any = nn.Module()
    model.lm_head = build_head(dtype=torch.bfloat16 if in_float32 else torch.float64)
    if in_float32:
        use_float32_logits(model)
    student = CappedHead(model.lm_head, CAP)
    hidden, targets = draw(student.weight.dtype)
    teacher_weight = student.weight.detach().flip(0)
    settings = DivergenceConfig(kind="forward_kl")
    _, divergence = chunked_divergence(
        hidden,
        hidden.detach(),
        student,
        replaced_weight(student, teacher_weight),
        targets,
        settings,
        temperature=1.0,
        chunk_tokens=4,
    )
    log_student = expected_log_p(hidden.double(), student.weight.double(), 1.0)
    log_teacher = expected_log_p(hidden.double(), teacher_weight.double(), 1.0)
    expected = (log_teacher.exp() * (log_teacher - log_student)).sum(dim=1)
    assert float(expected.min()) > 0.1
    assert float((divergence - expected).detach().abs().max()) < 1e-5


def test_only_a_model_with_a_cap_gets_a_capped_head() -> None:
    head = build_head()
    for cap in (None, 30.0):
        text = SimpleNamespace(final_logit_softcapping=cap)
        model = SimpleNamespace(lm_head=head, config=SimpleNamespace(get_text_config=lambda text=text: text))
        chosen = output_head(model)
        assert (chosen is head) == (cap is None)
        assert chosen.weight is head.weight
