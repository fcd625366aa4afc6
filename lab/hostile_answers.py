"""Tests the default reward on generated answers that are meant to crash, stall or mislead it.

    python3 -m lab.hostile_answers --number 10000 --seed 1

Every answer is graded twice, in two pools of new processes: in order, and shuffled. Reported are the samples that
raised or exceeded the time limit, the seconds per answer, and the number of verdicts that differ between the two
orders, since a verdict must not depend on earlier ones. Exits with 1 if a sample raised, timed out or was not graded,
if a verdict differs, or if the mean is above 20 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from cepo.config.worker_schema import RewardConfig
from cepo.rewards.contract import RewardOutcome
from cepo.rewards.pool import RewardPool
from lab.support.machine import load_average, machine_record
from testing.hostile import GOLDS, hostile_answer

ROOT = Path(__file__).resolve().parent.parent
REWARD = f"{ROOT}/lab/support/timed_reward.py:main"
LARGEST_MEAN = 0.02
AT_ONCE = 256


def samples_of(number: int, seed: int) -> list[dict[str, Any]]:
    """Returns inputs of the reward function; one in ten has a hostile ground truth, one in four a correct answer."""
    draw = random.Random(seed)
    samples: list[dict[str, Any]] = []
    for index in range(number):
        gold = hostile_answer(draw)[:200] if index % 10 == 0 else draw.choice(GOLDS)
        response = hostile_answer(draw)
        if index % 4 == 1:
            response += rf" \boxed{{{gold}}}"
        samples.append({"response": response, "response_length": 1, "ground_truth": gold})
    return samples


def graded(samples: list[dict[str, Any]], timeout: float, workers: int) -> list[RewardOutcome]:
    """Grades the samples in batches as large as those of a training step, and returns the outcomes."""
    with RewardPool(RewardConfig(reward_function=REWARD, num_cpus=workers, timeout_seconds=timeout)) as pool:
        return [pool.score(samples[start : start + AT_ONCE]) for start in range(0, len(samples), AT_ONCE)]


def figures(samples: list[dict[str, Any]], *, timeout: float, workers: int, seed: int) -> dict[str, Any]:
    """Grades the samples in order and shuffled, and returns the figures."""
    began = time.monotonic()
    in_order = graded(samples, timeout, workers)
    wall = time.monotonic() - began
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    shuffled = graded([samples[index] for index in order], timeout, workers)
    first = [score for outcome in in_order for score in outcome.scores]
    second = dict(zip(order, (score for outcome in shuffled for score in outcome.scores), strict=True))
    seconds = sorted(score["seconds"] for score in first)
    return {
        "answers": len(samples),
        "timed_out": sum(outcome.num_timed_out for outcome in in_order),
        "raised": sum(outcome.num_raised for outcome in in_order),
        "right": sum(score["accuracy"] for score in first),
        "other_verdict_in_another_order": sum(
            score["accuracy"] != second[index]["accuracy"] for index, score in enumerate(first)
        ),
        "mean_seconds": sum(seconds) / len(seconds),
        "99th_percentile_seconds": seconds[int(0.99 * (len(seconds) - 1))],
        "longest_seconds": seconds[-1],
        "wall_seconds": wall,
    }


def main() -> int:
    """Prints the figures and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--timeout", type=float, default=10.0, help="seconds per sample, as worker.reward.timeout_seconds"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "lab" / "results" / "hostile_answers.json")
    options = parser.parse_args()
    samples = samples_of(options.number, options.seed)
    found = figures(samples, timeout=options.timeout, workers=options.workers, seed=options.seed)
    record = {
        **machine_record(1),
        "load": load_average(),
        "seed": options.seed,
        "limit_seconds": options.timeout,
        **found,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name, value in found.items():
        print(f"{name.replace('_', ' '):40} {value:g}")
    is_held = not (found["timed_out"] or found["raised"] or found["other_verdict_in_another_order"])
    return int(not is_held or found["mean_seconds"] > LARGEST_MEAN)


if __name__ == "__main__":
    sys.exit(main())
