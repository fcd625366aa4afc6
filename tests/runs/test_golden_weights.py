"""What two steps of each method compute, recorded once: a change of code that should change no number is held to it.

`golden_weights.json` has, for each method, the digest of the final weights' bits for the processors and versions of torch
that it was recorded on, and what holds on all of them: the first step's rewards and lengths, and the first gradient along
random directions. Nothing later is compared between processors: Adam divides each entry of the gradient by its own size, so
that rounding turns the smallest entries, and the next step samples from those weights. `RECORD_GOLDEN_WEIGHTS=1` writes what
is found into the file: only for a change that is meant to change numbers, with the reason in its commit message.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import differing
from torch import Tensor
from training_runs import REWARD_FUNCTIONS, WRONG_ROLLOUTS_TEACH, actor_of, run, whole

from cepo.algorithms import available_estimators
from cepo.rollout.generator import FullWeights
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

FILE = Path(__file__).with_name("golden_weights.json")
SETTINGS = [
    "worker.rollout.temperature=1.2", "worker.rollout.dtype=fp32", "trainer.max_steps=2", "trainer.seed=1",
    f"worker.reward.reward_function={REWARD_FUNCTIONS}:graded",
]  # fmt: skip
METHODS = available_estimators()
NUM_DIRECTIONS = 4
INSTRUCTION_LIMITS = ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
FIRST_STEP = ("reward/mean", "response_length/mean", "actor/grad_norm")


def machine() -> str:
    """What the bits of a float32 computation depend on: kernels are chosen by the processor."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0] if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in facts.splitlines() if ":" in line)
    known = {name.strip(): value.strip() for name, value in lines.items()}
    processor = "-".join(known.get(name, "?") for name in ("vendor_id", "cpu family", "model", "stepping"))
    limits = [f"{name}={os.environ[name]}" for name in INSTRUCTION_LIMITS if name in os.environ]
    return ", ".join(
        [
            f"torch {torch.__version__}",
            f"transformers {version('transformers')}",
            torch.backends.cpu.get_cpu_capability(),
            processor if known else platform.processor(),
            *limits,
        ]
    )


def served_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Copies under the names that the rollout engine knows, which no inner structure of the trainer changes."""
    weights = actor_of(trainer).rollout_weights()
    assert isinstance(weights, FullWeights)
    return {name: whole(weights.tensors[name]).clone() for name in sorted(weights.tensors)}


def digest(weights: Mapping[str, Tensor]) -> str:
    checksum = hashlib.sha256()
    for name, tensor in weights.items():
        checksum.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        checksum.update(tensor.contiguous().numpy().tobytes())
    return checksum.hexdigest()


def projections(gradient: Mapping[str, Tensor]) -> list[float]:
    """Along random directions of unit variance, as a share of the gradient's length: about 1 in size, with a sign."""
    flat = torch.cat([gradient[name].double().flatten() for name in sorted(gradient)])
    generator = torch.Generator().manual_seed(5)
    directions = torch.randn(NUM_DIRECTIONS, len(flat), generator=generator, dtype=torch.float64)
    return [float(value) for value in directions @ flat / flat.norm()]


def keep_first_gradient(trainer: Trainer, gradient: dict[str, Tensor]) -> None:
    """Of the actor, as its first optimizer step gets it."""
    actor = actor_of(trainer)

    def keep(*_: object) -> None:
        if not gradient:
            named = actor.module.named_parameters()
            gradient.update(
                {name: whole(parameter.grad).clone() for name, parameter in named if parameter.grad is not None}
            )

    actor.optimizer.register_step_pre_hook(keep)


def recorded(method: str, found: dict[str, Any], bits: str) -> dict[str, Any]:
    """The file's entry; where a recording is asked for, after writing it."""
    entries: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    if os.environ.get("RECORD_GOLDEN_WEIGHTS") == "1":
        digests = {} if method not in entries else entries[method]["digests"]
        entries[method] = {"digests": digests | {machine(): bits}, "statistics": found}
        FILE.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n", encoding="utf-8")
    return entries[method]


@pytest.mark.parametrize("method", METHODS)
def test_two_steps_end_with_the_weights_that_were_recorded(method: str, tiny_run: list[str], tmp_path: Path) -> None:
    initial_weights: dict[str, Tensor] = {}
    gradient: dict[str, Tensor] = {}

    def prepare(trainer: Trainer) -> None:
        initial_weights.update(served_weights(trainer))
        keep_first_gradient(trainer, gradient)

    overrides = [*SETTINGS, f"algorithm.adv_estimator={method}"]
    overrides += WRONG_ROLLOUTS_TEACH.get(method, [])
    done = run(tiny_run, *overrides, folder=tmp_path / "run", prepare=prepare)
    trained_weights = served_weights(done.trainer)
    assert len(differing(initial_weights, trained_weights)) > 20
    assert all(bool(torch.isfinite(weight).all()) for weight in trained_weights.values())
    assert [row["step"] for row in done.metrics if "reward/mean" in row] == [1, 2]
    first = next(row for row in done.metrics if "reward/mean" in row)
    statistics = {
        "first step": {name: first[name] for name in FIRST_STEP},
        "projections of the first gradient": projections(gradient),
    }
    entry = recorded(method, statistics, digest(trained_weights))
    expected = entry["statistics"]
    # Rewards and lengths are counts: they differ only where rounding turns a sampled token.
    assert statistics["first step"] == pytest.approx(expected["first step"], rel=1e-2)
    # The gradient's error is GRADIENTS of its length, along a direction as much; a wrong sign or scale of one row is 1e-2.
    expected_projections = expected["projections of the first gradient"]
    assert statistics["projections of the first gradient"] == pytest.approx(expected_projections, abs=1e-3)
    assert entry["digests"].get(machine(), digest(trained_weights)) == digest(trained_weights)


def test_projections_tell_a_gradient_from_its_negative() -> None:
    generator = torch.Generator().manual_seed(1)
    gradient = {"a": torch.randn(1000, generator=generator), "b": torch.randn(20, 30, generator=generator)}
    of_gradient = projections(gradient)
    assert of_gradient != pytest.approx([0.0] * NUM_DIRECTIONS, abs=0.5)
    negated = {name: -tensor for name, tensor in gradient.items()}
    assert projections(negated) == pytest.approx([-value for value in of_gradient])
    turned = {name: tensor.flip(0) for name, tensor in gradient.items()}
    assert projections(turned) != pytest.approx(of_gradient, abs=0.05)
