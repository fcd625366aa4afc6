"""QLoRA: an adapter trained on a base in 4 bits, held to plain transformers with bitsandbytes and PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import LOG_PROBS
from safetensors.torch import load_file
from torch import Tensor
from training_runs import (
    FinishedRun,
    encoded,
    largest_gap,
    picture,
    random_response,
    reference_log_probs,
    reference_model,
    run,
)
from transformers import BitsAndBytesConfig, Qwen3VLForConditionalGeneration

from cepo.cli import main
from cepo.data.batch import ScoringRow
from cepo.errors import ConfigError
from cepo.models import pretrained
from cepo.models.processing import Processing
from cepo.models.quantization import dequantised, quantised_weights
from cepo.rollout.generator import FullWeights
from cepo.sizing import bytes_in_4_bits
from cepo.workers.actor import Actor
from cepo.workers.passes import RankPass

pytestmark = pytest.mark.heavy

QLORA = [
    "worker.actor.model.lora.rank=4",
    "worker.actor.model.lora.alpha=8",
    "worker.actor.model.lora.quantization=nf4",
    "worker.actor.optim.lr=1e-2",
    "worker.actor.fsdp.mp_param_dtype=fp32",
    "worker.rollout.dtype=fp32",
]
BuildActor = Callable[..., Actor]


@pytest.fixture(scope="module")
def trained(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two steps of cepo with the engine that `auto` chooses: vLLM, where it is installed."""
    options = [*QLORA, "worker.rollout.name=auto", "worker.rollout.enforce_eager=true", "algorithm.disable_kl=false"]
    return run(tiny_run, *options, folder=tmp_path_factory.mktemp("qlora"))


@pytest.fixture
def rows(tiny_processing: Processing) -> list[ScoringRow]:
    """Two responses behind a picture, and one behind text alone."""
    figure, text = (
        encoded(tiny_processing, "What is the angle?", picture(3)),
        encoded(tiny_processing, "What is 2 + 3?"),
    )
    return [
        ScoringRow(context=context, response_ids=random_response(length, seed=length))
        for context, length in ((figure, 12), (figure, 5), (text, 9))
    ]


