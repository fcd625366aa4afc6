"""Divergences: hand-made values, gradients against formulas and finite differences, limits; in chunks the dense ones' numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from cepo.losses.divergence import chunked_divergence, distillation_losses, token_divergence
from cepo.metrics import results
from cepo.types import DivergenceConfig
from testing.live_tensors import LiveTensors

VOCABULARY = 9
FORWARD = DivergenceConfig(kind="forward_kl")
REVERSE = DivergenceConfig(kind="reverse_kl")
JSD = DivergenceConfig(kind="jsd")
KINDS = {
    "forward_kl": FORWARD,
    "reverse_kl": REVERSE,
    "jsd 0.5": JSD,
    "jsd 0.2": DivergenceConfig(kind="jsd", jsd_weight=0.2),
}
SAMPLED = DivergenceConfig(kind="reverse_kl", support="sampled")
every_kind = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)


def with_(settings: DivergenceConfig, **changes: object) -> DivergenceConfig:
    return DivergenceConfig(**{**vars(settings), **changes})


def logits_pair(seed: int, tokens: int = 4, vocabulary: int = VOCABULARY, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = scale * torch.randn(2, tokens, vocabulary, generator=generator, dtype=torch.float64)
    return student, teacher


def divergence(student: Tensor, teacher: Tensor, settings: DivergenceConfig, targets: Tensor | None = None) -> Tensor:
    chosen = torch.zeros(len(student), dtype=torch.int64) if targets is None else targets
    return token_divergence(student, teacher, chosen, settings)[1]


def of_probabilities(student: list[float], teacher: list[float], settings: DivergenceConfig, target: int = 0) -> float:
    """The divergence of one token between two distributions; logits are log-probs moved by 3 and -5."""
    logits = [torch.tensor([row], dtype=torch.float64).log() for row in (student, teacher)]
    return float(divergence(logits[0] + 3.0, logits[1] - 5.0, settings, torch.tensor([target])))


def gradient(student: Tensor, teacher: Tensor, settings: DivergenceConfig, targets: Tensor | None = None) -> Tensor:
    """The student's, while the teacher gets none."""
    leaf, constant = student.clone().requires_grad_(), teacher.clone().requires_grad_()
    divergence(leaf, constant, settings, targets).sum().backward()
    assert constant.grad is None
    assert leaf.grad is not None
    return leaf.grad


FOUR, OTHER_FOUR = [1 / 8, 1 / 2, 1 / 4, 1 / 8], [1 / 2, 1 / 4, 1 / 8, 1 / 8]
HALF, ODDS = [0.5, 0.5], [0.75, 0.25]
TOP_1 = with_(FORWARD, support="topk", topk=1)
ENTRY_CLIP = with_(FORWARD, clip=0.05, clip_mode="vocab_entry")


