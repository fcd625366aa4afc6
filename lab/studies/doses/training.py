"""Trains the chain world's weights further, so that worked solutions in view are used, and nothing else changes."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.studies.worlds.chain import (
    NUM_NAMINGS,
    ChainNoise,
    ChainProblem,
    answer_text,
    chain_solution,
    connective,
    demonstrate_chain,
    generate_chain_problem,
    noisy_step,
)
from lab.studies.worlds.kinds import CHAIN
from lab.worlds.demonstrations import WARM_START, Demonstration
from lab.worlds.warmstart import Chunk, WarmStartSettings, batched_vision_attention, chunk_of, schedule, threads

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


SETTINGS = WarmStartSettings(
    num_steps=1800, batch_size=16, learning_rate=2e-3, num_warmup_steps=50, num_threads=1, bfloat16=False
)


def teach(folder: Path, *, settings: WarmStartSettings = SETTINGS, progress: Callable[..., None]) -> None:
    """Writes a copy of the chain world's weights to `folder` and trains it; a pure function of the settings.

    Three quarters of each batch are demonstrations of `demonstrate_worked`. The others are those of the warm start,
    without a hint or with an answer as hint; on their tokens the loss is the cross-entropy to the distribution of the
    shipped weights, so that the policy stays as it was.
    """
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    shutil.copytree(CHAIN.assets, folder)
    processor: Any = AutoProcessor.from_pretrained(folder)
    model, before = (Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    size = settings.batch_size
    num_worked = size * 3 // 4
    with threads(settings.num_threads), batched_vision_attention(model), batched_vision_attention(before):
        for step in range(settings.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * schedule(step, settings)
            first = NUM_NAMINGS + step * size
            problems = [generate_chain_problem(1, first + index, stream=WARM_START) for index in range(size)]
            worked = chunk_of(processor, CHAIN, [demonstrate_worked(one, seed=1) for one in problems[:num_worked]], 1.0)
            usual = chunk_of(processor, CHAIN, [CHAIN.demonstrate(one, 1) for one in problems[num_worked:]], 1.0)
            learnt = torch.nn.functional.cross_entropy(_logits(model, worked), _targets(worked))
            with torch.no_grad():
                kept = _logits(before, usual).softmax(-1)
            held = torch.nn.functional.cross_entropy(_logits(model, usual), kept)
            (learnt + held).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            progress(step + 1, learnt.item(), held.item() - _entropy(kept))
    model.save_pretrained(folder)


def _logits(model: Any, chunk: Chunk) -> Tensor:
    hidden = model.model(**chunk.inputs, use_cache=False).last_hidden_state
    return model.lm_head(hidden[chunk.rows, chunk.columns - 1]).float()


def _targets(chunk: Chunk) -> Tensor:
    return chunk.inputs["input_ids"][chunk.rows, chunk.columns]


def _entropy(kept: Tensor) -> float:
    return -float(torch.xlogy(kept, kept).sum(-1).mean())
