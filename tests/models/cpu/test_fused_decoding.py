"""Decoding with fused weights against the model's own uncached forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import LOG_PROBS
from tiny_checkpoints import write_checkpoint

from cepo.models.cpu import matrix_products
from cepo.models.cpu.fused_decoding import FusedDecoding, fused_decoder
from cepo.models.pretrained import load_model

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}


def text_model(architecture: str = "Qwen3", **changes: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{architecture}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.rand_like(parameter) + 0.5)
        if name.endswith("bias"):
            parameter.copy_(torch.rand_like(parameter) - 0.5)
    return model


def adapted(model: Any) -> Any:
    import peft

    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear")).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    return wrapped.requires_grad_(False)


def last_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0, -1]


@torch.no_grad()
def largest_gap(model: Any) -> float:
    """Over 80 tokens of 5 rows behind prompts of 9, 4 and 6 tokens; rows 1 and 3 end after 30 tokens, row 4 after 50."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in (9, 4, 6)]
    of_row = [0, 0, 1, 2, 2]
    responses = torch.randint(97, (5, 80), generator=generator)
    caches = []
    for prompt in prompts:
        states = model(input_ids=torch.tensor([prompt]), use_cache=True).past_key_values
        caches.append([(layer.keys, layer.values) for layer in states.layers])
    decoder = fused_decoder(model)
    assert decoder is not None
    decoding = FusedDecoding(decoder, caches, of_row)
    rows = [0, 1, 2, 3, 4]
    gap = 0.0
    for step in range(80):
        for last_step, staying in ((30, [0, 2, 4]), (50, [0, 2])):
            if step == last_step:
                decoding.select(torch.tensor([rows.index(row) for row in staying]))
                rows = staying
        positions = torch.tensor([len(prompts[of_row[row]]) + step for row in rows])
        logits = decoding.logits(responses[rows, step], positions)
        for place, row in enumerate(rows):
            whole = prompts[of_row[row]] + responses[row, : step + 1].tolist()
            gap = max(gap, float((logits[place] - last_logits(model, whole)).abs().max()))
    return gap


@pytest.mark.heavy
@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 6}])
def test_fused_logits_of_ragged_prompts_are_the_models(change: dict[str, Any]) -> None:
    assert largest_gap(text_model(**change)) < LOG_PROBS


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}),
        ("Qwen2", {}),
    ],
    ids=["llama", "llama with yarn", "qwen2 with biases"],
)
def test_fused_logits_of_other_architectures_are_the_models(architecture: str, change: dict[str, Any]) -> None:
    """Llama's queries and keys have no norms, and Qwen2's have biases."""
    model = text_model(architecture, **change)
    assert largest_gap(model) < LOG_PROBS


@pytest.mark.heavy
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])
def test_adapters_of_other_architectures_are_in_the_weights(architecture: str) -> None:
    assert largest_gap(adapted(text_model(architecture))) < LOG_PROBS


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "smolvlm", "idefics3", "llava_onevision"])
def test_fused_logits_behind_a_vision_tower_are_the_models(family: str, tmp_path: Path) -> None:
    """Models give their language model different names."""
    model = load_model(
        str(write_checkpoint(family, tmp_path)), dtype=torch.float32, trust_remote_code=False, override_config={}
    )
    assert largest_gap(model.eval().requires_grad_(False)) < LOG_PROBS


@pytest.mark.heavy
def test_fused_logits_by_onednn_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of the decoder is counted as large; the model's own pass keeps PyTorch's."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    plain = text_model("Qwen2")
    wrapped = adapted(text_model("Llama"))
    monkeypatch.setattr(matrix_products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(matrix_products, "_FEWEST_WEIGHTS", 0)
    shapes: list[torch.Size] = []
    by_onednn = matrix_products.by_onednn

    def counted(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        shapes.append(weight.shape)
        return by_onednn(hidden, weight, bias)

    monkeypatch.setattr(matrix_products, "by_onednn", counted)
    assert largest_gap(plain) < LOG_PROBS
    assert largest_gap(wrapped) < LOG_PROBS
    # Each of 80 steps of both has 4 products in each of 3 layers, and the head's.
    assert len(shapes) == 2 * 80 * (4 * 3 + 1)


def test_an_adapter_is_in_the_fused_weights() -> None:
    plain = text_model()
    wrapped = adapted(text_model())
    difference = last_logits(plain, [1, 2, 3]) - last_logits(wrapped, [1, 2, 3])
    assert float(difference.abs().max()) > 1e-2
    assert largest_gap(wrapped) < LOG_PROBS


def test_what_is_not_known_is_left_to_the_models_own_pass() -> None:
    windowed = text_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    for unknown in (
        text_model("Llama", mlp_bias=True),
        text_model("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
        text_model("Olmo2"),
        text_model().bfloat16(),
        text_model(attention_bias=True),
        windowed,
    ):
        assert fused_decoder(unknown) is None
    assert fused_decoder(text_model()) is not None
