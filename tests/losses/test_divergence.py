"""Divergences: hand-made values, gradients against formulas and finite differences, limits; in chunks the dense ones' numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from case_files import cases
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from worked_examples import tensor

from cepo.losses.divergence import chunked_divergence, distillation_losses, token_divergence
from cepo.losses.recomputation import recomputed_in_chunks
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


def logits_pair(seed: int, tokens: int = 4, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits of student and teacher, drawn in float64."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, tokens, VOCABULARY, generator=generator, dtype=torch.float64)
    return scale * student, scale * teacher


def divergence(student: Tensor, teacher: Tensor, settings: DivergenceConfig, targets: Tensor | None = None) -> Tensor:
    if targets is None:
        targets = torch.zeros(len(student), dtype=torch.int64)
    _, value = token_divergence(student, teacher, targets, settings)
    return value


def gradient(student: Tensor, teacher: Tensor, settings: DivergenceConfig, targets: Tensor | None = None) -> Tensor:
    """The student's, while the teacher gets none."""
    leaf = student.clone().requires_grad_()
    constant = teacher.clone().requires_grad_()
    divergence(leaf, constant, settings, targets).sum().backward()
    assert constant.grad is None
    assert leaf.grad is not None
    return leaf.grad


EXAMPLES = cases(__file__, "worked_divergences.yaml")


@pytest.mark.parametrize("name", EXAMPLES)
def test_kinds_top_1_and_clips_are_worked_out_by_hand(name: str) -> None:
    """Logits are log-probs moved by 3 and -5."""
    example = EXAMPLES[name]
    student = tensor([example["student"]]).log() + 3.0
    teacher = tensor([example["teacher"]]).log() - 5.0
    value = divergence(student, teacher, DivergenceConfig(**example["settings"]))
    assert float(value) == pytest.approx(example["expected"], rel=1e-12)


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

    def of_student(logits: Tensor) -> Tensor:
        return divergence(logits, teacher, chosen)

    assert torch.autograd.gradcheck(of_student, student.requires_grad_(), eps=1e-6, atol=1e-7, rtol=1e-6)


@given(seed=st.integers(0, 10_000))
def test_the_sampled_gradient_averages_to_that_of_reverse_kl(seed: int) -> None:
    student, teacher = logits_pair(seed, tokens=1)
    chances = torch.softmax(student, 1)[0]
    expected = gradient(student, teacher, REVERSE)
    mean = torch.zeros_like(student)
    for token, chance in enumerate(chances):
        sampled = gradient(student, teacher, SAMPLED, torch.tensor([token]))
        mean += chance * sampled
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-10)


@every_kind
@pytest.mark.parametrize("topk_from", ["student", "teacher"])
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 8.0))
def test_top_k_never_falls_with_k_and_ends_at_the_full_value(
    settings: DivergenceConfig, topk_from: str, seed: int, scale: float
) -> None:
    """With a single entry left over the bucket is that entry."""
    student, teacher = logits_pair(seed, scale=scale)
    full = divergence(student, teacher, settings)
    of_k: dict[int, Tensor] = {}
    for k in range(1, VOCABULARY + 3):
        top_k = with_(settings, support="topk", topk=k, topk_from=topk_from)
        of_k[k] = divergence(student, teacher, top_k)
    for k in range(1, VOCABULARY + 2):
        assert (of_k[k] <= of_k[k + 1] + 1e-10).all()
    assert (of_k[1] >= -1e-12).all()
    assert torch.equal(of_k[VOCABULARY], full)
    assert torch.equal(of_k[VOCABULARY + 2], full)
    torch.testing.assert_close(of_k[VOCABULARY - 1], full, rtol=0, atol=1e-6)


def test_a_bucket_of_mass_1e_minus_13_keeps_6_digits_in_float32() -> None:
    """In float32 1 - softmax(student)[0] is exactly 0; the rest carries 5 e^-31 and a gradient of its own."""
    student = torch.zeros(1, 6, dtype=torch.float64)
    student[0, 0] = 31.0
    teacher = torch.zeros(1, 6, dtype=torch.float64)
    teacher[0, 0] = 20.0
    teacher[0, 5] = 5.0
    settings = with_(REVERSE, support="topk", topk=1)
    exact = gradient(student, teacher, settings)[0]
    single = gradient(student.float(), teacher.float(), settings)[0].double()
    assert float(exact[1]) != 0.0
    torch.testing.assert_close(single[1:], exact[1:], rtol=1e-5, atol=0)


