"""Short training runs in this process, and plain transformers as the measure that the scoring path is held against."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from actors import parameters_of
from factories import response_mask
from json_files import read_lines
from PIL import Image
from torch import Tensor

from cepo.config import RunConfig, check_config, load_config
from cepo.config.worker_schema import RewardConfig
from cepo.data.batch import OptimizerBatch, ScoringRow, token_array
from cepo.losses.aggregation import LossDenominators
from cepo.models.interface import EncodedPrompt
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.run_folder.trace import read_rollouts
from cepo.train import build_trainer
from cepo.trainer.loop import Trainer
from cepo.workers.actor import Actor
from cepo.workers.distributed import whole_tensor as whole
from cepo.workers.worker import Worker

REPOSITORY = Path(__file__).resolve().parents[2]
REWARD_FUNCTIONS = REPOSITORY / "tests" / "reward_functions.py"
EVERY_WRONG_ROLLOUT_TEACHES = "algorithm.negative.source=peer_full"
"""An untrained model boxes no answer; whole responses serve as references without one."""
WRONG_ROLLOUTS_TEACH = {name: [EVERY_WRONG_ROLLOUT_TEACHES] for name in ("cepo", "rlcsd")}
"""The same by method, for methods with a wrong side."""
TWO_TEACHERS = ["algorithm.adv_estimator=cepo", EVERY_WRONG_ROLLOUT_TEACHES]
ONE_STEP = "trainer.max_steps=1"


@dataclass(frozen=True)
class FinishedRun:
    """What a run leaves in memory and in its folder."""

    trainer: Trainer
    folder: Path

    @property
    def first_step(self) -> int:
        """Steps that were done before this run began."""
        return self.trainer._first_step

    @property
    def actor(self) -> Actor:
        return actor_of(self.trainer)

    @property
    def parameters(self) -> dict[str, Tensor]:
        return parameters_of(self.actor)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of training steps alone, without those of validations."""
        return [row for row in self.metrics if "reward/mean" in row]

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        return recorded_groups(self.folder)

    def total(self, name: str) -> float:
        return sum(row[name] for row in self.metrics)


BuildActor = Callable[..., Actor]
"""The fixture `build_actor`: an actor on the tiny checkpoint; keywords are settings of `worker.actor`, dots as `__`."""
Train = Callable[..., FinishedRun]
"""The fixture `train`: a run of the tiny model with overrides, in the test's own folder."""
Prepare = Callable[[Trainer], None]


def around(method: str, change: Callable[..., Any]) -> Prepare:
    """Has `change(trainer, plain, *arguments)` called in place of a method of the trainer or, as `backend.x`, its backend."""

    def prepare(trainer: Trainer) -> None:
        *path, name = method.split(".")
        owner = functools.reduce(getattr, path, trainer)
        setattr(owner, name, functools.partial(change, trainer, getattr(owner, name)))

    return prepare