@pytest.mark.parametrize(
    ("settings", "student", "teacher", "expected"),
    [
        (FORWARD, HALF, ODDS, 0.75 * math.log(1.5) + 0.25 * math.log(0.5)),  # 0.1308
        (REVERSE, HALF, ODDS, 0.5 * math.log(4 / 3)),  # 0.1438
        (
            JSD,
            HALF,
            ODDS,
            0.375 * math.log(6 / 5) + 0.125 * math.log(2 / 3) + 0.25 * math.log(4 / 5) + 0.25 * math.log(4 / 3),
        ),
        (
            with_(JSD, jsd_weight=0.25),  # M = (9/16, 7/16)
            HALF,
            ODDS,
            0.25 * (0.75 * math.log(4 / 3) + 0.25 * math.log(4 / 7)) + 0.375 * (math.log(8 / 9) + math.log(8 / 7)),
        ),
        (SAMPLED, HALF, ODDS, math.log(2 / 3) * math.log(1 / 2)),  # the target is entry 0
        # Entry 1 and the rest: (1/4, 3/4) and (1/2, 1/2). Entry 0 and the rest: (1/2, 1/2) and (1/8, 7/8).
        (with_(TOP_1, topk_from="student"), FOUR, OTHER_FOUR, 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),
        (with_(TOP_1, topk_from="teacher"), FOUR, OTHER_FOUR, 0.5 * math.log(16 / 7)),
        # Clips bound tokens, entries and coefficients from above.
        (with_(FORWARD, clip=0.1), HALF, ODDS, 0.1),
        (with_(FORWARD, clip=0.1), [0.7, 0.3], ODDS, 0.75 * math.log(0.75 / 0.7) + 0.25 * math.log(0.25 / 0.3)),
        # Entries 0.75 log 1.5 = 0.304, bounded to 0.05, and 0.25 log 0.5 = -0.173, which is not: the sum is negative.
        (ENTRY_CLIP, HALF, ODDS, 0.05 + 0.25 * math.log(0.5)),
        # Both sides' entries are added first: 0.0126, and 0.125 log(2/3) + 0.25 log(4/3) = 0.0212, which is bounded.
        (
            with_(JSD, clip=0.02, clip_mode="vocab_entry"),
            HALF,
            ODDS,
            0.375 * math.log(6 / 5) + 0.25 * math.log(4 / 5) + 0.02,
        ),
        # log P_S - log P_T = log 4 at the target, bounded to 0.5; log P_S = log 0.8. There is no bound below.
        (with_(SAMPLED, clip=0.5), [0.8, 0.2], [0.2, 0.8], 0.5 * math.log(0.8)),
        (with_(SAMPLED, clip=0.5), [0.2, 0.8], [0.8, 0.2], math.log(0.25) * math.log(0.2)),
    ],
)
def test_kinds_top_1_and_clips_are_worked_out_by_hand(
    settings: DivergenceConfig, student: list[float], teacher: list[float], expected: float
) -> None:
    assert of_probabilities(student, teacher, settings) == pytest.approx(expected, rel=1e-12)


@given(seed=st.integers(0, 10_000), temperature=st.floats(0.3, 2.0))
def test_both_kls_have_their_gradients_in_closed_form(seed: int, temperature: float) -> None:
    """Forward: P_S - P_T. Reverse: P_S ((log P_S - log P_T) - KL). Each by the temperature and 4 tokens."""
    student, teacher = logits_pair(seed)
    log_student, log_teacher = (torch.log_softmax(logits / temperature, 1) for logits in (student, teacher))
    ratio = log_student - log_teacher
    mean = (log_student.exp() * ratio).sum(1, keepdim=True)
    expected = {FORWARD: log_student.exp() - log_teacher.exp(), REVERSE: log_student.exp() * (ratio - mean)}
    for settings, wanted in expected.items():
        leaf = student.clone().requires_grad_()
        divergence(leaf / temperature, teacher / temperature, settings).mean().backward()
        torch.testing.assert_close(leaf.grad, wanted / (temperature * 4), rtol=0, atol=1e-9)


@every_kind
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"support": "topk", "topk": 4},
        {"support": "topk", "topk": 3, "topk_from": "teacher"},
        {"clip": 0.7},
        {"clip": 0.05, "clip_mode": "vocab_entry"},
        {"support": "topk", "topk": 4, "clip": 0.05, "clip_mode": "vocab_entry"},
    ],
    ids=str,
)
def test_gradients_agree_with_finite_differences_in_float64(
    settings: DivergenceConfig, changes: dict[str, object]
) -> None:
    student, teacher = logits_pair(7)
    chosen = with_(settings, **changes)
    assert torch.autograd.gradcheck(
        lambda logits: divergence(logits, teacher, chosen), student.requires_grad_(), eps=1e-6, atol=1e-7, rtol=1e-6
    )


