"""How many rows a pass has by a GPU's free memory, against figures of an H200, and that a resumed run keeps the choice."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import build_actor

from cepo.config import load_config
from cepo.config.worker_schema import ActorConfig
from cepo.models.processing import Processing
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import load_state, save_state
from cepo.workers.memory import Memory, TokenBytes, engine_in_passes, token_bytes
from cepo.workers.pass_sizes import (
    WITHOUT_CARD,
    PassNeeds,
    PassSizes,
    choose,
    chosen_for,
    resumed,
    sizes_of,
    with_numbers,
)
from testing.published_models import published_shape
from testing.rows import build_rows, gradients_of, optimizer_batch
from testing.shapes import MICRO, write_checkpoint

GB = 10**9
ROW = 3_072
"""Tokens of the longest prompt and response of configs/geo3k/cepo.yaml."""


def settings(*arguments: str) -> ActorConfig:
    return load_config(["config=configs/geo3k/cepo.yaml", *arguments]).worker.actor


def needs(size: str = "2B", *arguments: str, base: float = 12 * GB, tokens: int = ROW) -> PassNeeds:
    return PassNeeds(int(base), token_bytes(settings(*arguments), published_shape(size)), tokens)


def without_weights(*, with_vllm: bool) -> Memory:
    zeros: dict[str, Any] = dict.fromkeys(Memory._fields, 0)
    return Memory(**zeros | {"with_vllm": with_vllm})


def test_the_bytes_of_a_token_by_hand() -> None:
    """Qwen3-VL-2B: 28 layers, 2,048 hidden and 6,144 inner values, in bf16. A trained tower counts as much again."""
    as_it_is = 2 * (14 * 2048 + 4 * 6144) + 32 * 2048
    compiled = 2 * (10 * 2048 + 3 * 6144)
    recomputed = 28 * 2 * 2048 + as_it_is
    assert needs().of_token == TokenBytes(28 * compiled + as_it_is, recomputed, as_it_is // 2)
    eager = needs("2B", "worker.actor.model.compile_layers=false").of_token
    assert eager == TokenBytes(29 * as_it_is, recomputed, as_it_is // 2)
    with_tower = needs("2B", "worker.actor.model.lora.exclude_modules=null").of_token
    assert with_tower == TokenBytes(2 * (28 * compiled + as_it_is), 2 * recomputed, as_it_is // 2)


def test_the_bytes_of_a_token_are_those_of_an_h200() -> None:
    """Between two passes each, of 11,520 and 15,667 tokens that kept all and 11,520 and 23,500 that recomputed.

    Measured with 40, 50, 17 and 21 GB at 2B. The estimate may be higher, by at most 40 %, never lower.
    """
    of_token = needs().of_token
    measured_kept = (50 - 40) * GB / (15_667 - 11_520)
    measured_recomputed = (21 - 17) * GB / (23_500 - 11_520)
    assert measured_kept <= 1.3 * of_token.kept <= 1.4 * measured_kept
    assert measured_recomputed <= 1.3 * of_token.recomputed <= 1.4 * measured_recomputed


def test_what_is_chosen_fits() -> None:
    """The base and 1.3 times the rows, for any free memory and any length of rows with which one row fits."""
    for tokens in (256, 1_500, ROW, 9_216, 40_000):
        pass_needs = needs(tokens=tokens)
        for gigabytes in range(14, 140, 3):
            free = gigabytes * GB
            sizes = choose(pass_needs, free=free, card=141 * GB)
            of_token = pass_needs.of_token
            updating = of_token.recomputed if sizes.recomputes else of_token.kept
            for rows, bytes_of_token in ((sizes.update_rows, updating), (sizes.scoring_rows, of_token.scored)):
                assert rows == 1 or pass_needs.base + 1.3 * rows * tokens * bytes_of_token <= free
            if not sizes.recomputes:
                assert sizes.update_rows * tokens >= 8_000
                assert pass_needs.base + 1.3 * sizes.update_rows * tokens * of_token.kept <= free


def test_what_the_engine_keeps_asleep_awake_or_of_another_kind() -> None:
    base = load_config(["config=configs/geo3k/cepo.yaml"]).worker.rollout
    memory = without_weights(with_vllm=True)._replace(engine=5 * GB)
    asleep = dataclasses.replace(base, sleep=True)
    awake = dataclasses.replace(base, sleep=False)
    card = {"free": 80 * GB, "total": 80 * GB}
    assert engine_in_passes(memory, asleep, **card) == 2 * 2**30
    assert engine_in_passes(memory, awake, **card) == 48 * GB
    without_vllm = memory._replace(with_vllm=False)
    assert engine_in_passes(without_vllm, awake, **card) == 5 * GB


def test_the_settings_numbers_are_kept_and_a_cpu_has_its_own() -> None:
    chosen = PassSizes(7, 30, recomputes=False, card=80 * GB)
    assert sizes_of(settings()) == WITHOUT_CARD == PassSizes(4, 16, recomputes=True)
    assert sizes_of(settings(), chosen) == chosen
    with_own_numbers = settings(
        "worker.actor.micro_batch_size_per_device_for_update=2",
        "worker.actor.model.enable_gradient_checkpointing=true",
    )
    assert sizes_of(with_own_numbers, chosen) == PassSizes(2, 30, recomputes=True, card=80 * GB)
    numbers = with_numbers(load_config(["config=configs/geo3k/cepo.yaml"])).worker
    for model in (numbers.actor, numbers.critic):
        assert model.micro_batch_size_per_device_for_update == 4
        assert model.micro_batch_size_per_device_for_experience == 16
        assert model.model.enable_gradient_checkpointing is True


def test_a_resumed_run_takes_the_recorded_passes_if_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    recorded = PassSizes(7, 30, recomputes=False, card=141 * GB)
    same_card = PassSizes(6, 28, recomputes=True, card=141 * GB)  # by a little less free memory
    assert resumed(recorded, same_card) == recorded
    smaller = same_card._replace(card=80 * GB)
    with caplog.at_level(logging.WARNING):
        assert resumed(recorded, smaller) == smaller
    assert "differ from the checkpoint's" in caplog.text
    assert resumed(recorded, WITHOUT_CARD) == WITHOUT_CARD
    assert resumed(WITHOUT_CARD, same_card) == same_card


def test_the_choice_is_said_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140 * GB, 141 * GB))
    memory = without_weights(with_vllm=False)
    rollout = load_config(["config=configs/geo3k/cepo.yaml"]).worker.rollout
    with caplog.at_level(logging.INFO):
        chosen_for(needs(), memory, rollout, torch.device("cuda"), name="actor")
    assert "actor: updates in passes of 30720 tokens without recomputation, scoring of 64512" in caplog.text


def actor_with(folder: Path, chosen: PassSizes) -> Actor:
    """An actor whose GPU chose these passes."""
    actor = build_actor(
        folder,
        model__lora__rank=4,
        micro_batch_size_per_device_for_update=0,
        micro_batch_size_per_device_for_experience=0,
        model__enable_gradient_checkpointing="auto",
        dynamic_batching="false",
    )
    actor.make_passes(chosen)
    return actor


@pytest.mark.heavy
def test_a_resumed_actor_makes_the_same_passes_to_the_bit(tmp_path: Path) -> None:
    """Although another choice fits the memory now: passes of 2 rows with recomputation, where 3 without it are kept."""
    folder = write_checkpoint(MICRO, tmp_path / "model", dtype="float32")
    rows, _ = build_rows(MICRO, Processing(str(folder)), groups=2, group_size=3, contexts=2, prompt=MICRO.prompt_tokens)
    batch = optimizer_batch(rows)
    recorded = PassSizes(3, 5, False, card=80 * GB)
    now = PassSizes(2, 4, True, card=80 * GB)

    first = actor_with(folder, recorded)
    first.update([batch], step=0)
    save_state(first, tmp_path / "saved")
    second = actor_with(folder, now)
    assert second.pass_sizes == now
    load_state(second, tmp_path / "saved")
    assert second.pass_sizes == recorded
    layers = second.module.base.get_decoder().layers
    assert not any(layer.gradient_checkpointing for layer in layers), "activations are kept as in the first run"
    assert len(second.passes.cut(rows, second.pass_sizes.update_rows)) == 2
    for gradient, expected in zip(gradients_of(second, batch), gradients_of(first, batch), strict=True):
        assert torch.equal(gradient, expected)
