"""Supports text models whose logits are a plain LM head on the last hidden state; an unlisted one is tested first."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from cepo.errors import ConfigError
from cepo.models.families.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Qwen3(Family):
    title = "Qwen3"
    model_types = ("qwen3",)
    fused_decoding = True


class TextModel(Family):
    """Supports causal language models of transformers that do not scale or cap their logits."""

    title = "Qwen2, Qwen2.5, Llama, Mistral, SmolLM3, OLMo 2, Phi-3"
    model_types = ("qwen2", "llama", "mistral", "smollm3", "olmo2", "phi3")


class TextMoe(Family):
    title = "Qwen2-MoE, Qwen3-MoE"
    model_types = ("qwen2_moe", "qwen3_moe")
    has_experts = True


class UntriedText(Family):
    title = "text model"
    model_types = ()


LARGEST_GAP = 1e-5
"""The largest accepted gap in nats between the model's own float32 log-probs and those of a plain head."""

_LAYERS, _VOCABULARY, _TOKENS = 2, 1024, 8


def plain_head_gap(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> float:
    """Returns the largest gap between the log-probs of a plain head and those of the model's own forward pass.

    The model has two layers, a small vocabulary and random weights. A gap reveals scaled or capped logits, or a last
    layer that is not the head.

    Raises:
        ConfigError: such a model cannot be built or run.
    """
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = min(_LAYERS, small.num_hidden_layers), _VOCABULARY
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    if getattr(small, "layer_types", None):  # only some configurations list their layers
        small.layer_types = small.layer_types[: small.num_hidden_layers]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(
                small, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=trust_remote_code
            ).eval()
            inputs = {"input_ids": torch.arange(_TOKENS)[None], "position_ids": torch.arange(_TOKENS)[None]}
            own = model(**inputs, use_cache=False).logits.log_softmax(-1)
            plain = model.lm_head(model.model(**inputs, use_cache=False).last_hidden_state).log_softmax(-1)
    except (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError, ImportError) as error:
        raise ConfigError(
            f"a tiny model of this architecture cannot be run: {type(error).__name__}: {error}"
        ) from error
    return float((own - plain).abs().max())