@given(seed=st.integers(0, 10_000))
def test_the_sampled_gradient_averages_to_that_of_reverse_kl(seed: int) -> None:
    student, teacher = logits_pair(seed, tokens=1)
    probabilities = torch.softmax(student, 1)[0]
    mean = sum(
        probabilities[token] * gradient(student, teacher, SAMPLED, torch.tensor([token])) for token in range(VOCABULARY)
    )
    torch.testing.assert_close(mean, gradient(student, teacher, REVERSE), rtol=0, atol=1e-10)


@every_kind
@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 20.0))
def test_every_kind_is_0_between_equals_and_never_negative(settings: DivergenceConfig, seed: int, scale: float) -> None:
    student, teacher = logits_pair(seed, scale=scale)
    assert float(divergence(student, teacher, settings).min()) >= -1e-12
    assert float(divergence(student, student + 4.0, settings).abs().max()) <= 1e-12
    assert float(gradient(student, student, settings).abs().max()) <= 1e-12


@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 100.0))
def test_jsd_of_one_half_is_symmetric_and_at_most_log_2(seed: int, scale: float) -> None:
    student, teacher = logits_pair(seed, scale=scale)
    forth, back = divergence(student, teacher, JSD), divergence(teacher, student, JSD)
    torch.testing.assert_close(forth, back, rtol=1e-10, atol=1e-12)
    assert float(forth.max()) <= math.log(2) + 1e-12


@given(seed=st.integers(0, 10_000))
def test_jsd_tends_to_both_kls_at_its_ends(seed: int) -> None:
    student, teacher = logits_pair(seed, scale=0.7)  # the relative error is 1e-5 times the mean probability ratio
    low, high = with_(JSD, jsd_weight=1e-5), with_(JSD, jsd_weight=1 - 1e-5)
    forward, reverse = divergence(student, teacher, FORWARD), divergence(student, teacher, REVERSE)
    torch.testing.assert_close(divergence(student, teacher, low) / 1e-5, forward, rtol=2e-3, atol=1e-9)
    torch.testing.assert_close(divergence(student, teacher, high) / 1e-5, reverse, rtol=2e-3, atol=1e-9)


@every_kind
@pytest.mark.parametrize("topk_from", ["student", "teacher"])
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 8.0))
def test_top_k_never_falls_with_k_and_ends_at_the_full_value(
    settings: DivergenceConfig, topk_from: str, seed: int, scale: float
) -> None:
    student, teacher = logits_pair(seed, scale=scale)
    full = divergence(student, teacher, settings)
    found = [
        divergence(student, teacher, with_(settings, support="topk", topk=k, topk_from=topk_from))
        for k in range(1, VOCABULARY + 3)
    ]
    for smaller, larger in itertools.pairwise(found):
        assert bool((smaller <= larger + 1e-10).all())
    assert bool((found[0] >= -1e-12).all())
    assert torch.equal(found[VOCABULARY - 1], full)
    assert torch.equal(found[VOCABULARY + 1], full)
    # With a single entry left over the bucket is that entry.
    torch.testing.assert_close(found[VOCABULARY - 2], full, rtol=0, atol=1e-6)


def test_a_bucket_of_mass_1e_minus_13_keeps_6_digits_in_float32() -> None:
    student, teacher = (torch.zeros(1, 6, dtype=torch.float64) for _ in range(2))
    student[0, 0], teacher[0, 0], teacher[0, 5] = 31.0, 20.0, 5.0
    settings = with_(REVERSE, support="topk", topk=1)
    exact = gradient(student, teacher, settings)
    single = gradient(student.float(), teacher.float(), settings)
    # In float32 1 - softmax(student)[0] is exactly 0; the rest carries 5 e^-31 and a gradient of its own.
    assert float(exact[0, 1]) != 0.0
    torch.testing.assert_close(single.double()[0, 1:], exact[0, 1:], rtol=1e-5, atol=0)


