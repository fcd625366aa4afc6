"""Log-probs of a large vocabulary beside float64, where the kernel computes them, and the memory that they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_places import Place, build_actor

from cepo.data.batch import ScoringRow, token_array
from cepo.models import head
from cepo.models.head import _kernel_works, log_probs_in_place
from cepo.models.interface import EncodedPrompt
from testing.shapes import MICRO

ROWS = {"cpu": (16, 4096), "cuda": (220, 151_936)}
"""A chunk of tokens and a vocabulary."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_log_probs_and_gradients_are_those_of_float64(place: Place, dtype: torch.dtype, figure: Any) -> None:
    rows, vocabulary = ROWS[place.device]
    logits = (4 * torch.randn(rows, vocabulary, device=place.device)).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), device=place.device)
    expected = logits.double().div(0.7).log_softmax(dim=1)
    log_probs = log_probs_in_place(logits, targets, 0.7, with_direction=True)
    of_targets = expected.gather(1, targets[:, None])[:, 0]
    gap = float((log_probs - of_targets).abs().max())
    assert figure(f"head, {dtype}: largest gap in nats", gap) < 1e-4
    one_hot = torch.zeros_like(expected).scatter_(1, targets[:, None], 1.0)
    direction = one_hot - expected.exp()
    gradient_gap = float((logits.double() - direction).abs().max())
    rounding = 1e-5 if dtype is torch.float32 else 2**-8
    assert gradient_gap < rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_is_in_use_on_a_gpu(place: Place, dtype: torch.dtype) -> None:
    """Triton has no kernels for processors. The log has the reason where a GPU's kernel is not used."""
    assert _kernel_works(torch.zeros(1, device=place.device).device, dtype) == (place.device == "cuda")


def peak_bytes(device: str, work: Callable[[], object]) -> int:
    """The most bytes of tensors that exist while `work` runs, beyond those before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        bytes_before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - bytes_before
    with torch.profiler.profile(profile_memory=True) as recorded:
        work()
    profiler: Any = recorded.profiler
    changes = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    held = largest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        largest = max(largest, held)
    return largest


def test_the_peak_of_scoring_holds_no_tensor_of_logits(
    place: Place, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    """It grows by less than 1 byte per vocabulary entry and token, of which logits take 4."""
    for name in ("HEAD_CHUNK_ELEMENTS", "HEAD_CHUNK_ELEMENTS_ON_GPU"):
        monkeypatch.setattr(head, name, place.head_elements)
    vocabularies, lengths = place.memory_grid
    peaks: dict[tuple[int, int], int] = {}
    for vocabulary in vocabularies:
        shape = dataclasses.replace(MICRO, name=f"vocabulary-{vocabulary}", vocabulary=vocabulary)
        actor = build_actor(place.checkpoint(shape, "fp32"), dtype="fp32")
        for tokens in lengths:
            context = EncodedPrompt(token_ids=(1, 2, 3), engine_ids=(1, 2, 3), images=None)
            row = ScoringRow(context=context, response_ids=token_array([5] * tokens))
            actor.score([row])
            peak = peak_bytes(place.device, lambda actor=actor, row=row: actor.score([row]))
            peaks[vocabulary, tokens] = figure(f"peak bytes, vocabulary {vocabulary}, {tokens} tokens", peak)
    (small, large) = vocabularies
    (short, long) = lengths
    growth = peaks[large, long] - peaks[small, long] - peaks[large, short] + peaks[small, short]
    assert peaks[large, long] > 0
    per_entry_and_token = growth / ((large - small) * (long - short))
    assert abs(figure("bytes per vocabulary entry and token", per_entry_and_token)) < 1
    assert peaks[large, long] < 4 * large * long, "less than the logits of all tokens alone"
