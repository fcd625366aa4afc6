"""Adapters on a base in 4 bits (QLoRA) and with trained magnitudes (DoRA), held to plain transformers, bitsandbytes and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_cases import reference_model
from rounding import LOG_PROBS
from safetensors.torch import load_file
from training_runs import BuildActor, FinishedRun, Train, largest_gap, reference_log_probs, whole
from transformers import BitsAndBytesConfig, Qwen3VLForConditionalGeneration

from cepo.commands.cli import main
from cepo.data.batch import ScoringRow
from cepo.errors import ConfigError
from cepo.models import pretrained
from cepo.models.pretrained import quantised_weights
from cepo.rollout.generator import FullWeights
from cepo.workers.batching import RankPass, forest_of
from cepo.workers.memory import BYTES_IN_4_BITS

pytestmark = pytest.mark.heavy

ADAPTER = [
    "worker.actor.model.lora.rank=4",
    "worker.actor.model.lora.alpha=8",
    "worker.actor.optim.lr=1e-2",
    "worker.actor.fsdp.mp_param_dtype=fp32",
    "worker.rollout.dtype=fp32",
    "worker.rollout.name=auto",
    "worker.rollout.enforce_eager=true",
    "algorithm.disable_kl=false",
]
KINDS = {"qlora": "worker.actor.model.lora.quantization=nf4", "dora": "worker.actor.model.lora.use_dora=true"}


@pytest.fixture(params=KINDS)
def trained(request: pytest.FixtureRequest, once: Train) -> tuple[str, FinishedRun]:
    """The kind, and a run of two steps with the engine that `auto` chooses: vLLM, where it is installed."""
    return request.param, once(*ADAPTER, KINDS[request.param])


def adapter_of(done: FinishedRun) -> Path:
    return done.folder / "global_step_2" / "actor" / "lora_adapter"


def merged(done: FinishedRun, folder: Path) -> Path:
    checkpoint = str(done.folder / "global_step_2")
    assert main(["merge", "--checkpoint", checkpoint, "--out", str(folder), "--dtype", "fp32"]) == 0
    return folder


def plain_base(folder: Path, **settings: Any) -> Any:
    """transformers with bitsandbytes, as the checkpoint's reader would load it."""
    usual: dict[str, Any] = {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", "model.visual"]}
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**(usual | settings))
    ).eval()
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # on such a CPU bitsandbytes rounds activations to bf16
    return model


def test_an_adapters_checkpoint_scores_as_plain_peft_does(
    trained: tuple[str, FinishedRun], tiny_model_folder: Path, rows: list[ScoringRow]
) -> None:
    from peft import PeftModel

    kind, done = trained
    if kind == "qlora":
        base = plain_base(tiny_model_folder, **json.loads((adapter_of(done) / "quantization_config.json").read_text()))
    else:
        base = reference_model(tiny_model_folder)
    without = reference_log_probs(base, rows)
    assert largest_gap(done.actor.score_initial(rows), without) < LOG_PROBS
    with_adapter = reference_log_probs(PeftModel.from_pretrained(base, adapter_of(done)).eval(), rows)
    assert largest_gap(done.actor.score(rows), with_adapter) < LOG_PROBS
    assert largest_gap(without, with_adapter) > 0.01


def test_only_the_adapter_is_trained_and_the_engine_follows(trained: tuple[str, FinishedRun]) -> None:
    """4 layers have 7 linear ones, each with A and B and, under DoRA, a magnitude that began as the norm of each row."""
    kind, done = trained
    packed = quantised_weights(done.actor.module)
    assert len(packed) == (28 if kind == "qlora" else 0)
    assert all(".language_model.layers." in name and weight.dtype is torch.uint8 for name, weight in packed.items())
    assert all(".lora_" in name for name in done.parameters)
    assert len(done.parameters) == (2 if kind == "qlora" else 3) * 28
    base = done.actor.module.state_dict()
    for name, weight in done.parameters.items():
        layer, is_magnitude, _ = name.partition("lora_magnitude_vector")
        start = torch.linalg.norm(whole(base[f"{layer}base_layer.weight"]), dim=1) if is_magnitude else 0.0
        assert float((weight - start).abs().max()) > 1e-3, name  # B began as 0
    assert [row["rollout/log_prob_gap_max"] < 1e-4 for row in done.metrics] == [True, True]


