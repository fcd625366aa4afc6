"""Scores and updates with the trainer's own actor or critic on the hollow GPU, and compares with the processor.

Every operation is checked for mixed devices and then computed on the processor (`processor_behind`), so the log-probs
must equal those of a process without a GPU. Three things differ from a real card: attention uses no compiled kernel
(`attention` checks those), SDPA its formula, and the language head torch's operations (`head` checks the kernel).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lab.gpu_dry.cards import report
from lab.gpu_dry.processor_behind import ProcessorBehind
from lab.support.machine import ROOT
from testing.attention import attend_by_formula_to_mask
from testing.rows import build_rows, critic_batch, optimizer_batch
from testing.shapes import MICRO, write_checkpoint

if TYPE_CHECKING:
    from cepo.data.batch import ScoringRow
    from cepo.models.processing import Processing


class Case(NamedTuple):
    """A model that is scored and updated.

    Attributes:
        settings: of `worker.actor`.
        teacher: the weights that score as the teacher.
        family: a tiny checkpoint of the tests; without a name, a small Qwen3-VL.
        resumes: whether the model is saved after two steps, restored into another one, and continued.
        trains_critic: whether a critic is updated in place of the policy.
    """

    settings: dict[str, Any]
    teacher: str = "actor"
    family: str = ""
    resumes: bool = False
    trains_critic: bool = False


BF16 = {"fsdp.mp_param_dtype": "bf16"}
STORED_IN_BF16 = BF16 | {"fsdp.torch_dtype": "bf16", "optim.strategy": "adamw_bf16"}
OFFLOADED = {"offload.offload_params": "true", "offload.offload_optimizer": "true"}
ADAPTER = {"model.lora.rank": 4}
FULL = {"model.lora.rank": 0}
CASES = {
    "adapter, packed rows": Case(ADAPTER, teacher="reference"),
    "adapter, padded rows": Case(ADAPTER | {"padding_free": "false", "dynamic_batching": "false"}),
    "adapter, bf16": Case(ADAPTER | BF16),
    "adapter, phases offloaded": Case(ADAPTER | OFFLOADED, teacher="ema"),
    "all weights": Case(FULL | {"model.freeze_vision_tower": "false"}, teacher="snapshot"),
    "all weights, FSDP offloads": Case(FULL | {"fsdp.enable_cpu_offload": "true"}),
    "adapter, bf16, resumed": Case(ADAPTER | STORED_IN_BF16, resumes=True),
    "all weights, bf16, resumed": Case(FULL | STORED_IN_BF16, teacher="ema", resumes=True),
    "critic": Case(ADAPTER, trains_critic=True),
    "InternVL, adapter": Case(ADAPTER, family="internvl"),
    "SmolVLM, adapter": Case(ADAPTER, family="smolvlm"),
}
LIMITS = {"fp32": 1e-4, "bf16": 0.1}
"""Largest accepted gap in nats (of a critic: in its unit) between the results with and without the hollow GPU."""
VIEW = "correct"
STEPS = 2


def write_model(case: Case, folder: Path) -> Path:
    if not case.family:
        return write_checkpoint(MICRO, folder, dtype="bfloat16")
    import tiny_checkpoints  # pyright: ignore[reportMissingImports]  # in tests/

    return tiny_checkpoints.write_checkpoint(case.family, folder)


def rows_of(case: Case, folder: Path) -> tuple[list[ScoringRow], list[ScoringRow]]:
    """Returns rows under the prompt alone, and the same under a teacher's context."""
    from cepo.data.batch import OWN_VIEW
    from cepo.models.processing import Processing

    processing = Processing(str(folder))
    if case.family:
        views = tiled_rows(processing)
    else:
        views = build_rows(MICRO, processing, groups=2, group_size=2, contexts=2, prompt=MICRO.prompt_tokens)
    numbered: list[list[ScoringRow]] = []
    for rows, view in zip(views, (OWN_VIEW, VIEW), strict=True):
        numbered.append([dataclasses.replace(row, row=index, view=view) for index, row in enumerate(rows)])
    own, teacher = numbered
    return own, teacher


