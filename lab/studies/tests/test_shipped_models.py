"""The worlds' shipped models keep their promises, measured with plain transformers, and what made them is reproducible."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from cepo.config import load_config
from cepo.microgeo.problems import FAMILIES, ToyProblem, generate_problem
from cepo.microgeo.world import ASSETS
from lab.studies.worlds.chain import CONNECTIVES, RULER, answer_text, generate_chain_problem
from lab.studies.worlds.kinds import CHAIN, KINDS
from lab.support.machine import ROOT as REPOSITORY
from lab.worlds.__main__ import main
from lab.worlds.demonstrations import solve, user_messages
from lab.worlds.kinds import SHAPES, TaughtWorld
from lab.worlds.model import build_untrained_model
from lab.worlds.tokenizer import SPECIAL_TOKENS, build_tokenizer
from lab.worlds.warmstart import WarmStartSettings, batched_vision_attention, warm_start

pytestmark = pytest.mark.heavy


@dataclass(frozen=True)
class Rollout:
    """A sampled response to `problem`; `length` counts its tokens with the end token."""

    problem: ToyProblem
    response: str
    length: int

    @property
    def is_right(self) -> bool:
        found = re.findall(r"\\boxed\{([^{}]*)\}", self.response)
        return bool(found) and found[-1] == self.problem.answer


class Evaluator:
    """A loaded checkpoint with its processor."""

    def __init__(self, folder: Path, kind: TaughtWorld = SHAPES, *, max_new_tokens: int = 56) -> None:
        self.kind, self.max_new_tokens = kind, max_new_tokens
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def sample(
        self,
        problems: Sequence[ToyProblem],
        *,
        num_samples: int = 8,
        greedy: bool = False,
        pictures: Sequence[Image.Image] | None = None,
    ) -> list[list[Rollout]]:
        """`num_samples` responses at temperature 1, or the greedy one, to each problem, in the problems' order."""
        groups: list[list[Rollout]] = []
        rows = 256 // num_samples
        with torch.random.fork_rng(devices=[]), torch.no_grad(), batched_vision_attention(self.model):
            torch.manual_seed(0)
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
        self, problems: Sequence[ToyProblem], responses: Sequence[str], hints: Sequence[str | None]
    ) -> list[Tensor]:
        """The log-probs of each response's tokens and of the end token after it, as tensors of shape (length,)."""
        end = self.processor.tokenizer.eos_token
        lengths = [len(self.processor.tokenizer(response + end).input_ids) for response in responses]
        inputs = self.inputs(problems, hints, tails=[text + end for text in responses])
        ids = inputs["input_ids"]
        with torch.no_grad(), batched_vision_attention(self.model):
            logits = self.model(**inputs, use_cache=False).logits.float()
        taken = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ends = inputs["attention_mask"].sum(1).tolist()
        return [row[stop - length - 1 : stop - 1] for row, stop, length in zip(taken, ends, lengths, strict=True)]

    def deltas(
        self, rollouts: Sequence[Rollout], wrong_hints: Sequence[str]
    ) -> Iterator[tuple[str, list[tuple[int, int, float]]]]:
        """Each response with its tokens: start, end, and log p(.| right hint) - log p(.| wrong hint) in nats."""
        asked, responses = [one.problem for one in rollouts], [one.response for one in rollouts]
        right = self.log_probs(asked, responses, [problem.answer for problem in asked])
        wrong = self.log_probs(asked, responses, wrong_hints)
        for response, plus, minus in zip(responses, right, wrong, strict=True):
            offsets = self.processor.tokenizer(response, return_offsets_mapping=True).offset_mapping
            spans = [*offsets, (len(response), len(response))]  # the end token
            delta = (plus - minus).tolist()
            yield response, [(*span, value) for span, value in zip(spans, delta, strict=True)]

    def inputs(
        self,
        problems: Sequence[ToyProblem],
        hints: Sequence[str | None] | None = None,
        pictures: Sequence[Image.Image] | None = None,
        *,
        padding_side: str = "right",
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

    def _groups(self, problems: Sequence[ToyProblem], new: Tensor, num_samples: int) -> list[list[Rollout]]:
        ends = set(self.model.generation_config.eos_token_id)
        rollouts = []
        for row, ids in enumerate(new.tolist()):
            length = next((position + 1 for position, token in enumerate(ids) if token in ends), len(ids))
            text = self.processor.tokenizer.decode(ids[:length], skip_special_tokens=True)
            rollouts.append(Rollout(problems[row // num_samples], text, length))
        return [rollouts[first : first + num_samples] for first in range(0, len(rollouts), num_samples)]


def accuracy(groups: Sequence[Sequence[Rollout]]) -> float:
    return float(np.mean([one.is_right for group in groups for one in group]))


def shuffled_images(problems: Sequence[ToyProblem], kind: TaughtWorld) -> list[Image.Image]:
    """Each problem's picture replaced by that of another problem of its family, drawn at random."""
    rng = random.Random("shuffle/0")
    by_family: dict[str, list[ToyProblem]] = {}
    for problem in problems:
        by_family.setdefault(problem.family, []).append(problem)
    return [kind.draw(rng.choice(by_family[problem.family])) for problem in problems]


def wrong_answer(problem: ToyProblem) -> str:
    """A typical wrong answer: from a misread image or the family's misconception, without slips."""
    solutions = [solve(problem, misconceived=True)]
    solutions += [solve(problem, seen=seen) for seen in FAMILIES[problem.family].seen_values]
    candidates = sorted({str(steps[-1][1]) for steps in solutions} - {problem.answer})
    return random.Random(f"wrong/0/{problem.id}").choice(candidates)


@functools.cache
def world(name: str) -> tuple[Evaluator, list[list[Rollout]]]:
    """A world's shipped model, and 8 responses to each of its held-out problems at temperature 1."""
    if name == "shapes":
        evaluator = Evaluator(ASSETS)
        problems: list[ToyProblem] = [generate_problem(0, index, stream="test") for index in range(96)]
    else:
        evaluator = Evaluator(CHAIN.assets, CHAIN, max_new_tokens=256)
        problems = [generate_chain_problem(0, index, stream="test") for index in range(48)]
    return evaluator, evaluator.sample(problems)


@pytest.fixture
def evaluator() -> Evaluator:
    return world("shapes")[0]


@pytest.mark.parametrize(
    ("name", "share", "lengths", "least_inside"),
    [("shapes", (0.35, 0.60), (15, 48), 0.97), ("chain", (0.20, 0.50), (60, 250), 0.95)],
)
def test_a_shipped_model_leaves_room_to_learn(
    name: str, share: tuple[float, float], lengths: tuple[int, int], least_inside: float
) -> None:
    """A share of right responses, half of the groups of 8 mixed, and lengths within bounds; another image costs accuracy."""
    evaluator, groups = world(name)
    assert share[0] <= accuracy(groups) <= share[1]
    assert np.mean([0 < sum(one.is_right for one in group) < len(group) for group in groups]) >= 0.5
    assert np.mean([lengths[0] <= one.length <= lengths[1] for group in groups for one in group]) > least_inside
    problems = [group[0].problem for group in groups]
    pictures = shuffled_images(problems, evaluator.kind)
    samples = 4 if name == "shapes" else 1
    shuffled = accuracy(evaluator.sample(problems, num_samples=samples, pictures=pictures))
    if name == "shapes":
        assert shuffled <= accuracy(groups) - 0.10
    else:
        assert shuffled <= 0.10
        assert accuracy(evaluator.sample(problems, num_samples=1, greedy=True)) <= 0.7
    assert build_tokenizer(evaluator.kind).get_vocab() == evaluator.processor.tokenizer.get_vocab()
    assert sum(file.stat().st_size for file in evaluator.kind.assets.iterdir()) < 10_000_000


def right_rollouts(name: str) -> list[Rollout]:
    return [one for group in world(name)[1] for one in group if one.is_right]


def test_a_right_hint_moves_answer_tokens_10_times_as_much() -> None:
    """On right rollouts the first token, which says what is seen, and the last result; the box copies it and is filler."""
    right = right_rollouts("shapes")[:160]
    first, result, filler = list[float](), list[float](), list[float]()
    for response, tokens in world("shapes")[0].deltas(right, [wrong_answer(one.problem) for one in right]):
        match = re.search(r"=(-?\d+)\.? *\\boxed\{", response)
        low, high = match.span(1) if match else (0, 0)
        for place, (start, end, delta) in enumerate(tokens):
            (first if place == 0 else result if start < high and end > low else filler).append(delta)
    assert min(np.mean(first), np.mean(result)) > 0.3
    assert min(np.mean(first), np.mean(result)) > 10 * abs(np.mean(filler))


def test_a_hint_with_another_place_takes_from_the_last_result() -> None:
    """Means of log P given the right answer minus log P given one with another last place, on right walks' last rows."""
    right = right_rollouts("chain")
    results, filler = list[float](), list[float]()
    for response, tokens in world("chain")[0].deltas(right, [other_end(one.problem) for one in right]):
        (low, high) = [*re.finditer(r"(\d+)\. (?:[A-Z]\w+ )?Row \d", response)][-1].span(1)
        results += [delta for start, end, delta in tokens if start < high and end > low]
        filler += [delta for start, end, delta in tokens if response[start:end].strip() in CONNECTIVES]
    assert np.mean(results) > 0.03
    assert np.mean(results) > 10 * abs(np.mean(filler))


def other_end(problem: ToyProblem) -> str:
    """The answer with the last place 7 further, round the ruler's end."""
    *others, last = map(int, problem.answer.strip("()").split(","))
    return answer_text([*others, (last + 7) % (RULER + 1)])


def test_a_64_by_64_image_is_4_tokens_and_any_at_most_700(evaluator: Evaluator) -> None:
    for size, expected in (((64, 64), 4), ((320, 256), 80), ((3000, 2000), 32 * 21)):
        text = evaluator.processor.apply_chat_template(user_messages("How long?"), tokenize=False)
        encoded = evaluator.processor(text=[text], images=[Image.new("RGB", size)], return_tensors="pt")
        count = int((encoded["input_ids"] == evaluator.model.config.image_token_id).sum())
        assert count == expected


def test_the_shapes_tokenizer_has_500_tokens_and_any_text(evaluator: Evaluator) -> None:
    built = build_tokenizer()
    assert len(built) == 500
    assert all(len(built(token).input_ids) == 1 for token in SPECIAL_TOKENS)
    text = "The yard is 17 wide, √2·x ≤ 5 \\angle ABC, naïve 角."
    assert evaluator.processor.tokenizer.decode(built(text).input_ids) == text
    tokens = [built.decode([token]) for token in built("5 sides. 5*12=60.").input_ids]
    assert tokens == ["5", " sides", ".", " ", "5", "*", "1", "2", "=", "6", "0", "."]


def test_the_prompt_has_qwens_form_and_the_hint_its_place(evaluator: Evaluator) -> None:
    """The hint is inside the user turn."""
    processor = evaluator.processor
    messages = user_messages("Each side is 7. What is the perimeter?", "35")
    assert processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Each side is 7. What is the perimeter?"
        " Answer in \\boxed{}.\nHere is a sample answer: 35<|im_end|>\n<|im_start|>assistant\n"
    )


def test_batched_vision_attention_gives_the_usual_logits(evaluator: Evaluator) -> None:
    """The log-probs agree as well, to 1e-4."""
    problems = [generate_problem(0, index, stream="test") for index in range(8)]
    inputs = evaluator.inputs(problems)
    with torch.no_grad():
        usual = evaluator.model(**inputs).logits
        with batched_vision_attention(evaluator.model):
            batched = evaluator.model(**inputs).logits
    assert float((usual - batched).abs().max()) < 1e-4
    assert float((usual.log_softmax(-1) - batched.log_softmax(-1))[inputs["attention_mask"] > 0].abs().max()) < 1e-4


@pytest.mark.parametrize("kind", [SHAPES, CHAIN], ids=["shapes", "chain"])
def test_eight_warm_start_steps_are_a_function_of_the_seed(kind: TaughtWorld, tmp_path: Path) -> None:
    """One seed gives the same weights bit for bit; another seed draws other problems for the same model."""
    settings = WarmStartSettings(num_steps=8, batch_size=8, num_warmup_steps=2, num_threads=1)
    losses, weights = [], []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        folder = build_untrained_model(tmp_path / name, kind=kind, seed=0)
        losses.append(warm_start(folder, kind=kind, settings=settings, seed=seed))
        weights.append(load_file(folder / "model.safetensors"))
    assert losses[0][-1] < losses[0][0] - 0.5 * (kind is SHAPES)
    assert losses[0] == losses[1]
    assert losses[2][0] != losses[0][0]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_the_chain_world_is_built_with_every_split(tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "chain"), "--num-train", "2", "--num-validation", "2"]
    assert main(options, kinds=KINDS, default=CHAIN.name) == 0
    built = {file.name for file in (tmp_path / "chain").iterdir()}
    assert built == {"model", "world.json", *(f"{split}.parquet" for split in CHAIN.splits)}
    run = load_config([f"config={REPOSITORY}/lab/studies/chain.yaml"])
    assert {Path(run.data.train_files).name, Path(run.data.val_files or "").name} <= built
