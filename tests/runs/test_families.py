"""Every supported model family: what is scored and trained is what plain transformers computes, on both engines."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_cases import picture
from PIL import Image
from rounding import GRADIENTS, ORDERS, moved_by_one_unit
from safetensors.torch import load_file
from tiny_checkpoints import FAMILIES, TEXT_FAMILIES, VISION_FAMILIES, write_checkpoint
from torch import Tensor
from training_runs import EVERY_WRONG_ROLLOUT_TEACHES, Train, differing, encoded, largest_gap, random_response, whole

from cepo.data.batch import ScoringRow
from cepo.errors import ConfigError
from cepo.models.families import FAMILIES as SUPPORTED
from cepo.models.families import family_of
from cepo.models.pretrained import quantised_weights
from cepo.models.processing import Processing
from cepo.workers.actor_critic import Actor
from cepo.workers.checkpoint import save_state
from cepo.workers.merged_model import BaseModel, merge_checkpoint
from cepo.workers.scoring_model import collate

BuildActor = Callable[..., Actor]
Checkpoint = Callable[[str], Path]
Record = Callable[[str, object], None]
"""pytest's `record_property`: the figures of docs/models.md are in the report that `--junitxml` writes."""


LogProbRounding = Callable[[str], float]

ALTERNATING = """
def alternating(samples):  # each group has right and wrong responses
    return [{"overall": number % 2, "accuracy": number % 2} for number in range(len(samples))]
"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The folder of a family's tiny checkpoint, written once."""
    return functools.cache(lambda family: write_checkpoint(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def log_prob_rounding(checkpoint: Checkpoint) -> LogProbRounding:
    """Nats that two orders of summation may lie apart in a family's log-probs: measured once, on plain transformers' model."""

    @functools.cache
    def measured(family: str) -> float:
        folder = checkpoint(family)
        model, rows = plain_model(folder, family), rows_of(family, Processing(str(folder)))
        log_probs = torch.no_grad()(functools.partial(expected_log_probs, model, folder, family, rows))
        return ORDERS * moved_by_one_unit(log_probs, model.parameters())

    return measured


def prompts_of(family: str) -> list[tuple[str, list[Image.Image]]]:
    """Text alone; for models with a vision tower also one image, and two of other sizes."""
    if family in TEXT_FAMILIES:
        return [("What is 2 + 3?", []), ("Count the sides of a square.", [])]
    return [
        ("What is 2 + 3?", []),
        ("How long is AB?", [picture(1, (64, 64))]),
        ("Which one is larger?", [picture(2, (96, 64)), picture(3, (56, 84))]),
    ]


def rows_of(family: str, processing: Processing) -> list[ScoringRow]:
    """Two responses of different lengths to each prompt."""
    contexts = [encoded(processing, text, *images) for text, images in prompts_of(family)]
    return [
        ScoringRow(context=context, response_ids=random_response(length, seed=length), prompt=number)
        for number, context in enumerate(contexts)
        for length in (5, 9)
    ]


def plain_inputs(folder: Path, text: str, images: list[Image.Image]) -> dict[str, Tensor]:
    """What transformers' own processor makes of a user turn."""
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder)
    content: Any = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": text}]
    if not hasattr(processor, "image_processor"):
        content = text
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template([{"role": "user", "content": content}], **options)


def plain_model(folder: Path, family: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForCausalLM if family in TEXT_FAMILIES else AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def plain_log_probs(model: Any, inputs: dict[str, Tensor], response: tuple[int, ...]) -> Tensor:
    """log P of each response token by the model's own forward pass over one row without padding."""
    inputs = dict(inputs)
    start = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([response])], dim=1)
    for name in {"attention_mask", "mm_token_type_ids", "token_type_ids"} & set(inputs):
        filled = torch.full((1, len(response)), int(name == "attention_mask"))
        inputs[name] = torch.cat([inputs[name], filled], dim=1)
    logits = model(**inputs).logits[0, start - 1 : -1]
    return logits.log_softmax(dim=1).gather(1, torch.tensor(response)[:, None])[:, 0]


def expected_log_probs(model: Any, folder: Path, family: str, rows: list[ScoringRow]) -> list[Tensor]:
    """Of the rows of `rows_of`, whose prompts have the tokens of transformers' own processor."""
    expected: list[Tensor] = []
    for (text, images), start in zip(prompts_of(family), range(0, len(rows), 2), strict=True):
        inputs = plain_inputs(folder, text, images)
        for row in rows[start : start + 2]:
            assert list(row.context.token_ids) == inputs["input_ids"][0].tolist()
            expected.append(plain_log_probs(model, inputs, row.response_ids))
    return expected


