"""Writes rollouts of cepo's own trainer as a data set of verl, with the advantages that each method gives them.

    python tests/integrations/verl_on_cpu/own_rollouts.py FOLDER

Runs where cepo's own trainer does; test_verl.py reads the folder where verl is installed.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from PIL import Image

from cepo.algorithms import build_estimator
from cepo.config import check_config, load_config
from cepo.data.prompts import ContextBuilder
from cepo.microgeo.world import ASSETS, split_problems, write_problems
from cepo.train import build_trainer
from cepo.trainer.loop import Trainer
from cepo.trainer.rollouts import Rollouts

GROUP = 4
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("grpo", "rloo", "reinforce_plus_plus", "rlsd", "rlcsd", "hindsight", "visual", "cepo")),
    *((name, {"advantage": {"baseline": "hindsight"}}) for name in ("cepo", "rlsd")),
    ("cepo", {"weight": {"lambda_init": 1.0, "clip_radius": 0.8}, "negative": {"source": "peer_full"}}),
    ("cepo", {"teacher": {"placement": "assistant_prefix"}}),
    ("cepo", {"teacher": {"with_images": False}}),
    ("rlsd", {"positive": {"source": "peer_answer"}}),
    # A threshold of 0, because rounding must not change which tokens are selected.
    ("contrast_gate", {"threshold": 0.0}),
    ("pgpo", {}),
    # Masks depend on the prompt's name, which the trainers choose themselves: images are black. Rounding must not change
    # which tokens are selected, nor be divided by a small temperature.
    ("rlcsd_released", {"teacher": {"source": "actor"}, "temperature": 1.0, "threshold": 0.0}),
]


def with_a_text_row(file: Path) -> None:
    """Takes the images from every fourth problem: it has no answer then, but rows of both kinds share a batch."""
    rows = pyarrow.parquet.read_table(file).to_pylist()
    for row in rows[::4]:
        row["images"] = []
        row["problem"] = row["problem"].replace("<image>", "")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def own_trainer(folder: Path, stack: ExitStack, *options: str) -> Trainer:
    """cepo's own trainer with the embedded model, for the rows of `train.parquet`: 4 problems x 4 responses a step."""
    arguments = [
        "config=configs/microgeo/base.yaml",
        f"data.train_files={folder / 'train.parquet'}",
        "data.val_files=null",
        "data.rollout_batch_size=4",
        f"worker.actor.model.model_path={ASSETS}",
        "worker.actor.global_batch_size=4",
        "worker.rollout.name=transformers",
        f"worker.rollout.n={GROUP}",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        f"trainer.save_checkpoint_path={folder / 'run'}",
    ]
    config = load_config([*arguments, *options])
    check_config(config)
    return build_trainer(config, stack)


def own_advantages(trainer: Trainer, rollouts: Rollouts, method: str, settings: dict[str, Any]) -> torch.Tensor:
    """The advantages (B, T) that cepo's own trainer gives these rollouts."""
    trainer.estimator = build_estimator(method, settings)
    trainer.contexts = ContextBuilder(trainer.processing, trainer.estimator.teacher, max_context_length=4096)
    batch = trainer.score(trainer.plan(rollouts))
    return trainer.estimator.signal(batch, step=0).advantages


def png(image: Image.Image) -> dict[str, bytes]:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return {"bytes": buffer.getvalue()}


def rows_of(rollouts: Rollouts, first: int) -> list[dict[str, Any]]:
    """Returns the rows of a data set as verl wants them."""
    rows: list[dict[str, Any]] = []
    for number, problem in enumerate(rollouts.problems):
        row = {
            "prompt": [{"role": "user", "content": problem.text}],
            "images": [png(image) for image in problem.images],
            "data_source": "shapes",
            "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
            "extra_info": {"index": first + number},
        }
        rows.append(row)
    return rows


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train, _ = split_problems(0, 16, 1)
    write_problems(folder / "train.parquet", train)
    with_a_text_row(folder / "train.parquet")
    with ExitStack() as stack:
        trainer = own_trainer(folder, stack, "data.shuffle=false")
        steps = [trainer.sample(0), trainer.sample(1)]
        expected = [own_advantages(trainer, steps[0], method, settings) for method, settings in CASES]
    rows: list[dict[str, Any]] = []
    responses: list[list[int]] = []
    correct: list[bool] = []
    for step, rollouts in enumerate(steps):
        rows += rows_of(rollouts, 4 * step)
        responses += [generation.response_ids.tolist() for generation in rollouts.generations]
        correct += rollouts.correct.tolist()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "verl.parquet")
    told = {"model": str(ASSETS), "group": GROUP, "cases": CASES, "responses": responses, "correct": correct}
    (folder / "rollouts.json").write_text(json.dumps(told), encoding="utf-8")
    torch.save(expected, folder / "expected.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