def plain_base(folder: Path, settings: BitsAndBytesConfig) -> Any:
    """transformers with bitsandbytes, as the checkpoint's reader would load it."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, quantization_config=settings
    ).eval()
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # on such a CPU bitsandbytes rounds activations to bf16
    return model


def expected(model: Any, rows: list[ScoringRow]) -> list[Tensor]:
    return [reference_log_probs(model, row, model.config.image_token_id) for row in rows]


def test_a_qlora_checkpoint_scores_as_plain_peft_does(
    trained: FinishedRun, tiny_model_folder: Path, rows: list[ScoringRow]
) -> None:
    from peft import PeftModel

    adapter = trained.folder / "global_step_2" / "actor" / "lora_adapter"
    settings = json.loads((adapter / "quantization_config.json").read_text())
    base = plain_base(tiny_model_folder, BitsAndBytesConfig(**settings))
    without = expected(base, rows)
    assert largest_gap(trained.actor.score(rows, as_reference=True), without) < LOG_PROBS
    with_adapter = expected(PeftModel.from_pretrained(base, adapter).eval(), rows)
    assert largest_gap(trained.actor.score(rows), with_adapter) < LOG_PROBS
    assert largest_gap(without, with_adapter) > 0.01
    assert largest_gap(without, expected(reference_model(tiny_model_folder), rows)) > 0.01


def test_only_the_adapter_is_trained_and_the_engine_follows(
    trained: FinishedRun,
) -> None:
    packed = quantised_weights(trained.actor.module)
    assert len(packed) == 28  # 4 layers with 7 linear ones
    assert all(".language_model.layers." in name and weight.dtype is torch.uint8 for name, weight in packed.items())
    assert all(".lora_" in name for name in trained.parameters)
    assert len(trained.parameters) == 2 * 28
    assert all(float(weight.abs().max()) > 1e-3 for weight in trained.parameters.values())  # B began as 0
    assert [row["rollout/log_prob_gap_max"] < 1e-4 for row in trained.metrics] == [True, True]


def test_a_pass_with_gradient_scores_as_one_without(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    actor = build_actor(model__lora__rank=4, model__lora__quantization="nf4")
    scores = torch.cat(actor.score(rows))
    log_probs, _ = actor.module.train()(actor.passes.collate(RankPass(indices=[*range(len(rows))], rows=list(rows))))
    torch.testing.assert_close(log_probs.detach(), scores, rtol=0, atol=LOG_PROBS)
    log_probs.sum().backward()
    gradients = {name for name, weight in actor.module.named_parameters() if weight.grad is not None}
    assert gradients == {name for name, _ in actor.module.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize("double", [True, False])
def test_packed_weights_take_the_bytes_that_are_estimated(tiny_model_folder: Path, double: bool) -> None:
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        llm_int8_skip_modules=["lm_head", "model.visual"],
    )
    packed: list[Any] = list(quantised_weights(plain_base(tiny_model_folder, settings)).values())
    held = [weight.data for weight in packed] + [weight.quant_state.absmax for weight in packed]
    held += [weight.quant_state.state2.absmax for weight in packed if double]
    counted = bytes_in_4_bits(double_quantization=double) * sum(weight.quant_state.shape.numel() for weight in packed)
    assert sum(tensor.nbytes for tensor in held) == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("dora", ["false", "true"])
def test_an_untrained_engine_gets_the_dequantised_weights(
    build_actor: BuildActor, tiny_model_folder: Path, dora: str
) -> None:
    lora = {"rank": 4, "quantization": "fp4", "double_quantization": "false", "use_dora": dora}
    actor = build_actor(**{f"model__lora__{name}": value for name, value in lora.items()})
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", llm_int8_skip_modules=["lm_head", "model.visual"]
    )
    base = plain_base(tiny_model_folder, settings)
    plain = {name: tensor for name, tensor in base.named_parameters() if name not in quantised_weights(base)}
    plain |= {name: dequantised(weight) for name, weight in quantised_weights(base).items()}
    weights = actor.rollout_weights()
    assert isinstance(weights, FullWeights)
    assert (
        set(weights.tensors) - {"lm_head.weight"}
        == set(plain)
        == set(load_file(tiny_model_folder / "model.safetensors"))
    )
    for name, tensor in plain.items():
        torch.testing.assert_close(weights.tensors[name], tensor.detach(), rtol=0, atol=1e-6)


def test_a_merged_qlora_folder_computes_what_was_trained(
    trained: FinishedRun, tiny_model_folder: Path, rows: list[ScoringRow], tmp_path: Path
) -> None:
    checkpoint = trained.folder / "global_step_2"
    assert main(["merge", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "merged"), "--dtype", "fp32"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    scores = trained.actor.score(rows)
    assert largest_gap(scores, expected(reference_model(tmp_path / "merged"), rows)) < LOG_PROBS
    written = load_file(tmp_path / "merged" / "model.safetensors")
    weights = trained.actor.rollout_weights()
    for name, tensor in written.items():
        torch.testing.assert_close(weights.tensors[name], tensor, rtol=0, atol=1e-6)
    (checkpoint / "actor" / "lora_adapter" / "quantization_config.json").rename(tmp_path / "aside.json")
    try:
        assert (
            main(["merge", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "other"), "--dtype", "fp32"]) == 0
        )
    finally:
        (tmp_path / "aside.json").rename(checkpoint / "actor" / "lora_adapter" / "quantization_config.json")
    assert largest_gap(scores, expected(reference_model(tmp_path / "other"), rows)) > 0.01


def test_a_checkpoint_that_is_quantised_already_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    settings = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "model.visual"])
    plain_base(tiny_model_folder, settings).save_pretrained(tmp_path / "packed")
    with pytest.raises(ConfigError, match="holds quantised weights, which cannot be trained"):
        pretrained.load_model(
            str(tmp_path / "packed"), dtype=torch.float32, trust_remote_code=False, override_config={}
        )