ONE_OF_A_KIND = [
    family
    if family in ("qwen3", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma3")
    else pytest.param(family, marks=pytest.mark.nightly("the layers that are quantised are those of another family"))
    for family in FAMILIES
]
"""Text alone, dense layers, experts, linear attention, and another vision tower."""


def test_each_model_type_has_a_tiny_checkpoint_or_shares_one() -> None:
    """A model type may share a page with one that has a checkpoint."""
    tried = {family.title for family in SUPPORTED if set(family.model_types) & set(FAMILIES)}
    assert {family.title for family in SUPPORTED} - tried <= {"Qwen2-MoE, Qwen3-MoE"}


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_plain_transformers(
    family: str,
    checkpoint: Checkpoint,
    build_actor: BuildActor,
    log_prob_rounding: LogProbRounding,
    record_property: Record,
) -> None:
    folder = checkpoint(family)
    processing = Processing(str(folder))
    rows = rows_of(family, processing)
    actor = build_actor(folder=folder)
    model = plain_model(folder, family)
    expected = expected_log_probs(model, folder, family, rows)
    scores = actor.score(rows)
    assert actor.passes.packed == processing.family.packs
    assert actor.passes.packed or actor.module.why_padded == processing.family.why_padded
    weights = [0.3 * (-1) ** number for number in range(len(rows))]
    sum(weight * each.sum() for weight, each in zip(weights, expected, strict=True)).backward()
    batch = collate(rows, processing=processing, device=torch.device("cpu"))
    log_probs = actor.module(batch)[0].split([len(row.response_ids) for row in rows])
    for name, found in (("log_probs", expected), ("packed", log_probs)):
        gap = largest_gap(scores, [each.detach() for each in found])
        record_property(name, gap)
        assert gap < log_prob_rounding(family)
    sum(weight * each.sum() for weight, each in zip(weights, log_probs, strict=True)).backward()
    known = dict(model.named_parameters())
    squares, length, tower_is_reached = 0.0, 0.0, False
    for name, parameter in actor.module.model.named_parameters():
        gradient, own = known[name].grad, parameter.grad
        assert (gradient is None) == (own is None), name
        if gradient is not None:
            squares += float((whole(own) - gradient).double().square().sum())
            length += float(gradient.double().square().sum())
            tower_is_reached |= "vis" in name and bool(gradient.any())
    assert tower_is_reached == (family in VISION_FAMILIES), "the responses do not depend on the images"
    record_property("gradient", (squares / length) ** 0.5)
    assert (squares / length) ** 0.5 < GRADIENTS


@pytest.mark.heavy
@pytest.mark.parametrize("family", ONE_OF_A_KIND)
def test_on_a_4_bit_base_log_probs_are_those_of_engine_weights(
    family: str, checkpoint: Checkpoint, build_actor: BuildActor, log_prob_rounding: LogProbRounding
) -> None:
    folder = checkpoint(family)
    processing = Processing(str(folder))
    rows = rows_of(family, processing)
    actor = build_actor(folder=folder, model__lora__rank=4, model__lora__quantization="nf4")
    for name, weight in actor.module.named_parameters():
        if ".lora_B." in name:
            weight.data.fill_(0.02)
    weights = dict(actor.rollout_weights().tensors)
    model = plain_model(folder, family)
    changed = [name for name, before in model.state_dict().items() if not torch.equal(weights[name], before)]
    assert len(changed) == len(quantised_weights(actor.module)) > 0
    vision = family_of(model.config).vision_parts(actor.module.base)
    assert not any(quantised_weights(part) for part in vision)
    model.load_state_dict(weights)
    expected = [each.detach() for each in expected_log_probs(model, folder, family, rows)]
    assert largest_gap(actor.score(rows), expected) < log_prob_rounding(family)


ONE_TYPE_ON_A_CPU = ("qwen3_5", "qwen3_5_moe")
"""vLLM's CPU build computes linear attention in bf16 alone, so that the trainer's float32 differs by its rounding."""

REFUSED = {
    ("gemma3", "vllm", "cepo, LoRA"): "masks later tokens of the same image",
    ("gemma3", "vllm", "grpo, full"): "masks later tokens of the same image",
    ("llava_onevision", "vllm", "cepo, LoRA"): "serves no LoRA adapters on LLaVA-OneVision",
    ("qwen3_5_moe", "vllm", "cepo, LoRA"): "serves experts with an adapter only on GPUs",
    ("qwen3_vl_moe", "vllm", "cepo, LoRA"): "serves experts with an adapter only on GPUs",
}
"""What vLLM's CPU build cannot sample, or samples otherwise than transformers computes."""

EVERY_DAY = {
    *((family, "vllm", "cepo, LoRA") for family in ("qwen3_5", "qwen2_5_vl", "qwen3")),
    *((family, "transformers", "cepo, full") for family in ("gemma3", "qwen3")),
    *(("qwen3_vl_moe", "vllm", "grpo, full"), ("qwen3_5_moe", "transformers", "grpo, LoRA")),
}
"""Experts, linear attention, another vision tower, and text alone; most runs of these tests train Qwen3-VL with either engine."""
ONE_MORE = pytest.mark.nightly("each is one more engine and run of seconds")
RUNS = [
    pytest.param(*each, marks=() if each in {*REFUSED, *EVERY_DAY} else ONE_MORE)
    for family in FAMILIES
    for each in (
        (family, "vllm", "cepo, LoRA"),
        (family, "vllm", "grpo, full"),
        # The transformers engine calls the model that is trained; a few families are enough where vLLM serves the others.
        *([(family, "transformers", "cepo, full")] if family in ("qwen3", "qwen3_vl", "gemma3") else []),
        # Adapters of the others are those that vLLM samples with.
        *([(family, "transformers", "grpo, LoRA")] if (family, "vllm", "cepo, LoRA") in REFUSED else []),
    )
]


@pytest.mark.heavy
@pytest.mark.parametrize(("family", "engine", "setting"), RUNS)
def test_two_steps_train_and_the_engine_gets_the_weights(
    family: str,
    engine: str,
    setting: str,
    checkpoint: Checkpoint,
    train: Train,
    tmp_path: Path,
    record_property: Record,
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    method, weights = setting.split(", ")
    reward = tmp_path / "reward.py"
    reward.write_text(ALTERNATING, encoding="utf-8")
    in_bf16 = engine == "vllm" and family in ONE_TYPE_ON_A_CPU
    arguments = [
        f"worker.reward.reward_function={reward}:alternating",
        f"worker.actor.model.model_path={checkpoint(family)}",
        f"worker.rollout.name={engine}",
        f"worker.rollout.dtype={'bf16' if in_bf16 else 'fp32'}",
        "worker.rollout.n=2",
        "data.rollout_batch_size=2",
        "data.max_response_length=6",
        "data.max_prompt_length=1024",
        EVERY_WRONG_ROLLOUT_TEACHES,
        f"algorithm.adv_estimator={method}",
        f"worker.actor.model.lora.rank={8 if weights == 'LoRA' else 0}",
    ]
    if family in TEXT_FAMILIES:
        sums = [{"problem": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(8)]
        rows = tmp_path / "sums.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in sums))
        arguments += [f"data.train_files={rows}", f"data.val_files={rows}", "trainer.val_before_train=true"]
    refusal = REFUSED.get((family, engine, setting))
    if in_bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        refusal = "which this processor lacks"
    if refusal is not None:
        with pytest.raises(ConfigError, match=refusal):
            train(*arguments)
        return
    finished = train(*arguments)
    assert finished.metrics[0].get("val/num_samples") == (8 if family in TEXT_FAMILIES else None)
    assert len(finished.steps) == 2
    for metrics in finished.steps:
        record_property(f"{engine}, {setting}", metrics["rollout/log_prob_gap_max"])
        if in_bf16:
            assert metrics["rollout/log_prob_gap_mean"] < 0.15
        else:
            assert metrics["rollout/log_prob_gap_max"] < 1e-3
        if family in TEXT_FAMILIES:
            assert metrics["rollout/log_prob_gap_mean"] < 1e-4
        assert metrics["actor/skipped_updates"] == 0
        assert metrics["actor/grad_norm"] > 0
        assert (metrics.get("work/teacher_rows", 0) > 0) == (method == "cepo")
    # What vLLM finds out about a model in another process, which takes 10 s to start, it keeps here.
    assert not (Path(os.environ["XDG_CACHE_HOME"]) / "vllm" / "modelinfos").exists()


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_folder_has_the_checkpoints_names_and_shapes(
    family: str, checkpoint: Checkpoint, build_actor: BuildActor, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    actor = build_actor(folder=folder)
    save_state(actor, tmp_path / "step")
    merge_checkpoint(tmp_path / "step", tmp_path / "merged", BaseModel(path=str(folder)))
    merged, base = (load_file(each / "model.safetensors") for each in (tmp_path / "merged", folder))
    assert merged.keys() == base.keys()
    assert differing(merged, base) == []
