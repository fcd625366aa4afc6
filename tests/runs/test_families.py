"""Every supported model family is scored and trained as plain transformers computes it, on both engines; EasyR1's scripts."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import differing
from config_arguments import LORA_SCRIPT, easyr1s_file
from generator_cases import picture
from json_files import read_lines, write_lines
from PIL import Image
from rounding import GRADIENTS, ORDERS, moved_by_one_unit
from safetensors.torch import load_file
from tiny_checkpoints import FAMILIES, TEXT_FAMILIES, VISION_FAMILIES, write_checkpoint
from torch import Tensor
from training_runs import (
    EVERY_WRONG_ROLLOUT_TEACHES,
    REWARD_FUNCTIONS,
    BuildActor,
    FinishedRun,
    Train,
    encoded,
    largest_gap,
    random_response,
    run,
    whole,
)

from cepo.data.batch import ScoringRow, token_array
from cepo.errors import ConfigError
from cepo.models.families import FAMILIES as SUPPORTED
from cepo.models.families import family_of
from cepo.models.pretrained import quantised_weights
from cepo.models.processing import Processing
from cepo.workers.checkpoint import save_state
from cepo.workers.merged_model import BaseModel, merge_checkpoint
from cepo.workers.scoring_model import collate
from cepo.workers.training import CompensatedAdamW

Checkpoint = Callable[[str], Path]
LogProbRounding = Callable[[str], float]
Record = Callable[[str, object], None]
"""pytest's `record_property`: the figures of lab/notes/models.md are in the report that `--junitxml` writes."""


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
        model = plain_model(folder, family)
        rows = rows_of(family, Processing(str(folder)))
        log_probs = torch.no_grad()(functools.partial(expected_log_probs, model, folder, family, rows))
        return ORDERS * moved_by_one_unit(log_probs, model.parameters())

    return measured


def sums(folder: Path) -> Path:
    """A file of 8 problems of text alone, in the columns of EasyR1's math data."""
    rows = [{"problem": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(8)]
    return write_lines(folder / "sums.jsonl", rows)


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
        ScoringRow(context=context, response_ids=token_array(random_response(length, seed=length)), prompt=number)
        for number, context in enumerate(contexts)
        for length in (5, 9)
    ]


def plain_inputs(folder: Path, text: str, images: list[Image.Image]) -> dict[str, Tensor]:
    """What transformers' own processor makes of a user turn."""
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder)
    content: Any = text
    if hasattr(processor, "image_processor"):
        content = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": text})
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template([{"role": "user", "content": content}], **options)