def test_what_is_clipped_has_no_gradient() -> None:
    """Of the first token's entries the second one's loss is left, -P_T log P_S, with the gradient P_T (P_S - onehot)."""
    student = torch.tensor([[0.5, 0.5], [0.7, 0.3]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.75, 0.25], [0.75, 0.25]], dtype=torch.float64).log()
    clipped_tokens = with_(FORWARD, clip=0.1)
    of_tokens = gradient(student, teacher, clipped_tokens)
    assert of_tokens[0].tolist() == [0.0, 0.0]
    assert of_tokens[1].tolist() == pytest.approx([-0.05, 0.05])
    clipped_entries = with_(FORWARD, clip=0.05, clip_mode="vocab_entry")
    of_entries = gradient(student, teacher, clipped_entries)
    assert of_entries[0].tolist() == pytest.approx([0.125, -0.125])


@every_kind
@pytest.mark.parametrize("changes", [{}, {"support": "topk", "topk": 2}], ids=str)
def test_logits_of_10000_give_finite_values_and_gradients(
    settings: DivergenceConfig, changes: dict[str, object]
) -> None:
    assert_finite_in_float32(with_(settings, **changes))


def test_sampled_logits_of_10000_give_finite_values() -> None:
    assert_finite_in_float32(SAMPLED)


def assert_finite_in_float32(settings: DivergenceConfig) -> None:
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
    student = student.bfloat16()
    teacher = teacher.bfloat16()
    of_halves = divergence(student, teacher, JSD)
    of_singles = divergence(student.float(), teacher.float(), JSD)
    assert torch.equal(of_halves, of_singles)


def test_losses_are_weight_times_importance_times_divergence() -> None:
    """The importance is min(P / P_old, 2), whose log is bounded by +-20, and has no gradient."""
    log_probs = torch.tensor([math.log(3.0), math.log(0.5), 500.0, -500.0, 0.0], requires_grad=True)
    old = torch.zeros(5)
    value = torch.full((5,), 0.3)
    weight = torch.tensor([2.0, 2.0, 2.0, 2.0, 0.0])
    plain, _ = distillation_losses(value, log_probs, old, weight, JSD)
    assert plain.tolist() == pytest.approx([0.6, 0.6, 0.6, 0.6, 0.0])
    with_importance = with_(JSD, importance_clip=2.0)
    clipped, _ = distillation_losses(value, log_probs, old, weight, with_importance)
    assert clipped.tolist() == pytest.approx([1.2, 0.3, 1.2, 0.6 * math.exp(-20.0), 0.0])
    assert not clipped.requires_grad


def test_metrics_count_tokens_with_a_weight_only() -> None:
    value = torch.tensor([0.1, 0.5, 9.0])
    new = torch.zeros(3)
    old = torch.tensor([-1.0, 0.0, -1.0])
    weight = torch.tensor([1.0, 1.0, 0.0])
    settings = with_(FORWARD, clip=0.5, importance_clip=2.0)
    _, metrics = distillation_losses(value, new, old, weight, settings)
    expected = {
        "distillation/divergence": 0.3,
        "distillation/divergence_max": 0.5,
        "distillation/clip_fraction": 0.5,
        "distillation/importance_clip_fraction": 0.5,
    }
    assert results(metrics) == pytest.approx(expected)
    _, without_weight = distillation_losses(value, new, old, torch.zeros(3), settings)
    assert results(without_weight) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "jd"),
        ("jsd_weight", 0.0),
        ("jsd_weight", 1.0),
        ("support", "top_k"),
        ("topk", 0),
        ("topk_from", "both"),
        ("clip", 0.0),
        ("clip_mode", "vocab"),
        ("importance_clip", -1.0),
    ],
)
def test_a_value_outside_its_range_is_refused_with_its_name(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=rf"DivergenceConfig\n{key}\n"):
        with_(FORWARD, **{key: value})


def test_reverse_kl_alone_can_be_sampled() -> None:
    with pytest.raises(ValidationError, match="support is sampled with kind forward_kl"):
        with_(FORWARD, support="sampled")


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


class Heads(NamedTuple):
    """Hidden states and heads of student and teacher, and the sampled tokens, in the order of `chunked_divergence`."""

    student: Tensor
    teacher: Tensor
    student_head: Tensor
    teacher_head: Tensor
    targets: Tensor


def drawn_heads(tokens: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> Heads:
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, tokens, width, generator=generator, dtype=dtype)
    return Heads(
        student=student,
        teacher=teacher,
        student_head=torch.randn(vocabulary, width, generator=generator, dtype=dtype),
        teacher_head=torch.randn(vocabulary, width, generator=generator, dtype=dtype),
        targets=torch.randint(vocabulary, (tokens,), generator=generator),
    )


