"""The check that packs rows or pads them: in bf16 it tells rounding from faults, with logits as large as in trained models."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generator_cases import open_generator, picture, request
from training_runs import encoded

from cepo.data.batch import ScoringRow
from cepo.models.processing import Processing
from cepo.models.segments import SegmentLayout
from cepo.rollout.generator import SamplingSettings
from cepo.workers import passes
from cepo.workers.actor import Actor
from cepo.workers.passes import collate_packed
from cepo.workers.scoring_model import CollatedRows

pytestmark = pytest.mark.heavy

QUESTION = "Find the area of the triangle."
HINTS = ("", "\nHere is a sample answer: 12", "\nHere is a sample answer: 47")
Fault = Callable[[CollatedRows], CollatedRows]
BuildActor = Callable[..., Actor]


@pytest.fixture(scope="module")
def rows(realistic_folder: Path, tiny_processing: Processing) -> list[ScoringRow]:
    """Responses to two images, sampled from the plain context, behind it and behind each hint."""
    prompts = [request(tiny_processing, QUESTION, [picture(seed)], seed=seed) for seed in (1, 2)]
    with contextlib.closing(open_generator("transformers", realistic_folder, tiny_processing)) as generator:
        groups = generator.generate(prompts, SamplingSettings(num_samples=8, max_response_length=32))
    return [
        ScoringRow(context=context, response_ids=one.response_ids)
        for seed, group in zip((1, 2), groups, strict=True)
        for context in [encoded(tiny_processing, QUESTION + hint, picture(seed)) for hint in HINTS]
        for one in group
    ]


def changed_layout(layout: SegmentLayout, branch_ends: dict[int, int]) -> SegmentLayout:
    ends = tuple(branch_ends.get(index, end) for index, end in enumerate(layout.branch_ends))
    return SegmentLayout(starts=layout.starts, parents=layout.parents, branch_ends=ends)


def first_leaf(layout: SegmentLayout) -> int:
    """The first segment without descendants that has another one behind it under the same parent."""
    for index, parent in enumerate(layout.parents[:-1]):
        if layout.branch_ends[index] == layout.starts[index + 1] and parent == layout.parents[index + 1]:
            return index
    raise AssertionError("no two responses stand side by side")


def branch_that_ends_too_late(batch: CollatedRows) -> CollatedRows:
    """A response is seen by the one behind it."""
    layout = batch.segments
    assert layout is not None
    leaf = first_leaf(layout)
    return replace(batch, segments=changed_layout(layout, {leaf: layout.branch_ends[leaf + 1]}))


def branch_that_ends_too_early(batch: CollatedRows) -> CollatedRows:
    """A context is not seen by its last response."""
    layout = batch.segments
    assert layout is not None
    context = layout.parents[first_leaf(layout)]
    last = max(index for index, parent in enumerate(layout.parents) if parent == context)
    ends = {context: layout.starts[last]}
    return replace(batch, segments=changed_layout(layout, ends))


def position_that_is_one_too_high(batch: CollatedRows) -> CollatedRows:
    """Every response stands one position behind its place."""
    layout = batch.segments
    assert layout is not None
    positions = batch.position_ids.clone()
    for index, start in enumerate(layout.starts[:-1]):
        if layout.branch_ends[index] == layout.starts[index + 1]:
            positions[:, :, start : layout.starts[index + 1]] += 1
    return replace(batch, position_ids=positions)


def swapped_images(batch: CollatedRows) -> CollatedRows:
    return replace(batch, image_order=tuple(reversed(batch.image_order)))


def shifted_token(batch: CollatedRows) -> CollatedRows:
    """Each log-prob is read one token too early."""
    return replace(batch, response_index=batch.response_index - 1)


def shifted_response(batch: CollatedRows) -> CollatedRows:
    """The tokens of one response stand one place behind their own."""
    layout = batch.segments
    assert layout is not None
    leaf = first_leaf(layout)
    tokens = batch.input_ids.clone()
    part = slice(layout.starts[leaf], layout.starts[leaf + 1])
    tokens[:, part] = tokens[:, part].roll(1, dims=1)
    return replace(batch, input_ids=tokens)


FAULTS = (
    branch_that_ends_too_late,
    branch_that_ends_too_early,
    position_that_is_one_too_high,
    swapped_images,
    shifted_token,
    shifted_response,
)


def checked(actor: Actor, rows: list[ScoringRow], monkeypatch: pytest.MonkeyPatch, fault: Fault | None = None) -> Actor:
    """The actor after its check of the rows, with `fault` in what it packs."""

    def faulty(rows: Any, **settings: Any) -> CollatedRows:
        batch = collate_packed(rows, **settings)
        return batch if fault is None else fault(batch)

    monkeypatch.setattr(passes, "collate_packed", faulty)
    actor.score(rows)
    return actor


@pytest.mark.parametrize("fp32_logits", ["true", "false"])
def test_in_bf16_with_logits_of_16_to_32_rows_stay_packed(
    build_actor: BuildActor,
    realistic_folder: Path,
    rows: list[ScoringRow],
    fp32_logits: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = build_actor(folder=realistic_folder, fsdp__mp_param_dtype="bf16", model__fp32_logits=fp32_logits)
    with caplog.at_level(logging.INFO, logger="cepo.workers.passes"):
        checked(actor, rows, monkeypatch)
    assert actor.passes.packed
    assert "packed and padded rows agree; differences in nats: mean " in caplog.text
    assert "between two ways to compute padded rows: mean " in caplog.text


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_pads_the_rows(
    build_actor: BuildActor,
    realistic_folder: Path,
    rows: list[ScoringRow],
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = build_actor(folder=realistic_folder, fsdp__mp_param_dtype="bf16")
    with caplog.at_level(logging.INFO, logger="cepo.workers.passes"):
        checked(actor, rows, monkeypatch, fault)
    assert not actor.passes.packed
    assert (
        "padding_free is off for this run, and rows are padded: packed and padded rows differ, in nats: mean "
        in caplog.text
    )
