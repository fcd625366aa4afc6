"""Generates demonstrations of the chain world with a worked solution in view: right, wrong, or of another problem."""

from __future__ import annotations

import random
import re
from dataclasses import replace

from lab.worlds.chain import ChainProblem, answer_text, chain_solution, generate_chain_problem
from lab.worlds.chain_demonstrations import ChainNoise, connective, demonstrate_chain, noisy_step
from lab.worlds.demonstrations import Demonstration

_STEP = re.compile(r"([A-L]) ((?:hollow )?(?:triangle|square|circle|diamond) [^.]*?)(\d+)\.")
_NO_HINT = ChainNoise(hinted=0.0)
_NO_MISTAKE = replace(_NO_HINT, circle=0.0, diamond=0.0, hollow=0.0)
_CARELESS = replace(_NO_HINT, misread=0.15, slip=0.35)
USE = 0.95
"""The probability with which a walk takes a step of the solution in view."""
_KINDS, _SHARES = ("right", "wrong", "other"), (0.4, 0.35, 0.25)


def demonstrate_worked(problem: ChainProblem, *, seed: int) -> Demonstration:
    """Returns a walk with a worked solution as its hint, a pure function of the arguments.

    The solution in view is right in 40 % of the demonstrations (a third of these in the data set's plain wording), the
    walk of somebody who makes the usual mistakes, and others more often, in 35 %, and that of another problem in 25 %.
    Of a solution to its own problem the walk takes each step with probability `USE`, whether it is right or wrong, while
    both are at the same position; all other steps are made with the usual mistakes, as without a solution. A step with
    another result is corrected with probability `USE`. The solution of another problem is ignored.
    """
    rng = random.Random(f"worked/{seed}/{problem.id}")
    (kind,) = rng.choices(_KINDS, _SHARES)
    source = problem if kind != "other" else generate_chain_problem(seed, rng.randrange(2**31), stream="worked")
    shown = _solution(source, rng, is_right=kind == "right")
    return Demonstration(problem, _walk(problem, rng, "" if kind == "other" else shown), shown)


def _solution(problem: ChainProblem, rng: random.Random, *, is_right: bool) -> str:
    if is_right and rng.random() < 1 / 3:
        return chain_solution(problem)
    rates, right = _NO_MISTAKE if is_right else _CARELESS, f"\\boxed{{{problem.answer}}}"
    text = chain_solution(problem)
    for _ in range(20):  # a short walk may stay right
        text = demonstrate_chain(problem, seed=rng.randrange(2**31), rates=rates).response
        if text.endswith(right) == is_right:
            break
    return text


def _walk(problem: ChainProblem, rng: random.Random, shown: str) -> str:
    steps, before = _steps(problem, shown), problem.numbers[0]
    rates, parts, ends = _NO_HINT, list[str](), list[int]()
    for label, figure, ended_row in problem.cells():
        own = noisy_step(problem, figure, before, rng, rates)
        start, *given = steps.get(label, (None, *own))
        is_followed = start == before
        text, result = given if is_followed and rng.random() < USE else own
        parts.append(f"{connective(rng, rates)}{label} {text}{result}.")
        right = given if is_followed else noisy_step(problem, figure, before, rng, _NO_MISTAKE)
        if result != right[1] and rng.random() < (max(USE, rates.corrects) if is_followed else rates.corrects):
            text, result = right
            parts.append(f"No, {label} {text}{result}.")
        before = int(result)
        if ended_row:
            parts.append(f"{connective(rng, rates)}Row {ended_row} {before}.")
            ends.append(before)
    return f"{' '.join(parts)} \\boxed{{{answer_text(ends)}}}"


def _steps(problem: ChainProblem, shown: str) -> dict[str, tuple[int, str, int]]:
    """Returns by label the position before each step of a solution, its text up to the result, and the result."""
    found, now = dict[str, tuple[int, str, int]](), problem.numbers[0]
    for label, text, result in _STEP.findall(shown):
        start = found[label][0] if label in found else now  # a correction starts where the corrected step did
        found[label], now = (start, text, int(result)), int(result)
    return found