def noting(method: str, note: Callable[..., Any]) -> Prepare:
    """Has `note` called with the arguments of each call of a method."""

    def change(_: Trainer, plain: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        note(*arguments, **keywords)
        return plain(*arguments, **keywords)

    return around(method, change)


def checked_config(arguments: Sequence[str]) -> RunConfig:
    config = load_config(arguments)
    check_config(config)
    return config


class _KeptPool(RewardPool):
    """A pool that serves all runs of these tests with the same reward: its process takes half a second to start."""

    def close(self) -> None:
        """Leaves the end to that of the tests."""


_kept: dict[str, RewardPool] = {}
_REWARDS_OF_MANY_RUNS = (":parity", ":graded", "cepo/rewards/math.py:compute_score")


def shared_pool(reward: RewardConfig) -> RewardPool:
    """The pool of all runs with this reward if there are many of them, and else one of its own."""
    if not reward.reward_function.endswith(_REWARDS_OF_MANY_RUNS):
        return RewardPool(reward)
    if repr(reward) not in _kept:
        _kept[repr(reward)] = _KeptPool(reward)
    return _kept[repr(reward)]


@contextmanager
def opened(arguments: Sequence[str], *overrides: str, folder: Path) -> Iterator[Trainer]:
    """A trainer that has begun no step."""
    config = checked_config([*arguments, *overrides, f"trainer.save_checkpoint_path={folder}"])
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cepo.rewards.pool.RewardPool", shared_pool)
            trainer = build_trainer(config, stack)
        yield trainer


def run(arguments: Sequence[str], *overrides: str, folder: Path, prepare: Prepare | None = None) -> FinishedRun:
    """A whole run in `folder`; `prepare` may change the trainer before its first step."""
    with opened(arguments, *overrides, folder=folder) as trainer:
        if prepare is not None:
            prepare(trainer)
        trainer.fit()
    return FinishedRun(trainer, folder)


def actor_of(trainer: Trainer) -> Actor:
    assert isinstance(trainer.backend, Worker)
    return trainer.backend.actor


def largest_gap(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    gaps: list[float] = []
    for left_tensor, right_tensor in zip(left, right, strict=True):
        gaps.append(float((left_tensor - right_tensor).abs().max()))
    assert gaps, "nothing was compared"
    return max(gaps)


def recorded_groups(folder: Path) -> list[dict[str, Any]]:
    """The trace of a run as plain values."""
    return [dataclasses.asdict(group) for group in read_rollouts(folder)]


def write_pictured(path: Path, problems: Iterable[tuple[Sequence[Image.Image], str, str]]) -> Path:
    """A Parquet file as `datasets` writes it of images, the question about them and its answer."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as Picture

    rows: list[dict[str, Any]] = []
    for images, question, answer in problems:
        marks = "<image>" * len(images)
        rows.append({"images": list(images), "problem": marks + question, "answer": answer})
    features = Features({"images": List(Picture()), "problem": Value("string"), "answer": Value("string")})
    Dataset.from_list(rows, features=features).to_parquet(str(path))
    return path


def encoded(processing: Processing, text: str, *images: Image.Image) -> EncodedPrompt:
    return processing.encode("<image>" * len(images) + text, processing.load_images(images))


def random_response(length: int, seed: int) -> tuple[int, ...]:
    """Plain text tokens: the first 256 of the vocabulary are single bytes."""
    return tuple(numpy.random.default_rng(seed).integers(0, 256, length).tolist())


def plain_inputs(model: Any, row: ScoringRow) -> dict[str, Any]:
    """One unpadded row, as transformers' models with their own handling of positions, pictures and videos take it."""
    ids = torch.tensor([[*row.context.token_ids, *row.response_ids]])
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds}
    if row.context.images is not None:
        inputs |= row.context.images.tensors
    return inputs


def reference_logits(model: Any, row: ScoringRow) -> Tensor:
    """(response length, V) from one pass of the model over the row alone."""
    return model(**plain_inputs(model, row)).logits[0, len(row.context.token_ids) - 1 : -1].float()


def reference_log_probs(model: Any, rows: Sequence[ScoringRow], *, temperature: float = 1.0) -> list[Tensor]:
    of_rows: list[Tensor] = []
    for row in rows:
        log_probs = (reference_logits(model, row) / temperature).log_softmax(dim=1)
        tokens = torch.tensor(row.response_ids)[:, None]
        of_rows.append(log_probs.gather(1, tokens)[:, 0])
    return of_rows


def rows_of(contexts: Sequence[EncodedPrompt], lengths: Sequence[int]) -> list[ScoringRow]:
    """Responses of these lengths, as many behind each context."""
    rows_per_context = len(lengths) // len(contexts)
    return [
        ScoringRow(
            context=contexts[number // rows_per_context],
            response_ids=token_array(random_response(length, seed=number)),
            row=number,
        )
        for number, length in enumerate(lengths)
    ]


def mask_of(rows: Sequence[ScoringRow]) -> Tensor:
    """(B, T) bool."""
    return response_mask([len(row.response_ids) for row in rows])


def padded(values: Sequence[Tensor], mask: Tensor) -> Tensor:
    """(B, T): a row's values on its response tokens, and 0 behind them."""
    return torch.zeros(mask.shape).masked_scatter(mask, torch.cat(list(values)))


def denominators_of(mask: Tensor) -> LossDenominators:
    return LossDenominators(num_tokens=int(mask.sum()), num_sequences=len(mask), max_response_length=40)


def batch_of(
    rows: Sequence[ScoringRow],
    advantages: Sequence[float],
    old: Sequence[Tensor],
    *,
    on_policy: bool = False,
    **further: Any,
) -> OptimizerBatch:
    """Rows with one advantage and the old log-probs of each, which the engine has too."""
    mask = mask_of(rows)
    log_probs = padded(old, mask)
    return OptimizerBatch(
        rows=rows,
        sampled_log_probs=log_probs,
        old_log_probs=None if on_policy else log_probs,
        advantages=torch.tensor(advantages).unsqueeze(1).expand(mask.shape).where(mask, 0.0),
        response_mask=mask,
        denominators=denominators_of(mask),
        **further,
    )


def gradient_of(worker: Any, batch: Any) -> Tensor:
    """All weights' gradients of one optimizer step of an actor or a critic that moves nothing, as one vector."""
    for group in worker.optimizer.param_groups:
        group["lr"] = 0.0
    worker._optimizer_step(batch)
    return torch.cat([whole(weight.grad).flatten() for weight in worker.module.parameters() if weight.grad is not None])


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """The length of the difference, as a share of the expected one's."""
    assert float(expected.norm()) > 0
    return float((found - expected).norm() / expected.norm())
