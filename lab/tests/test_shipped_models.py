"""The embedded world's shipped model keeps its promises, and the command that made it is reproducible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from shipped_model import Evaluator, Rollout, accuracy, mixed_fraction, shuffled_images

from cepo.config import load_config
from cepo.microgeo.problems import generate_problem
from cepo.microgeo.world import ASSETS
from lab.support.machine import ROOT as REPOSITORY
from lab.worlds.__main__ import main
from lab.worlds.kinds import CHAIN
from lab.worlds.model import build_untrained_model
from lab.worlds.prompts import user_messages
from lab.worlds.tokenizer import SPECIAL_TOKENS, build_tokenizer
from lab.worlds.warmstart import WarmStartSettings, batched_vision_attention, warm_start

pytestmark = pytest.mark.heavy

NUM_PROBLEMS = 96


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(ASSETS)


@pytest.fixture(scope="module")
def groups(evaluator: Evaluator) -> list[list[Rollout]]:
    problems = [generate_problem(0, index, stream="test") for index in range(NUM_PROBLEMS)]
    return evaluator.sample(problems, num_samples=8)


def test_the_shipped_model_solves_35_to_60_percent(groups: list[list[Rollout]]) -> None:
    """The temperature is 1."""
    assert 0.35 <= accuracy(groups) <= 0.60


def test_at_least_half_of_the_groups_of_8_are_mixed(groups: list[list[Rollout]]) -> None:
    assert mixed_fraction(groups) >= 0.5


def test_97_percent_of_responses_have_15_to_48_tokens(groups: list[list[Rollout]]) -> None:
    lengths = [one.length for group in groups for one in group]
    assert sum(15 <= length <= 48 for length in lengths) > 0.97 * len(lengths)


def test_shuffled_images_cost_at_least_10_points(evaluator: Evaluator, groups: list[list[Rollout]]) -> None:
    problems = [group[0].problem for group in groups]
    shuffled = evaluator.sample(problems, num_samples=4, pictures=shuffled_images(problems))
    assert accuracy(shuffled) <= accuracy(groups) - 0.10


def test_a_right_hint_moves_answer_tokens_10_times_as_much(evaluator: Evaluator, groups: list[list[Rollout]]) -> None:
    """Filler moves a tenth as much, on right rollouts."""
    right = [one for group in groups for one in group if one.is_right]
    effect = evaluator.hint_effect(right[:160])
    assert effect.first_token > 0.3
    assert effect.last_result > 0.3
    assert min(effect.first_token, effect.last_result) > 10 * abs(effect.filler)


def test_a_64_by_64_image_is_4_tokens_and_any_at_most_700(evaluator: Evaluator) -> None:
    for size, expected in (((64, 64), 4), ((320, 256), 80), ((3000, 2000), 32 * 21)):
        text = evaluator.processor.apply_chat_template(user_messages("How long?"), tokenize=False)
        encoded = evaluator.processor(text=[text], images=[Image.new("RGB", size)], return_tensors="pt")
        count = int((encoded["input_ids"] == evaluator.model.config.image_token_id).sum())
        assert count == expected


def test_the_shipped_tokenizer_is_the_one_the_code_builds(evaluator: Evaluator) -> None:
    built = build_tokenizer()
    assert built.get_vocab() == evaluator.processor.tokenizer.get_vocab()
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
    inputs = evaluator.inputs(problems, None, None, padding_side="right")
    with torch.no_grad():
        usual = evaluator.model(**inputs).logits
        with batched_vision_attention(evaluator.model):
            batched = evaluator.model(**inputs).logits
    assert float((usual - batched).abs().max()) < 1e-4
    assert float((usual.log_softmax(-1) - batched.log_softmax(-1))[inputs["attention_mask"] > 0].abs().max()) < 1e-4


def test_eight_warm_start_steps_are_a_function_of_the_seed(
    tmp_path: Path,
) -> None:
    """One seed gives the same weights bit for bit; another seed draws other problems for the same model."""
    settings = WarmStartSettings(num_steps=8, batch_size=8, num_warmup_steps=2, num_threads=1)
    losses, weights = [], []
    for name in ("first", "again"):
        folder = build_untrained_model(tmp_path / name, seed=0)
        losses.append(warm_start(folder, settings=settings, seed=0))
        weights.append(load_file(folder / "model.safetensors"))
    assert losses[0][-1] < losses[0][0] - 0.5
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    other = warm_start(
        build_untrained_model(tmp_path / "other", seed=0), settings=replace(settings, num_steps=1), seed=1
    )
    assert other[0] != losses[0][0]


def test_the_chains_warm_start_is_a_function_of_the_seed(tmp_path: Path) -> None:
    settings = WarmStartSettings(num_steps=3, batch_size=4, num_warmup_steps=1, num_threads=1)
    weights = []
    for name in ("first", "again"):
        folder = build_untrained_model(tmp_path / name, kind=CHAIN, seed=0)
        warm_start(folder, kind=CHAIN, settings=settings, seed=0)
        weights.append(load_file(folder / "model.safetensors"))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_the_chain_world_is_built_with_every_split(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "chain"), "--num-train", "2", "--num-validation", "2"]) == 0
    built = {file.name for file in (tmp_path / "chain").iterdir()}
    assert built == {"model", "world.json", *(f"{split}.parquet" for split in CHAIN.splits)}
    run = load_config([f"config={REPOSITORY}/lab/chain.yaml"])
    assert {Path(run.data.train_files).name, Path(run.data.val_files or "").name} <= built
