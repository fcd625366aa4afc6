"""The chunked divergence: the dense one's values and gradients, in memory that does not grow with the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_tensors import LiveTensors
from torch import Tensor

from cepo.losses.divergence import chunked_divergence, token_divergence
from cepo.types import DivergenceConfig

SETTINGS = {
    "forward_kl": DivergenceConfig(kind="forward_kl"),
    "reverse_kl": DivergenceConfig(kind="reverse_kl"),
    "jsd": DivergenceConfig(kind="jsd"),
    "jsd top 5": DivergenceConfig(kind="jsd", support="topk", topk=5),
    "forward_kl, teacher's top 5": DivergenceConfig(support="topk", topk=5, topk_from="teacher"),
    "sampled": DivergenceConfig(kind="reverse_kl", support="sampled"),
    "entry clip": DivergenceConfig(clip=0.05, clip_mode="vocab_entry"),
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def case(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and heads of student and teacher, and targets."""
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, tokens, width, generator=generator, dtype=dtype)
    student_head, teacher_head = (torch.randn(vocabulary, width, generator=generator, dtype=dtype) for _ in range(2))
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return student, teacher, student_head, teacher_head, targets


@every_setting
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_of_any_size_give_the_dense_values_and_gradients(
    settings: DivergenceConfig, chunk_tokens: int, temperature: float
) -> None:
    student, teacher, student_head, teacher_head, targets = case(7, 4, 11, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (student, student_head)]
    scale = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)

    student_logits, teacher_logits = student @ student_head.T / temperature, teacher @ teacher_head.T / temperature
    dense_log_probs = student_logits.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    _, dense = token_divergence(student_logits, teacher_logits, targets, settings)
    expected = torch.autograd.grad(((dense + 0.3 * dense_log_probs) * scale).sum(), leaves)

    inputs = (student, teacher, student_head, teacher_head, targets, settings)
    log_probs, found = chunked_divergence(*inputs, temperature=temperature, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(log_probs, dense_log_probs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found, dense, rtol=1e-12, atol=1e-14)
    gradients = torch.autograd.grad(((found + 0.3 * log_probs) * scale).sum(), leaves)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_heads_weight_gets_the_dense_gradient() -> None:
    """The head may be a module. The teacher's side gets no gradient."""
    student, teacher, student_head, teacher_head, targets = case(7, 4, 11, torch.float32)
    heads = [torch.nn.Linear(4, 11, bias=False) for _ in range(2)]
    for head, weight in zip(heads, (student_head, teacher_head), strict=True):
        head.weight.data.copy_(weight)
    options: Any = {"settings": SETTINGS["jsd"], "temperature": 1.0, "chunk_tokens": 2, "targets": targets}
    teacher.requires_grad_()
    _, found = chunked_divergence(student, teacher, student_head=heads[0], teacher_head=heads[1], **options)
    found.sum().backward()
    _, plain = chunked_divergence(
        student, teacher, student_head=student_head.requires_grad_(), teacher_head=teacher_head, **options
    )
    plain.sum().backward()
    assert torch.equal(found, plain)
    assert torch.equal(heads[0].weight.grad, student_head.grad)
    assert (teacher.grad, heads[1].weight.grad) == (None, None)


def test_without_gradient_the_values_are_the_same_bits() -> None:
    """Teachers may have another width."""
    student, _, student_head, _, targets = case(7, 4, 11, torch.float32)
    _, teacher, _, teacher_head, _ = case(7, 6, 11, torch.float32)
    inputs = (student, teacher, student_head, teacher_head, targets, SETTINGS["jsd"])
    with torch.no_grad():
        plain = chunked_divergence(*inputs, temperature=0.9, chunk_tokens=3)
    graph = chunked_divergence(*inputs, temperature=0.9, chunk_tokens=3)
    assert all(torch.equal(one, other) for one, other in zip(plain, graph, strict=True))


def tensors_of_one_update(settings: DivergenceConfig, tokens: int, chunk_tokens: int) -> LiveTensors:
    student, teacher, student_head, teacher_head, targets = case(tokens, 8, 2048, torch.float32)
    student.requires_grad_()
    student_head.requires_grad_()
    with LiveTensors(floor=4 * chunk_tokens * 2048) as seen:
        log_probs, found = chunked_divergence(
            student, teacher, student_head, teacher_head, targets, settings, temperature=0.7, chunk_tokens=chunk_tokens
        )
        assert seen.live == 0, "a tensor of a chunk's tokens x vocabulary outlived the forward pass"
        (log_probs.sum() + found.sum()).backward()
    return seen


@every_setting
def test_the_largest_tensor_is_one_chunk_wide(settings: DivergenceConfig) -> None:
    """A chunk has 16 tokens, and the peak is the same for 64 and 512 tokens."""
    few, many = (tensors_of_one_update(settings, tokens, 16) for tokens in (64, 512))
    assert few.largest == many.largest == 16 * 2048
    assert few.peak == many.peak
    # The dense computation would hold two models' logits of 512 tokens alone.
    assert many.peak < 2 * 512 * 2048
