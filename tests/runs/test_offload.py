"""Offloading on a CPU: nothing has anywhere to go, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from training_runs import encoded, parameters_of, random_response

from cepo.data.batch import ScoringRow
from cepo.models.processing import Processing
from cepo.workers.actor import Actor
from cepo.workers.distributed import process_group_backend
from cepo.workers.swapping import move_state

pytestmark = pytest.mark.heavy


def test_offloading_on_a_cpu_does_nothing_and_is_reported_once(
    build_actor: Callable[..., Actor], tiny_processing: Processing, caplog: pytest.LogCaptureFixture
) -> None:
    row = ScoringRow(context=encoded(tiny_processing, "Find x."), response_ids=random_response(6, 3))
    plain = build_actor()
    with caplog.at_level(logging.WARNING, logger="cepo.workers.swapping"):
        actor = build_actor(fsdp__enable_cpu_offload=True, offload__offload_params=True)
    (told,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert told == "fsdp.enable_cpu_offload and offload.* have no effect: the device is the CPU"
    before = parameters_of(actor)
    actor.rest()
    assert torch.equal(plain.score([row])[0], actor.score([row])[0])
    assert all(torch.equal(before[name], weight) for name, weight in parameters_of(actor).items())


def test_moving_an_optimizers_state_takes_its_moments_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    move_state(optimizer, torch.device("meta"))
    state = optimizer.state[weight]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_a_gpus_process_group_serves_host_memory_too() -> None:
    assert process_group_backend(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert process_group_backend(torch.device("cpu")) == "gloo"
