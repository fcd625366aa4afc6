"""Ranks in processes of their own: the same rows, signals and seeds whatever their number, each with its share of the rows."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import io
import itertools
import math
import multiprocessing
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import actors
import numpy
import pytest
import torch
import torch.distributed as dist
from actors import parameters_of
from generator_cases import picture
from torch import Tensor

from cepo.algorithms.settings import TeacherConfig
from cepo.config import load_config
from cepo.data.batch import CriticBatch, Kept, OptimizerBatch, ScoringRow, token_array
from cepo.losses.aggregation import LossDenominators
from cepo.metrics import Metrics
from cepo.models.compiled_layers import compile_decoder
from cepo.models.interface import EncodedPrompt
from cepo.models.patch_mask import PatchMask
from cepo.models.processing import Processing
from cepo.rollout.generator import AdapterWeights, Weights
from cepo.types import Distillation, DivergenceConfig
from cepo.workers import building
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import load_state, save_state
from cepo.workers.critic import Critic
from cepo.workers.distributed import whole_tensor

KEPT = "hinted"
WITHOUT_TEACHER = (0, 3, 5, 8)
"""One row of each prompt learns from no teacher."""
LENGTHS = ((9, 3, 11), (14, 1), (6, 12, 2), (8, 5))
"""Response lengths of each prompt's rows."""
PICTURES = ([picture(1)], [], [picture(2, (96, 64)), picture(3, (128, 96))], [])
"""Of each prompt."""
NUM_PICTURES = (1, 0, 2, 0)