@every_setting
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_of_any_size_give_the_dense_values_and_gradients(
    settings: DivergenceConfig, chunk_tokens: int, temperature: float
) -> None:
    heads = drawn_heads(7, 4, 11, torch.float64)
    leaves = (heads.student.requires_grad_(), heads.student_head.requires_grad_())
    scale = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)

    def gradients(log_probs: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        total = ((values + 0.3 * log_probs) * scale).sum()
        return torch.autograd.grad(total, leaves)

    student_logits = heads.student @ heads.student_head.T / temperature
    teacher_logits = heads.teacher @ heads.teacher_head.T / temperature
    targets = heads.targets.unsqueeze(1)
    dense_log_probs = student_logits.log_softmax(1).gather(1, targets).squeeze(1)
    _, dense_values = token_divergence(student_logits, teacher_logits, heads.targets, settings)
    dense_gradients = gradients(dense_log_probs, dense_values)

    log_probs, values = chunked_divergence(*heads, settings, temperature=temperature, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(log_probs, dense_log_probs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(values, dense_values, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients(log_probs, values), dense_gradients, rtol=1e-10, atol=1e-12)


def module_of(weight: Tensor) -> torch.nn.Linear:
    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight.data.copy_(weight)
    return head


def test_a_heads_weight_gets_the_dense_gradient() -> None:
    """The head may be a module. The teacher's side gets no gradient."""
    heads = drawn_heads(7, 4, 11)
    student_module = module_of(heads.student_head)
    teacher_module = module_of(heads.teacher_head)
    heads.student_head.requires_grad_()
    heads.teacher.requires_grad_()

    modules = (student_module, teacher_module)
    _, values = chunked_divergence(
        heads.student, heads.teacher, *modules, heads.targets, JSD, temperature=1.0, chunk_tokens=2
    )
    values.sum().backward()
    _, plain_values = chunked_divergence(*heads, JSD, temperature=1.0, chunk_tokens=2)
    plain_values.sum().backward()
    assert torch.equal(values, plain_values)
    assert heads.student_head.grad is not None
    assert torch.equal(student_module.weight.grad, heads.student_head.grad)
    assert heads.teacher.grad is None
    assert teacher_module.weight.grad is None


def test_without_gradient_the_values_are_the_same_bits() -> None:
    """Teachers may have another width."""
    wider = drawn_heads(7, 6, 11)
    heads = drawn_heads(7, 4, 11)._replace(teacher=wider.teacher, teacher_head=wider.teacher_head)
    with torch.no_grad():
        without_graph = chunked_divergence(*heads, JSD, temperature=0.9, chunk_tokens=3)
    with_graph = chunked_divergence(*heads, JSD, temperature=0.9, chunk_tokens=3)
    torch.testing.assert_close(without_graph, with_graph, rtol=0.0, atol=0.0)


def tensors_of_one_update(settings: DivergenceConfig, tokens: int, chunk_tokens: int) -> LiveTensors:
    heads = drawn_heads(tokens, 8, 2048)
    heads.student.requires_grad_()
    heads.student_head.requires_grad_()
    with LiveTensors(floor=4 * chunk_tokens * 2048) as seen:
        log_probs, values = chunked_divergence(*heads, settings, temperature=0.7, chunk_tokens=chunk_tokens)
        assert seen.live == 0, "a tensor of a chunk's tokens x vocabulary outlived the forward pass"
        (log_probs.sum() + values.sum()).backward()
    return seen


@every_setting
def test_the_largest_tensor_is_one_chunk_wide(settings: DivergenceConfig) -> None:
    """A chunk has 16 tokens, and the peak is the same for 64 and 512 tokens."""
    few = tensors_of_one_update(settings, tokens=64, chunk_tokens=16)
    many = tensors_of_one_update(settings, tokens=512, chunk_tokens=16)
    assert few.largest == many.largest == 16 * 2048
    assert few.peak == many.peak
    # The dense computation would hold two models' logits of 512 tokens alone.
    assert many.peak < 2 * 512 * 2048


@pytest.mark.parametrize("with_gradient", [True, False])
def test_no_tokens_have_empty_results(with_gradient: bool) -> None:
    """They are one empty chunk."""

    def sums_and_doubles(values: Tensor) -> tuple[Tensor, Tensor]:
        return values.sum(1), 2 * values

    no_tokens = torch.zeros(0, 5)
    with torch.set_grad_enabled(with_gradient):
        sums, doubles = recomputed_in_chunks(sums_and_doubles, (no_tokens,), 4)
    assert sums.shape == (0,)
    assert doubles.shape == (0, 5)
