"""Stores the rollouts of a measurement in a file, from which a resumed measurement reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cepo.credit.claimed_folder import read_whole
from cepo.credit.session import Session
from cepo.foreign_files import read_objects
from cepo.rollout.generator import Generation
from cepo.tracking.lines import encode_line
from cepo.tracking.run_folder import write_atomically
from cepo.trainer.asking import Rollouts

FILE = "responses.jsonl"


def kept_rollouts(folder: Path, session: Session) -> Rollouts:
    """Returns the folder's rollouts; if there are none, samples and stores those of the first step.

    They include the rewards of greedy responses, which methods that are measured later may need.

    Raises:
        DataError: the file is damaged.
        EngineError, RewardError: sampling or grading failed.
    """
    path = folder / FILE
    if not path.exists():
        rollouts = session.ask(0, with_baselines=True)
        write_atomically(path, b"".join(encode_line(row) for row in _rows(rollouts)).decode("utf-8"))
    return _read(path, session)


def _rows(rollouts: Rollouts) -> list[dict[str, Any]]:
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


def _generation(row: Mapping[str, Any]) -> Generation:
    return Generation(
        response_ids=tuple(row["response_ids"]), log_probs=tuple(row["log_probs"]), finished=row["finished"]
    )