SHARES: Mapping[int, Mapping[str, Sequence[Sequence[int]]]] = {
    1: {"mixed": [[0, 1, 2, 3]], "one empty": [[0, 1, 2, 3]]},
    2: {"mixed": [[0, 2], [1, 3]], "one empty": [[], [0, 1, 2, 3]]},
    4: {"mixed": [[2], [1], [0], [3]], "one empty": [[3, 0], [], [2], [1]]},
}
"""Which prompts each rank gets. In `mixed` some ranks have no picture; in `one empty` one has no row."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One configuration of a worker, which saves after the first of two steps. `settings` are keys below its section."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    has_teacher_model: bool = False
    share: str = "mixed"
    distils: bool = False
    with_reference: bool = False
    loss_type: str = "default"
    num_steps: int = 1


_EVERYWHERE = {
    "micro_batch_size_per_device_for_update": 2,
    "micro_batch_size_per_device_for_experience": 3,
    "fsdp.mp_param_dtype": "fp32",
}
_ADAPTED = {"model.lora.rank": 4, "fsdp.enable_rank0_init": True, "optim.lr": "1e-3"}
ALL_WEIGHTS = "all weights, distilled from a moving average"
FROZEN_TOWER = "all weights but the vision tower's, gathered until the backward, not recomputed"
ADAPTER = "an adapter, read by the first rank, with a KL over the vocabulary"
QLORA = "an adapter on a base in 4 bits, which every rank reads though the first one is asked to"
COMPILED = "an adapter, by compiled layers, gathered until the backward"
COPIES = "shards over 2 ranks with copies, read by the first rank"
TAUGHT = "all weights, distilled from a frozen model"
REFERENCE = TeacherConfig(source="reference")
ACTORS: Mapping[str, Scenario] = {
    ALL_WEIGHTS: Scenario(
        settings={"entropy_coef": 0.05}, teacher=TeacherConfig(source="ema", ema_decay=0.5), distils=True, num_steps=2
    ),
    FROZEN_TOWER: Scenario(
        settings={
            "fsdp.enable_full_shard": False,
            "model.enable_gradient_checkpointing": False,
            "model.freeze_vision_tower": True,
            "entropy_coef": -0.05,
        },
        share="one empty",
    ),
    ADAPTER: Scenario(settings=_ADAPTED, teacher=REFERENCE, share="one empty", with_reference=True, num_steps=2),
    QLORA: Scenario(settings=_ADAPTED | {"model.lora.quantization": "nf4"}, teacher=REFERENCE, num_steps=2),
    TAUGHT: Scenario(settings={"fsdp.enable_rank0_init": True}, has_teacher_model=True, distils=True),
    COMPILED: Scenario(
        settings=_ADAPTED | {"model.compile_layers": True, "fsdp.enable_full_shard": False},
        teacher=REFERENCE,
    ),
    COPIES: Scenario(
        settings={"fsdp.fsdp_size": 2, "fsdp.enable_rank0_init": True},
        teacher=TeacherConfig(source="snapshot"),
        loss_type="gspo",
    ),
}
SERVED_ADAPTERS = (ADAPTER, COMPILED)
CRITIC = "a critic"
CRITICS: Mapping[str, Scenario] = {
    CRITIC: Scenario(num_steps=2),
    "a critic read by the first rank, one rank without rows": Scenario(
        settings={"fsdp.enable_rank0_init": True, "model.enable_gradient_checkpointing": False}, share="one empty"
    ),
}

LEFT_OUT: Mapping[int, Sequence[str]] = {
    1: (COMPILED,),
    2: (COMPILED, COPIES),
    4: (COMPILED, FROZEN_TOWER, QLORA, TAUGHT, CRITIC),
}
"""By number of ranks: two have no copies, four make nothing of these that two do not make, and layers are traced at night."""


@dataclass(kw_only=True)
class Outcome:
    """What a rank found. Scores are by row number; weights and gradients are whole."""

    initial: dict[str, Tensor] = field(default_factory=dict)
    scores: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    metrics: list[Metrics] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rollout: dict[str, Tensor] = field(default_factory=dict)
    most_whole_weights: int = 0
    drawn: list[float] = field(default_factory=list)
    refused: Metrics = field(default_factory=dict)
    refused_changed: list[str] = field(default_factory=list)


def all_rows(processing: Processing) -> list[list[ScoringRow]]:
    """Rows by prompt."""
    questions = ("Find x of this figure, please.", "What is 2 + 3?", "Which is larger?", "Name a prime.")
    rows = []
    numbers = itertools.count()
    for prompt, (question, images, lengths) in enumerate(zip(questions, PICTURES, LENGTHS, strict=True)):
        context = processing.encode("<image>" * len(images) + question, processing.load_images(images))
        rows.append([])
        for length in lengths:
            number = next(numbers)
            response = numpy.random.default_rng(number).integers(0, 256, length).tolist()
            rows[-1].append(ScoringRow(context=context, response_ids=token_array(response), prompt=prompt, row=number))
    return rows


def hinted(processing: Processing, rows: Sequence[ScoringRow]) -> list[ScoringRow]:
    """The same responses behind a context that says more, with the same pictures."""
    contexts: dict[int, EncodedPrompt] = {}
    for row in rows:
        images = row.context.images
        count = 0 if images is None else images.num_encoded
        if id(row.context) not in contexts:
            contexts[id(row.context)] = processing.encode("<image>" * count + "A hint: 7. Now say it.", images)
    return [
        dataclasses.replace(
            row, context=contexts[id(row.context)], view="untaught" if row.row in WITHOUT_TEACHER else KEPT
        )
        for row in rows
    ]


def masked(processing: Processing, rows: Sequence[ScoringRow]) -> list[ScoringRow]:
    """The same responses behind the same tokens with half of each picture black; none for rows without a picture."""
    seen: list[ScoringRow] = []
    for row in rows:
        images = PICTURES[row.prompt]
        if images:
            mask = PatchMask(probability=0.5, seed=str(row.prompt))
            context = dataclasses.replace(row.context, images=processing.load_masked(images, mask))
            seen.append(dataclasses.replace(row, context=context, view="masked"))
    return seen


class Share:
    """The rows of this rank, and the signals that belong to them."""

    def __init__(self, processing: Processing, share: str) -> None:
        groups = all_rows(processing)
        mine = SHARES[dist.get_world_size()][share][dist.get_rank()]
        self.rows = [row for group in mine for row in groups[group]]
        self.numbers = [row.row for row in self.rows]
        self.longest = max(map(max, LENGTHS))
        self.denominators = LossDenominators(sum(map(sum, LENGTHS)), sum(map(len, LENGTHS)), 20)
        self.mask = torch.arange(self.longest) < torch.tensor([len(row.response_ids) for row in self.rows]).view(-1, 1)

    def signal(self, seed: int, spread: float = 1.0) -> Tensor:
        """(rows, T): a number for each token of all rows, of which this rank takes its own."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self.denominators.num_sequences, self.longest, generator=generator)
        return (spread * drawn[self.numbers]).where(self.mask, 0.0)

    def padded(self, values: Sequence[Tensor]) -> Tensor:
        result = torch.zeros(self.mask.shape)
        if values:
            result[self.mask] = torch.cat(list(values))
        return result

    def batch(self, old_log_probs: Tensor, advantages: Tensor, **others: Any) -> OptimizerBatch:
        return OptimizerBatch(
            rows=self.rows,
            sampled_log_probs=old_log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            response_mask=self.mask,
            denominators=self.denominators,
            **others,
        )

    def by_number(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        return dict(zip(self.numbers, values, strict=True))


def build_actor(folder: Path, scenario: Scenario) -> Actor:
    kl = [f"algorithm.disable_kl={not scenario.with_reference}", "algorithm.use_kl_loss=true", "algorithm.kl_coef=0.1"]
    settings = _EVERYWHERE | {"loss_type": scenario.loss_type} | dict(scenario.settings)
    teacher = TeacherConfig(model_path=str(folder)) if scenario.has_teacher_model else scenario.teacher
    # Traced in both directions as for kernels; g++ would take minutes to make them.
    building.compile_decoder = functools.partial(compile_decoder, backend="aot_eager")
    return actors.build_actor(
        folder, *kl, "algorithm.kl_penalty=low_var_kl", teacher=teacher, temperature=0.9, **settings
    )


def actor_run(folder: Path, name: str, saved: Path) -> Outcome:
    """Training steps of two optimizer steps each; the gradients are those of each step's last one.

    At the end comes an update with an infinite advantage on one rank.
    """
    scenario = ACTORS[name]
    actor = build_actor(folder, scenario)
    share = Share(actor._processing, scenario.share)
    outcome = Outcome(initial=parameters_of(actor))
    for step in range(scenario.num_steps):
        actor_step(actor, share, scenario, outcome, step)
        if scenario.num_steps > 1 and step == 0:
            torch.manual_seed(100 + dist.get_rank())
            save_state(actor, saved_folder(saved, name, dist.get_world_size()))
            outcome.drawn = torch.rand(3).tolist()
    outcome.parameters = parameters_of(actor)
    outcome.buffers = {name: buffer.clone() for name, buffer in actor.module.named_buffers()}
    weights = actor.rollout_weights()
    assert isinstance(weights, AdapterWeights) == (name in SERVED_ADAPTERS)
    _read(weights, outcome)
    advantages = share.signal(20)
    if 0 in share.numbers:
        advantages[share.numbers.index(0), 0] = math.inf
    batch = share.batch(share.signal(10, 0.1) - 6.0, advantages)
    outcome.refused = actor.update([batch], step=scenario.num_steps)
    outcome.refused_changed = actors.differing(parameters_of(actor), outcome.parameters)
    return outcome


def saved_folder(saved: Path, name: str, num_ranks: int) -> Path:
    return saved / f"{name}, saved by {num_ranks}"


def resumed_run(folder: Path, name: str, saved: Path, saved_by: int) -> Outcome:
    """The second step of a scenario, from the checkpoint that another number of ranks wrote after the first."""
    scenario = ACTORS[name]
    actor = build_actor(folder, scenario)
    load_state(actor, saved_folder(saved, name, saved_by))
    outcome = Outcome(drawn=torch.rand(3).tolist())
    actor_step(actor, Share(actor._processing, scenario.share), scenario, outcome, 1)
    outcome.parameters = parameters_of(actor)
    return outcome


def resumed_runs(folder: Path, saved: Path, names: Mapping[int, Sequence[str]]) -> dict[str, Outcome]:
    """By scenario and number of ranks that saved; `names` has the scenarios of each number."""
    return {f"{name} {number}": resumed_run(folder, name, saved, number) for number in names for name in names[number]}


def _read(weights: Weights, outcome: Outcome) -> None:
    """As an engine does, which keeps no tensor but its own copy."""
    lent: list[weakref.ref[Tensor]] = []
    for name in weights.tensors:
        tensor = weights.tensors[name]
        outcome.rollout[name] = tensor.clone()
        lent.append(weakref.ref(tensor))
        outcome.most_whole_weights = max(outcome.most_whole_weights, sum(ref() is not None for ref in lent))


def whole_gradients(worker: Actor | Critic) -> dict[str, Tensor]:
    named = worker.module.named_parameters()
    return {name: whole_tensor(weight.grad).clone() for name, weight in named if weight.grad is not None}


def actor_step(actor: Actor, share: Share, scenario: Scenario, outcome: Outcome, step: int) -> None:
    unseen = masked(actor._processing, share.rows)
    # In one pass, as teachers with the student's weights are.
    seen_and_unseen = actor.score([*share.rows, *unseen])
    num_seen = len(share.rows)
    scores = seen_and_unseen[:num_seen]
    outcome.scores[f"student {step}"] = share.by_number(scores)
    outcome.scores[f"masked {step}"] = {}
    for row, values in zip(unseen, seen_and_unseen[num_seen:], strict=True):
        outcome.scores[f"masked {step}"][row.row or 0] = values
    score_teacher = actor.score_teacher if actor.has_own_teacher else actor.score
    distributions = Kept(KEPT) if scenario.distils else None
    teacher = score_teacher(hinted(actor._processing, share.rows), keep=distributions)
    outcome.scores[f"teacher {step}"] = share.by_number(teacher)
    reference_log_probs = None
    if scenario.with_reference:
        reference = actor.score_initial(share.rows)
        outcome.scores[f"reference {step}"] = share.by_number(reference)
        reference_log_probs = share.padded(reference)
    distillation = None
    if scenario.distils:
        has_teacher = torch.tensor([[row.row not in WITHOUT_TEACHER] for row in share.rows])
        distillation = Distillation(
            divergence=DivergenceConfig(kind="jsd"),
            token_weight=share.signal(7).abs() * has_teacher,
            view=KEPT,
        )
    batches: list[OptimizerBatch] = []
    for part in range(2):
        batch = share.batch(
            share.padded(scores) + share.signal(10 + part, 0.1),
            share.signal(20 + part),
            reference_log_probs=reference_log_probs,
            distillation=distillation,
        )
        batches.append(batch)
    outcome.metrics.append(actor.update(batches, step=step))
    outcome.gradients.append(whole_gradients(actor))
    actor.finish_step(step)


def every_run(folder: Path, saved: Path) -> dict[str, Outcome]:
    """This number's scenarios in one process group, and a resumed run from the checkpoint of half as many ranks."""
    left_out = LEFT_OUT[dist.get_world_size()]
    runs = {name: actor_run(folder, name, saved) for name in ACTORS if name not in left_out}
    runs |= {name: critic_run(folder, scenario) for name, scenario in CRITICS.items() if name not in left_out}
    half = dist.get_world_size() // 2
    return runs | resumed_runs(folder, saved, {half: (ALL_WEIGHTS,)} if half else {})


def critic_run(folder: Path, scenario: Scenario) -> Outcome:
    """As `actor_run`, for the critic."""
    tree = {"optim.lr": "1e-3", **_EVERYWHERE, **scenario.settings}
    arguments = [f"worker.critic.{name}={value}" for name, value in tree.items()]
    config = load_config(["config=configs/microgeo/base.yaml", f"worker.actor.model.model_path={folder}", *arguments])
    processing = Processing(str(folder))
    critic = Critic(config.worker.resolved_critic, processing, total_steps=10, seed=1)
    share = Share(processing, scenario.share)
    outcome = Outcome(initial=parameters_of(critic))
    for step in range(scenario.num_steps):
        values = critic.values(share.rows)
        outcome.scores[f"values {step}"] = share.by_number(values)
        batch = CriticBatch(
            rows=share.rows,
            old_values=share.padded(values),
            returns=share.signal(30),
            response_mask=share.mask,
            denominators=share.denominators,
        )
        outcome.metrics.append(critic.update([batch, batch], step=step))
        outcome.gradients.append(whole_gradients(critic))
    outcome.parameters = parameters_of(critic)
    outcome.buffers = {name: buffer.clone() for name, buffer in critic.module.named_buffers()}
    return outcome


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, seconds: float = 540.0) -> list[Any]:
    """What `function(*arguments)` returns on each of `num_ranks` ranks of a process group over gloo.

    Raises what a rank raised, `BrokenProcessPool` if one died, or `TimeoutError` if they hang.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_imports"])  # once, by the server that the ranks are forked from
    with tempfile.TemporaryDirectory() as meeting, ProcessPoolExecutor(num_ranks, mp_context=context) as pool:
        # The server imports before anything has told it where from, and says nothing where that fails.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
            ranks = [pool.submit(_rank, function, arguments, rank, num_ranks, meeting) for rank in range(num_ranks)]
        results: list[Any] = []
        for rank in ranks:
            content = rank.result(timeout=seconds)
            results.append(torch.load(io.BytesIO(content), weights_only=False))
        return results


def _rank(function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, num_ranks: int, meeting: str) -> bytes:
    torch.set_num_threads(1)
    address = f"file://{meeting}/store"
    limit = datetime.timedelta(seconds=240)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks, timeout=limit)
    try:
        packed = io.BytesIO()  # tensors in a queue would be handles on a process that is gone when they are read
        torch.save(function(*arguments), packed)
        dist.barrier()
        return packed.getvalue()
    finally:
        dist.destroy_process_group()