def tiled_rows(processing: Processing) -> list[list[ScoringRow]]:
    """Returns rows of two prompts with an image of several tiles each, under two contexts."""
    from PIL import Image

    from cepo.data.batch import ScoringRow, token_array

    views: list[list[ScoringRow]] = [[], []]
    for colour in ("grey", "white"):
        images = processing.load_images([Image.new("RGB", (112, 56), colour)])
        for rows, text in zip(views, ("Count.", "Count. The answer is 7."), strict=True):
            context = processing.encode(f"<image>\n{text}", images)
            for length in (9, 30):
                rows.append(ScoringRow(context=context, response_ids=token_array(range(40, 40 + length))))
    return views


def build(case: Case, folder: Path, rows: Sequence[ScoringRow]) -> Any:
    """Returns the actor or critic of the case on this process's device."""
    from cepo.algorithms.settings import TeacherConfig
    from cepo.config import load_config
    from cepo.losses.objective import ObjectiveSettings
    from cepo.models.processing import Processing
    from cepo.workers.actor import Actor
    from cepo.workers.critic import Critic

    # The processor computes single operations, not the card's compiled kernels.
    fixed = {"model.enable_gradient_checkpointing": "true", "model.compile_layers": "false"}
    settings = {"model.model_path": folder, **fixed, **case.settings}
    arguments = [f"worker.actor.{name}={value}" for name, value in settings.items()]
    arguments += [f"worker.critic.{name}={value}" for name, value in fixed.items()]
    config = load_config([f"config={ROOT / 'configs' / 'microgeo' / 'base.yaml'}", *arguments])
    processing = Processing(str(folder))
    common: Any = {"total_steps": 2 * STEPS, "seed": 1, "longest_row": max(row.num_tokens for row in rows)}
    if case.trains_critic:
        return Critic(config.worker.resolved_critic, processing, **common)
    return Actor(
        config.worker.actor,
        processing,
        temperature=0.9,
        teacher=TeacherConfig(source=case.teacher),  # pyright: ignore[reportArgumentType]
        objective_settings=ObjectiveSettings(kl_coefficient=0.01),
        with_reference=True,
        **common,
    )


def run(name: str, behind: ProcessorBehind | None = None) -> dict[str, Any]:
    """Takes two steps as the trainer does, with every kind of pass, and returns what they found.

    `behind` counts what one more pass of an update waits for.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(case, Path(scratch) / "model")
        own, teacher = rows_of(case, folder)
        model = build(case, folder, [*own, *teacher])
        outcome: dict[str, Any] = {"values": [], "grad_norm": [], "packed": model.passes.packed}
        take_step = critic_step if case.trains_critic else actor_step
        for step in range(STEPS):
            take_step(model, own, teacher, step, outcome)
        if case.resumes:
            restored = build(case, folder, [*own, *teacher])
            outcome["restored"] = restore(model, restored, Path(scratch) / "checkpoint")
            resumed: dict[str, Any] = {"values": [], "grad_norm": []}
            take_step(model, own, teacher, STEPS, outcome)
            take_step(restored, own, teacher, STEPS, resumed)
            outcome["continues"] = outcome["values"][-1] == resumed["values"][-1]
        if behind is not None:
            batch = critic_batch(own) if case.trains_critic else optimizer_batch(own)
            take_pass(model, batch)  # image features are kept from here on
            behind.waits.clear()
            take_pass(model, batch)
            outcome["waits"] = dict(behind.waits)
        return outcome


def take_pass(model: Any, batch: Any) -> None:
    """Computes the gradient of one pass of all rows, whose image features are kept."""
    from cepo.losses.aggregation import token_weights

    (part,) = model.passes.cut(batch.rows, len(batch.rows))
    weights = token_weights(batch.response_mask, "token", batch.denominators)
    model._accumulate_gradient(batch, weights, part)


def actor_step(
    actor: Any, own: list[ScoringRow], teacher: list[ScoringRow], step: int, outcome: dict[str, Any]
) -> None:
    """Scores as policy, teacher, reference and for entropy, updates, and reads the weights for the rollout engine."""
    from cepo.data.batch import Kept
    from cepo.rollout.generator import FullWeights
    from cepo.types import Distillation, DivergenceConfig

    score_teacher = actor.score_teacher if actor.has_own_teacher else actor.score
    scored = actor.score(own) + score_teacher(teacher, keep=Kept(VIEW))
    scored += actor.score_initial(own) + actor.entropies(own)
    batch = optimizer_batch(own)
    mask = batch.response_mask
    batch = dataclasses.replace(
        batch,
        old_log_probs=padded(scored[: len(own)], mask),
        reference_log_probs=padded(scored[2 * len(own) : 3 * len(own)], mask),
        distillation=Distillation(divergence=DivergenceConfig(kind="jsd"), token_weight=mask.float(), view=VIEW),
    )
    metrics = actor.update([batch], step=step)
    actor.finish_step(step)
    actor.forget_gradients()
    weights = actor.rollout_weights()
    if isinstance(weights, FullWeights):
        assert list(weights.tensors), "the rollout engine gets no weights"
    actor.rest()
    outcome["values"].append([value for row in scored for value in row.tolist()])
    outcome["grad_norm"].append(metrics["actor/grad_norm"].value)


def critic_step(critic: Any, own: list[ScoringRow], _: list[ScoringRow], step: int, outcome: dict[str, Any]) -> None:
    """Computes values and updates."""
    values = critic.values(own)
    metrics = critic.update([critic_batch(own)], step=step)
    critic.forget_gradients()
    critic.rest()
    outcome["values"].append([value for row in values for value in row.tolist()])
    outcome["grad_norm"].append(metrics["critic/grad_norm"].value)


def restore(model: Any, other: Any, folder: Path) -> int:
    """Saves `model` and loads it into `other`; returns the number of tensors, all of which must have the same bits."""
    from cepo.workers.checkpoint import _state, _tensors, load_state, save_state
    from cepo.workers.distributed import whole_tensor

    save_state(model, folder)
    load_state(other, folder)
    saved = _tensors(_state(model))
    loaded = _tensors(_state(other))
    assert saved.keys() == loaded.keys(), "the restored model has other tensors"
    for name, tensor in saved.items():
        same = torch.equal(whole_tensor(tensor).cpu(), whole_tensor(loaded[name]).cpu())
        assert same, f"{name} differs after it was restored"
    return len(saved)


def padded(rows: list[Tensor], mask: Tensor) -> Tensor:
    """Returns (R, T) with each row's values at the start."""
    values = torch.zeros(mask.shape)
    values[mask] = torch.cat(rows)
    return values


