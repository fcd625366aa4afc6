"""The weights that two steps of each method end with, recorded once: a change of code that should change no number is held to it.

`golden_weights.json` has, for each method, the digest of the final weights' bits for the processors and versions of torch
that it was recorded on, and statistics that hold on all of them. `RECORD_GOLDEN_WEIGHTS=1` writes what is found into the file:
only for a change that is meant to change numbers, with the reason in its commit message.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import WRONG_ROLLOUTS_TEACH, FinishedRun, actor_of, differing, run, whole

from cepo.algorithms import available_estimators
from cepo.rollout.generator import FullWeights
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

FILE = Path(__file__).with_name("golden_weights.json")
SETTINGS = ["worker.rollout.temperature=1.2", "worker.rollout.dtype=fp32", "trainer.max_steps=2", "trainer.seed=1"]
METHODS = available_estimators()
NUM_DIRECTIONS = 4
FIRST_STEP = ("reward/mean", "response_length/mean", "actor/grad_norm")
REWARD = '''
def graded(samples):
    """Eighths, by the character codes of whatever an untrained model writes: a group then has one best response."""
    shares = [sum(map(ord, sample["response"])) % 8 / 8 for sample in samples]
    return [{"overall": share, "accuracy": float(share >= 0.5)} for share in shares]
'''


def machine() -> str:
    """What the bits of a float32 computation depend on: kernels are chosen by the processor."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0] if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in facts.splitlines() if ":" in line)
    known = {name.strip(): value.strip() for name, value in lines.items()}
    processor = "-".join(known.get(name, "?") for name in ("vendor_id", "cpu family", "model", "stepping"))
    return ", ".join(
        [
            f"torch {torch.__version__}",
            f"transformers {version('transformers')}",
            torch.backends.cpu.get_cpu_capability(),
            processor if known else platform.processor(),
        ]
    )


def served_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Copies under the names that the rollout engine knows, which no inner structure of the trainer changes."""
    weights = actor_of(trainer).rollout_weights()
    assert isinstance(weights, FullWeights)
    return {name: whole(weights.tensors[name]).clone() for name in sorted(weights.tensors)}


def digest(weights: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in weights.items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def projections(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[float]:
    """The update along random directions of unit variance, as a share of the update's length: about 1 in size, with a sign."""
    update = torch.cat([(after[name].double() - before[name].double()).flatten() for name in before])
    generator = torch.Generator().manual_seed(5)
    directions = torch.randn(NUM_DIRECTIONS, len(update), generator=generator, dtype=torch.float64)
    return [float(value) for value in directions @ update / update.norm()]


def statistics(done: FinishedRun, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Any]:
    (first, *_) = (row for row in done.metrics if "reward/mean" in row)
    length = math.sqrt(sum(float((after[name].double() - before[name].double()).square().sum()) for name in before))
    return {
        "first step": {name: first[name] for name in FIRST_STEP},
        "length of the update": length,
        "projections of the update": projections(before, after),
    }


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
    before: dict[str, Tensor] = {}
    reward = tmp_path / "graded.py"
    reward.write_text(REWARD, encoding="utf-8")
    overrides = [*SETTINGS, f"algorithm.adv_estimator={method}", f"worker.reward.reward_function={reward}:graded"]
    overrides += WRONG_ROLLOUTS_TEACH.get(method, [])
    done = run(
        tiny_run, *overrides, folder=tmp_path / "run", prepare=lambda trainer: before.update(served_weights(trainer))
    )
    after = served_weights(done.trainer)
    assert len(differing(before, after)) > 20
    assert all(bool(torch.isfinite(weight).all()) for weight in after.values())
    assert [row["step"] for row in done.metrics if "reward/mean" in row] == [1, 2]
    found = statistics(done, before, after)
    entry = recorded(method, found, digest(after))
    expected = entry["statistics"]
    assert found["first step"] == pytest.approx(expected["first step"], rel=1e-3)
    assert found["length of the update"] == pytest.approx(expected["length of the update"], rel=2e-2)
    assert found["projections of the update"] == pytest.approx(expected["projections of the update"], abs=0.05)
    if machine() not in entry["digests"]:
        pytest.skip(f"no digest was recorded on {machine()}; the rounded statistics hold")
    assert digest(after) == entry["digests"][machine()]


def test_projections_tell_an_update_from_its_negative() -> None:
    """They also tell it from another update of its length."""
    generator = torch.Generator().manual_seed(1)
    before = {"a": torch.zeros(1000), "b": torch.zeros(20, 30)}
    after = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in before.items()}
    found = projections(before, after)
    assert found != pytest.approx([0.0] * NUM_DIRECTIONS, abs=0.5)
    negated = {name: -tensor for name, tensor in after.items()}
    assert projections(before, negated) == pytest.approx([-value for value in found])
    turned = {name: tensor.flip(0) for name, tensor in after.items()}
    assert projections(before, turned) != pytest.approx(found, abs=0.05)