def test_what_is_clipped_has_no_gradient() -> None:
    student, teacher = (torch.tensor(rows, dtype=torch.float64).log() for rows in ([HALF, [0.7, 0.3]], [ODDS, ODDS]))
    of_tokens = gradient(student, teacher, with_(FORWARD, clip=0.1))
    assert of_tokens[0].tolist() == [0.0, 0.0]
    assert of_tokens[1].tolist() == pytest.approx([-0.05, 0.05])
    # What is left of the first token's loss is -P_T(1) log P_S(1), with the gradient P_T(1) (P_S - onehot(1)).
    assert gradient(student, teacher, ENTRY_CLIP)[0].tolist() == pytest.approx([0.125, -0.125])


@pytest.mark.parametrize(
    "settings",
    [*KINDS.values(), *(with_(kind, support="topk", topk=2) for kind in KINDS.values()), SAMPLED],
    ids=lambda settings: f"{settings.kind} {settings.support} {settings.jsd_weight}",
)
def test_logits_of_10000_give_finite_values_and_gradients(settings: DivergenceConfig) -> None:
    """The computation is in float32."""
    student = torch.tensor([[1e4, 0.0, -1e4, 1.0], [-1e4, -1e4, 1e4, 1e4]])
    teacher = torch.tensor([[-1e4, 1e4, 0.0, 0.0], [0.0, 1e4, -1e4, 1e4]])
    value = divergence(student, teacher, settings)
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    assert gradient(student, teacher, settings).isfinite().all()


def test_bfloat16_logits_are_taken_in_float32() -> None:
    """float64 logits stay as they are."""
    student, teacher = logits_pair(3)
    assert divergence(student, teacher, JSD).dtype == torch.float64
    rounded = [logits.bfloat16() for logits in (student, teacher)]
    assert torch.equal(divergence(*rounded, JSD), divergence(*(logits.float() for logits in rounded), JSD))


def test_losses_are_weight_times_importance_times_divergence() -> None:
    """The importance is min(P / P_old, 2), whose log is bounded by +-20, and has no gradient."""
    log_probs = torch.tensor([math.log(3.0), math.log(0.5), 500.0, -500.0, 0.0], requires_grad=True)
    value, weight = torch.full((5,), 0.3), torch.tensor([2.0, 2.0, 2.0, 2.0, 0.0])
    plain, _ = distillation_losses(value, log_probs, torch.zeros(5), weight, JSD)
    assert plain.tolist() == pytest.approx([0.6, 0.6, 0.6, 0.6, 0.0])
    clipped, _ = distillation_losses(value, log_probs, torch.zeros(5), weight, with_(JSD, importance_clip=2.0))
    assert clipped.tolist() == pytest.approx([1.2, 0.3, 1.2, 0.6 * math.exp(-20.0), 0.0])
    assert not clipped.requires_grad


def test_metrics_count_tokens_with_a_weight_only() -> None:
    value, zeros = torch.tensor([0.1, 0.5, 9.0]), torch.zeros(3)
    weight, old = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([-1.0, 0.0, -1.0])
    settings = with_(FORWARD, clip=0.5, importance_clip=2.0)
    found = results(distillation_losses(value, zeros, old, weight, settings)[1])
    assert found == pytest.approx(
        {
            "distillation/divergence": 0.3,
            "distillation/divergence_max": 0.5,
            "distillation/clip_fraction": 0.5,
            "distillation/importance_clip_fraction": 0.5,
        }
    )
    assert results(distillation_losses(value, zeros, old, zeros, settings)[1]) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("kind", "jd"), ("jsd_weight", 0.0), ("jsd_weight", 1.0), ("support", "top_k"), ("topk", 0), ("topk_from", "both"),
     ("clip", 0.0), ("clip_mode", "vocab"), ("importance_clip", -1.0), ("support", "sampled")],
)  # fmt: skip
def test_a_value_outside_its_range_is_refused_with_its_name(key: str, value: object) -> None:
    """Reverse KL alone can be sampled."""
    words = "support is sampled with kind forward_kl" if value == "sampled" else rf"DivergenceConfig\n{key}\n"
    with pytest.raises(ValidationError, match=words):
        with_(FORWARD, **{key: value})


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