def plain_model(folder: Path, family: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForCausalLM if family in TEXT_FAMILIES else AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def expected_log_probs(model: Any, folder: Path, family: str, rows: list[ScoringRow]) -> list[Tensor]:
    """By the model's own pass over each row of `rows_of` alone, whose prompts have the tokens of transformers' processor."""
    expected: list[Tensor] = []
    for (text, images), start in zip(prompts_of(family), range(0, len(rows), 2), strict=True):
        prompt = dict(plain_inputs(folder, text, images))
        ids = prompt["input_ids"]
        for row in rows[start : start + 2]:
            assert list(row.context.token_ids) == ids[0].tolist()
            response = torch.tensor(row.response_ids)[None]
            inputs = prompt | {"input_ids": torch.cat([ids, response], dim=1)}
            for name in {"attention_mask", "mm_token_type_ids", "token_type_ids"} & set(prompt):
                of_response = torch.full_like(response, int(name == "attention_mask"))
                inputs[name] = torch.cat([prompt[name], of_response], dim=1)
            logits = model(**inputs).logits[0, ids.shape[1] - 1 : -1]
            log_probs = logits.log_softmax(dim=1)
            expected.append(log_probs.gather(1, response.T)[:, 0])
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
    sum(weight * row_log_probs.sum() for weight, row_log_probs in zip(weights, expected, strict=True)).backward()
    batch = collate(rows, processing=processing, device=torch.device("cpu"))
    log_probs = actor.module(batch)[0].split([len(row.response_ids) for row in rows])
    for name, of_rows in (("log_probs", expected), ("packed", log_probs)):
        gap = largest_gap(scores, [row_log_probs.detach() for row_log_probs in of_rows])
        record_property(name, gap)
        assert gap < log_prob_rounding(family)
    sum(weight * row_log_probs.sum() for weight, row_log_probs in zip(weights, log_probs, strict=True)).backward()
    known = dict(model.named_parameters())
    squares = 0.0
    length = 0.0
    tower_is_reached = False
    for name, parameter in actor.module.model.named_parameters():
        gradient = known[name].grad
        actors_gradient = parameter.grad
        assert (gradient is None) == (actors_gradient is None), name
        if gradient is not None:
            squares += float((whole(actors_gradient) - gradient).double().square().sum())
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
    changed = differing(model.state_dict(), {name: weights[name] for name in model.state_dict()})
    assert len(changed) == len(quantised_weights(actor.module)) > 0
    vision = family_of(model.config).vision_parts(actor.module.base)
    assert not any(quantised_weights(part) for part in vision)
    model.load_state_dict(weights)
    expected = [row_log_probs.detach() for row_log_probs in expected_log_probs(model, folder, family, rows)]
    assert largest_gap(actor.score(rows), expected) < log_prob_rounding(family)


ONE_TYPE_ON_A_CPU = ("qwen3_5", "qwen3_5_moe")
"""vLLM's CPU build computes linear attention in bf16 alone, so that the trainer's float32 differs by its rounding."""

REFUSED = {
    ("gemma3", "vllm", "cepo, LoRA"): "masks later tokens of the same image",
    ("gemma3", "vllm", "grpo, full"): "masks later tokens of the same image",
    ("gemma4_large", "vllm", "cepo, LoRA"): "masks later tokens of the same image",
    ("gemma4_large", "vllm", "grpo, full"): "masks later tokens of the same image",
    ("gemma4_moe", "vllm", "cepo, LoRA"): "masks later tokens of the same image",
    ("gemma4_moe", "vllm", "grpo, full"): "masks later tokens of the same image",
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


def runs_of(family: str) -> Iterator[tuple[str, str, str]]:
    yield family, "vllm", "cepo, LoRA"
    yield family, "vllm", "grpo, full"
    # The transformers engine calls the model that is trained; a few families are enough where vLLM serves the others.
    if family in ("qwen3", "qwen3_vl", "gemma3", "gemma4_large"):
        yield family, "transformers", "cepo, full"
    # Adapters of the others are those that vLLM samples with.
    if (family, "vllm", "cepo, LoRA") in REFUSED:
        yield family, "transformers", "grpo, LoRA"


RUNS = [
    pytest.param(*run, marks=() if run in {*REFUSED, *EVERY_DAY} else ONE_MORE)
    for family in FAMILIES
    for run in runs_of(family)
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
    in_bf16 = engine == "vllm" and family in ONE_TYPE_ON_A_CPU
    arguments = [
        f"worker.reward.reward_function={REWARD_FUNCTIONS}:every_second",
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
        rows = sums(tmp_path)
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
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(folder / "model.safetensors")
    assert differing(merged, base) == []


@pytest.fixture
def run_of(tmp_path: Path, problem_file: Path, parity_reward: str) -> Train:
    """Trains with EasyR1's configuration and overrides, on data, a model and sizes of ours."""

    def run_of(model: Path, theirs: list[str], *further: str, data: Path = problem_file) -> FinishedRun:
        ours = [
            "data.max_response_length=8",
            "data.rollout_batch_size=2",
            f"data.train_files={data}",
            f"data.val_files={data}",
            f"worker.actor.model.model_path={model}",
            "worker.actor.global_batch_size=2",
            f"worker.reward.reward_function={parity_reward}",
            "worker.rollout.name=transformers",
            "worker.rollout.disable_tqdm=true",
            "trainer.logger=[file]",
            "trainer.n_gpus_per_node=1",
            "trainer.max_steps=1",
        ]
        return run([easyr1s_file(tmp_path), *theirs, *ours, *further], folder=tmp_path / "run")

    return run_of


@pytest.mark.heavy
def test_easyr1s_config_with_its_lora_overrides_trains_a_step(tiny_model_folder: Path, run_of: Train) -> None:
    """The step has 10 responses."""
    done = run_of(tiny_model_folder, LORA_SCRIPT)
    trained = [line for line in done.metrics if "actor/lr" in line]
    assert [line["actor/lr"] for line in trained] == [1e-5]
    assert trained[0]["actor/kl_loss"] >= 0
    # 512 x 512 pixels, to which EasyR1 enlarges a small figure, are 256 tokens of 32 x 32.
    assert trained[0]["prompt_length/mean"] > 256
    adapter = done.folder / "global_step_1" / "actor" / "lora_adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    assert settings["r"] == 64
    assert settings["lora_alpha"] == 64
    assert len(read_lines(done.folder / "generations.jsonl")) == 2 * 3, "before and after the step, 3 responses"


IN_BF16 = ["worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16"]
LORA = ["worker.actor.model.lora.rank=64", "worker.actor.model.lora.alpha=64", "worker.actor.optim.lr=1e-5"]
SECOND = pytest.mark.nightly("settings of the 7B or the 32B script")
SCRIPTS = [
    pytest.param("qwen2_5_vl", [], marks=SECOND, id="qwen2_5_vl_3b_geo3k_grpo"),
    pytest.param("qwen2_5_vl", ["worker.actor.loss_type=cispo"], id="qwen2_5_vl_7b_geo3k_cispo"),
    pytest.param("qwen2_5_vl", IN_BF16, id="qwen2_5_vl_32b_geo3k_grpo"),
    pytest.param("qwen3_vl_moe", IN_BF16, marks=SECOND, id="qwen3_vl_30b_geo3k_grpo"),
    pytest.param("qwen2", [], id="qwen2_5_7b_math_grpo"),
    pytest.param("qwen3", LORA, id="qwen3_4b_math_grpo_lora"),
]
"""EasyR1's scripts: the family of the model that each names, and what it overrides beside data, model, lengths and devices.

From examples/ of hiyouga/EasyR1 (Apache-2.0), read on 2026-11-22."""


@pytest.mark.heavy
@pytest.mark.parametrize(("family", "overrides"), SCRIPTS)
def test_easyr1s_script_trains_two_steps_with_its_family(
    family: str, overrides: list[str], run_of: Train, checkpoint: Checkpoint, tmp_path: Path, problem_file: Path
) -> None:
    data = problem_file if family in VISION_FAMILIES else sums(tmp_path)
    further = ["data.max_prompt_length=1024", "data.max_response_length=4", "worker.rollout.n=2"]
    further += ["worker.rollout.tensor_parallel_size=1", "trainer.val_before_train=false", "trainer.val_freq=-1"]
    done = run_of(checkpoint(family), overrides, *further, "trainer.max_steps=2", data=data)
    assert len(done.steps) == 2
    assert all(line["actor/kl_loss"] >= 0 for line in done.steps)
    if overrides == IN_BF16:
        assert isinstance(done.actor.optimizer, CompensatedAdamW)
        assert {parameter.dtype for parameter in done.parameters.values()} == {torch.bfloat16}
    assert all(line["rollout/log_prob_gap_mean"] < 0.2 for line in done.steps if "rollout/log_prob_gap_mean" in line)
