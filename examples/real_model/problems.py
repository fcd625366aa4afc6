"""Writes one-line sums in English, each with a worked solution: the task of the real-model example.

    python examples/real_model/problems.py --seed 0

writes `train.jsonl` and `held_out.jsonl` beside this file, as they are shipped. Another seed gives other problems for
choosing settings, so that the shipped held-out problems are read only to report a result.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

NUM_TRAINING = 800
NUM_HELD_OUT = 256
INSTRUCTION = "Answer with a short calculation."
NAMES = ("Anna", "Ben", "Emma", "Jack", "Lily", "Mia", "Noah", "Sam", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")

Problem = dict[str, str]


def _sum_of_two(draw: random.Random) -> Problem:
    first = draw.randint(1, 12)
    second = draw.randint(1, 12)
    total = first + second
    return {
        "question": f"What is {first} + {second}?",
        "answer": str(total),
        "solution": f"{first} + {second} = {total}",
    }


def _sum_of_three(draw: random.Random) -> Problem:
    first = draw.randint(1, 9)
    second = draw.randint(1, 9)
    third = draw.randint(1, 9)
    partial = first + second
    total = partial + third
    return {
        "question": f"What is {first} + {second} + {third}?",
        "answer": str(total),
        "solution": f"{first} + {second} = {partial}, {partial} + {third} = {total}",
    }


def _buys_more(draw: random.Random) -> Problem:
    name = draw.choice(NAMES)
    thing = draw.choice(THINGS)
    at_first = draw.randint(2, 15)
    bought = draw.randint(2, 15)
    total = at_first + bought
    return {
        "question": f"{name} has {at_first} {thing} and buys {bought} more. How many {thing} does {name} have?",
        "answer": str(total),
        "solution": f"{name} has {at_first} + {bought} = {total} {thing}.",
    }


def _gives_away(draw: random.Random) -> Problem:
    name = draw.choice(NAMES)
    thing = draw.choice(THINGS)
    at_first = draw.randint(5, 15)
    given_away = draw.randint(2, at_first - 2)
    left = at_first - given_away
    return {
        "question": f"{name} has {at_first} {thing} and gives away {given_away}. How many {thing} are left?",
        "answer": str(left),
        "solution": f"{name} has {at_first} - {given_away} = {left} {thing} left.",
    }


TEMPLATES: tuple[Callable[[random.Random], Problem], ...] = (_sum_of_two, _sum_of_three, _buys_more, _gives_away)


def problems(count: int, *, seed: int) -> list[Problem]:
    """Returns `count` different problems, which are a function of the seed; the templates take turns.

    Raises:
        ValueError: the templates that run out of problems leave fewer than `count`.
    """
    draw = random.Random(seed)
    drawn: dict[str, Problem] = {}  # by question, so that none comes twice
    for attempt in range(100 * count):
        if len(drawn) == count:
            break
        problem = TEMPLATES[attempt % len(TEMPLATES)](draw)
        drawn.setdefault(problem["question"], problem)
    else:
        raise ValueError(f"the templates have fewer than {count} different problems")
    for problem in drawn.values():
        problem["question"] = f"{problem['question']} {INSTRUCTION}"
    return list(drawn.values())


def split(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Returns training and held-out problems, which have no problem in common."""
    everything = problems(NUM_TRAINING + NUM_HELD_OUT, seed=seed)
    # Short templates run out first, so both parts are drawn from the whole.
    random.Random(seed).shuffle(everything)
    return everything[NUM_HELD_OUT:], everything[:NUM_HELD_OUT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="where to write; default: here")
    arguments = parser.parse_args()
    training, held_out = split(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", training), ("held_out", held_out)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (arguments.folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
