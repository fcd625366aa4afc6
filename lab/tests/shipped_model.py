"""Samples from the shipped model and scores its responses with plain transformers, for the promises that the tests hold it to."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cepo.microgeo.problems import FAMILIES, Problem, Steps, no_slip
from cepo.microgeo.world import SHAPES, WorldKind
from lab.worlds.prompts import user_messages
from lab.worlds.warmstart import batched_vision_attention

if TYPE_CHECKING:
    from PIL import Image

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_LAST_RESULT = re.compile(r"=(-?\d+)\.? *\\boxed\{")
_ROWS_PER_BATCH = 256


@dataclass(frozen=True)
class Rollout:
    """A sampled response to `problem`; `length` counts its tokens with the end token."""

    problem: Problem
    response: str
    length: int

    @property
    def is_right(self) -> bool:
        found = _BOXED.findall(self.response)
        return bool(found) and found[-1] == self.problem.answer


Groups = Sequence[Sequence[Rollout]]


@dataclass(frozen=True)
class HintEffect:
    """Means of delta = log p(.| right hint) - log p(.| wrong hint), in nats per token, by kind of token."""

    first_token: float
    last_result: float
    filler: float


class Evaluator:
    """A loaded checkpoint with its processor."""

    def __init__(self, folder: Path, kind: WorldKind = SHAPES, *, max_new_tokens: int = 56) -> None:
        from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

        self.kind, self.max_new_tokens = kind, max_new_tokens
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def sample(
        self,
        problems: Sequence[Problem],
        *,
        num_samples: int = 8,
        seed: int = 0,
        greedy: bool = False,
        pictures: Sequence[Image.Image] | None = None,
    ) -> list[list[Rollout]]:
        """`num_samples` responses at temperature 1, or the greedy one, to each problem, in the problems' order."""
        groups: list[list[Rollout]] = []
        rows = max(1, _ROWS_PER_BATCH // num_samples)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), batched_vision_attention(self.model):
            torch.manual_seed(seed)
            for first in range(0, len(problems), rows):
                part = slice(first, first + rows)
                inputs = self.inputs(problems[part], None, pictures and pictures[part], padding_side="left")
                output = self.model.generate(
                    **inputs, do_sample=not greedy, num_return_sequences=num_samples, max_new_tokens=self.max_new_tokens
                )
                new = output[:, inputs["input_ids"].shape[1] :]
                groups += self._groups(problems[part], new, num_samples)
        return groups

    def log_probs(
        self, problems: Sequence[Problem], responses: Sequence[str], hints: Sequence[str | None]
    ) -> list[Tensor]:
        """The log-probs of each response's tokens and of the end token after it, as tensors of shape (length,)."""
        end = self.processor.tokenizer.eos_token
        lengths = [len(self.processor.tokenizer(response + end).input_ids) for response in responses]
        inputs = self.inputs(problems, hints, None, padding_side="right", tails=[text + end for text in responses])
        ids = inputs["input_ids"]
        with torch.no_grad(), batched_vision_attention(self.model):
            logits = self.model(**inputs, use_cache=False).logits.float()
        taken = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ends = inputs["attention_mask"].sum(1).tolist()
        return [row[stop - length - 1 : stop - 1] for row, stop, length in zip(taken, ends, lengths, strict=True)]

    def hint_effect(self, rollouts: Sequence[Rollout], *, seed: int = 0) -> HintEffect:
        """Where the right hint makes these responses likelier than a wrong one does."""
        problems = [one.problem for one in rollouts]
        responses = [one.response for one in rollouts]
        right = self.log_probs(problems, responses, [problem.answer for problem in problems])
        wrong = self.log_probs(problems, responses, [wrong_answer(problem, seed=seed) for problem in problems])
        first, last, filler = [], [], []
        for response, plus, minus in zip(responses, right, wrong, strict=True):
            delta = (plus - minus).tolist()
            offsets = self.processor.tokenizer(response, return_offsets_mapping=True).offset_mapping
            bearing = answer_bearing_positions(response, offsets)
            first.append(delta[0])
            last += [delta[position] for position in bearing[1:]]
            filler += [value for position, value in enumerate(delta) if position not in bearing]
        return HintEffect(_mean(first), _mean(last), _mean(filler))

    def inputs(
        self,
        problems: Sequence[Problem],
        hints: Sequence[str | None] | None,
        pictures: Sequence[Image.Image] | None,
        *,
        padding_side: str,
        tails: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """The model's inputs for the prompts of `problems`, each followed by its tail."""
        texts = []
        for row, problem in enumerate(problems):
            messages = user_messages(problem.question, hints[row] if hints else None)
            text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            texts.append(text + (tails[row] if tails else ""))
        images = list(pictures) if pictures else [self.kind.draw(problem) for problem in problems]
        return dict(
            self.processor(text=texts, images=images, padding=True, padding_side=padding_side, return_tensors="pt")
        )

    def _groups(self, problems: Sequence[Problem], new: Tensor, num_samples: int) -> list[list[Rollout]]:
        ends = set(self.model.generation_config.eos_token_id)
        rollouts = []
        for row, ids in enumerate(new.tolist()):
            length = next((position + 1 for position, token in enumerate(ids) if token in ends), len(ids))
            text = self.processor.tokenizer.decode(ids[:length], skip_special_tokens=True)
            rollouts.append(Rollout(problems[row // num_samples], text, length))
        return [rollouts[first : first + num_samples] for first in range(0, len(rollouts), num_samples)]


def accuracy(groups: Groups) -> float:
    """The fraction of right responses."""
    return _mean([float(one.is_right) for group in groups for one in group])


def mixed_fraction(groups: Groups) -> float:
    """The fraction of groups with right and wrong responses in them."""
    return _mean([float(0 < sum(one.is_right for one in group) < len(group)) for group in groups])


def shuffled_images(problems: Sequence[Problem], kind: WorldKind = SHAPES, *, seed: int = 0) -> list[Image.Image]:
    """Each problem's picture replaced by that of another problem of its family, drawn at random."""
    rng = random.Random(f"shuffle/{seed}")
    by_family: dict[str, list[Problem]] = {}
    for problem in problems:
        by_family.setdefault(problem.family, []).append(problem)
    return [kind.draw(rng.choice(by_family[problem.family])) for problem in problems]


def wrong_answer(problem: Problem, *, seed: int) -> str:
    """Returns a typical wrong answer: from a misread image or the family's misconception, without slips."""
    rng = random.Random(f"wrong/{seed}/{problem.id}")
    family = FAMILIES[problem.family]
    solutions: list[Steps] = [family.solve(problem.seen, problem.numbers, True, no_slip)]
    solutions += [family.solve(seen, problem.numbers, False, no_slip) for seen in family.seen_values]
    candidates = sorted({str(steps[-1][1]) for steps in solutions} - {problem.answer})
    return rng.choice(candidates)


def answer_bearing_positions(response: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    r"""Returns the response tokens that decide the answer: the first (what is seen) and those of the last computed result.

    The digits inside the box copy that result and decide nothing.
    """
    match = _LAST_RESULT.search(response)
    low, high = match.span(1) if match else (0, 0)
    result = [position for position, (start, end) in enumerate(offsets) if start < high and end > low]
    return sorted({0, *result}) if offsets else []


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