def mixtures_are_refused() -> bool:
    """Returns whether a sum of tensors on two devices raises, so that the check itself is known to work."""
    try:
        torch.zeros(2, device="cuda") + torch.zeros(2)
    except RuntimeError:
        return True
    return False


def on_hollow_gpu(case: str) -> tuple[dict[str, Any], int]:
    """Returns what `run` finds on the hollow GPU, and the number of operations that were checked."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from cepo.models import segments

    segments.compiled = lambda backend: attend_by_formula_to_mask  # pyright: ignore[reportAttributeAccessIssue]
    dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    with ExitStack() as stack:
        behind = stack.enter_context(ProcessorBehind())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        assert mixtures_are_refused(), "a sum of tensors on two devices was not refused"
        return run(case, behind), behind.operations


def on_processor(case: str) -> dict[str, Any]:
    """Returns what `run` finds in a process without the hollow GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-m", "lab.gpu_dry.step", case, "cpu"]
    done = subprocess.run(
        command, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(case: str) -> None:
    outcome, operations = on_hollow_gpu(case)
    expected = on_processor(case)
    pairs = zip(chain(*outcome["values"]), chain(*expected["values"]), strict=True)
    gap = max(abs(value - expected_value) for value, expected_value in pairs)
    limit = LIMITS[CASES[case].settings.get("fsdp.mp_param_dtype", "fp32")]
    what = "values" if CASES[case].trains_critic else "log-probs"
    resumed = ""
    if CASES[case].resumes:
        resumed = f"; {outcome['restored']} tensors restored with the same bits, and the next step is the same"
    waits = ", ".join(f"{number} {operation}" for operation, number in sorted(outcome["waits"].items()))
    report(
        ok=gap <= limit and outcome["packed"] == expected["packed"] and outcome.get("continues", True),
        found=f"{operations:,} operations, none mixes devices; {what} differ from the processor's by {gap:.0e}"
        f"{' nats' * (what == 'log-probs')}{resumed}; waits of an update's pass: {waits or 'none'}",
    )


if __name__ == "__main__":
    if sys.argv[2:] == ["cpu"]:
        print(json.dumps(run(sys.argv[1])))
    else:
        main(sys.argv[1])
