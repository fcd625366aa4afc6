"""Stores a measurement's settings and rollouts in its folder, from which it resumes with the same settings only."""

from __future__ import annotations

import dataclasses
import json
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from cepo.config import RunConfig
from cepo.credit.session import Session
from cepo.errors import ConfigError, ForeignFileError
from cepo.foreign_files import damaged_as, irregular_file, read_json, read_objects
from cepo.rollout.generator import Generation
from cepo.tracking.lines import encode_line
from cepo.tracking.run_folder import write_atomically
from cepo.trainer.asking import Rollouts
from cepo.trees import Fields, Tree, leaves

SETTINGS_FILE = "measurement.json"


def claim_folder(folder: Path, own: Fields, config: RunConfig) -> None:
    """Writes the settings that the folder's samples depend on, or compares them with those that the folder has.

    Raises:
        ConfigError: the settings differ, or the folder holds something other than a measurement.
        DataError: the folder's settings cannot be read.
    """
    worker = config.worker
    settings = {
        **own,
        "data": dataclasses.asdict(config.data),
        "worker.actor.model": dataclasses.asdict(worker.actor.model),
        "worker.rollout": dataclasses.asdict(worker.rollout),
        "worker.reward": dataclasses.asdict(worker.reward),
        "trainer.seed": config.trainer.seed,
    }
    flat = json.loads(json.dumps(dict(leaves(settings)), default=str))
    path = folder / SETTINGS_FILE
    if (irregular := irregular_file(folder)) is not None:
        raise ForeignFileError(irregular, "is a link, a pipe or a device; give a new folder (--out)")
    if path.is_file():
        with read_whole(path):
            before: Tree = read_json(path, dict, within=folder)
        other = [key for key in sorted({*flat, *before}) if flat.get(key) != before.get(key)]
        if other:
            raise ConfigError(
                f"--out {folder} holds a measurement with other settings: {', '.join(other[:5])}; give the same settings "
                "to resume it, or a new folder"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder} does not hold a measurement; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(flat, indent=1) + "\n")


def read_whole(path: Path) -> AbstractContextManager[None]:
    """Returns a context for reading a file of the folder, which raises `DataError` if the file is damaged."""
    return damaged_as(path, "is damaged, and its measurement cannot go on; give a new folder (--out)")


RESPONSES_FILE = "responses.jsonl"


def kept_rollouts(folder: Path, session: Session) -> Rollouts:
    """Returns the folder's rollouts; if there are none, samples and stores those of the first step.

    They include the rewards of greedy responses, which methods that are measured later may need.

    Raises:
        DataError: the file is damaged.
        EngineError, RewardError: sampling or grading failed.
    """
    path = folder / RESPONSES_FILE
    if not path.exists():
        rollouts = session.ask(0, with_baselines=True)
        write_atomically(path, b"".join(encode_line(row) for row in _rows(rollouts)).decode("utf-8"))
    return _read(path, session)


def _rows(rollouts: Rollouts) -> list[Tree]:
    baselines = rollouts.reward_baselines
    assert baselines is not None, "they were asked for"
    return [
        {
            "prompt_id": rollouts.problems[row // rollouts.group_size].prompt_id,
            "response": rollouts.responses[row],
            "response_ids": list(generation.response_ids),
            "log_probs": list(generation.log_probs),
            "finished": generation.finished,
            "scores": dict(rollouts.scores[row]),
            "correct": bool(rollouts.correct[row]),
            "baseline": float(baselines[row]),
        }
        for row, generation in enumerate(rollouts.generations)
    ]


def _read(path: Path, session: Session) -> Rollouts:
    indices = session.problems.indices(0, session.config.data.rollout_batch_size)
    problems = [session.problems[index] for index in indices]
    prompts = [session.contexts.student(problem) for problem in problems]
    with read_whole(path):
        rows = list(read_objects(path, within=path.parent))
        return Rollouts(
            step=0,
            problems=problems,
            prompts=prompts,
            generations=[_generation(row) for row in rows],
            responses=[row["response"] for row in rows],
            scores=[row["scores"] for row in rows],
            correct=torch.tensor([row["correct"] for row in rows]),
            reward_baselines=torch.tensor([row["baseline"] for row in rows]),
        )


def _generation(row: Fields) -> Generation:
    return Generation(
        response_ids=tuple(row["response_ids"]), log_probs=tuple(row["log_probs"]), finished=row["finished"]
    )