@pytest.mark.parametrize("double", [True, False])
def test_packed_weights_take_the_bytes_that_are_estimated(tiny_model_folder: Path, double: bool) -> None:
    base = plain_base(tiny_model_folder, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    packed: list[Any] = list(quantised_weights(base).values())
    held = [weight.data for weight in packed] + [weight.quant_state.absmax for weight in packed]
    held += [weight.quant_state.state2.absmax for weight in packed if double]
    estimated = BYTES_IN_4_BITS * sum(weight.quant_state.shape.numel() for weight in packed)
    stored = sum(tensor.nbytes for tensor in held)
    if double:  # a scale takes one byte instead of four
        assert 0.9 * estimated < stored < estimated
    else:
        assert stored == pytest.approx(estimated, rel=1e-3)


@pytest.mark.parametrize("dora", ["false", "true"])
def test_an_fp4_base_is_served_whole_and_only_its_adapter_learns(
    build_actor: BuildActor, tiny_model_folder: Path, rows: list[ScoringRow], dora: str
) -> None:
    """An untrained adapter changes nothing: trainer and engine score as the base, and so does a pass with gradient."""
    lora = {"rank": 4, "quantization": "fp4", "double_quantization": "false", "use_dora": dora}
    actor = build_actor(**{f"model__lora__{name}": value for name, value in lora.items()})
    weights = actor.rollout_weights()
    assert isinstance(weights, FullWeights)
    base = plain_base(tiny_model_folder, bnb_4bit_quant_type="fp4")
    for served in (base, reference_model(tiny_model_folder, weights.tensors)):
        assert largest_gap(actor.score(rows), reference_log_probs(served, rows)) < LOG_PROBS
    scores = torch.cat(actor.score(rows))
    whole = RankPass(indices=[*range(len(rows))], rows=rows, forest=forest_of(rows, actor._processing))
    log_probs = actor.module.train()(actor.collate(whole)).log_probs
    torch.testing.assert_close(log_probs.detach(), scores, rtol=0, atol=LOG_PROBS)
    log_probs.sum().backward()
    gradients = {name for name, weight in actor.module.named_parameters() if weight.grad is not None}
    assert gradients == {name for name, _ in actor.module.named_parameters() if ".lora_" in name}


def test_a_merged_adapters_folder_computes_what_was_trained(
    trained: tuple[str, FinishedRun], tiny_model_folder: Path, rows: list[ScoringRow], tmp_path: Path
) -> None:
    kind, done = trained
    out = merged(done, tmp_path / "merged")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    scores = done.actor.score(rows)
    assert largest_gap(scores, reference_log_probs(reference_model(out), rows)) < LOG_PROBS
    written = load_file(out / "model.safetensors")
    base = load_file(tiny_model_folder / "model.safetensors")
    assert set(written) == set(base)
    assert sum(not torch.equal(written[name], base[name]) for name in base) == 28
    if kind == "qlora":
        settings = adapter_of(done) / "quantization_config.json"
        settings.rename(tmp_path / "aside.json")
        merged_without_settings = merged(done, tmp_path / "other")
        (tmp_path / "aside.json").rename(settings)
        assert largest_gap(scores, reference_log_probs(reference_model(merged_without_settings), rows)) > 0.01


def test_a_checkpoint_that_is_quantised_already_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    plain_base(tiny_model_folder).save_pretrained(tmp_path / "packed")
    with pytest.raises(ConfigError, match="holds quantised weights, which cannot be trained"):
        pretrained.load_model(
            str(tmp_path / "packed"), dtype=torch.float32, trust_remote_code=False, override_config={}
        )
