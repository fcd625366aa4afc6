"""Finds the model family of a checkpoint by its `model_type`. Only this package distinguishes families."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from cepo.errors import ConfigError
from cepo.models.families.processed import Gemma3, LlavaOneVision, ProcessedFamily
from cepo.models.families.qwen import GridFamily, Qwen3VLMoe, Qwen35
from cepo.models.inputs import Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

_TOWER = ("vision_tower", "multi_modal_projector")

FAMILIES: tuple[Family, ...] = (
    GridFamily(title="Qwen2-VL", model_types=("qwen2_vl",)),
    GridFamily(title="Qwen2.5-VL", model_types=("qwen2_5_vl",)),
    GridFamily(title="Qwen3-VL", model_types=("qwen3_vl",), reads_videos=True),
    Qwen3VLMoe(title="Qwen3-VL-MoE", model_types=("qwen3_vl_moe",), reads_videos=True, has_experts=True),
    Qwen35(title="Qwen3.5", model_types=("qwen3_5",)),
    Qwen35(title="Qwen3.5-MoE", model_types=("qwen3_5_moe",), has_experts=True),
    # It cuts a large image into tiles of equally many tokens between `<img>` and `</img>`.
    ProcessedFamily(title="InternVL3", model_types=("internvl",), vision_modules=_TOWER),
    # Features are (tiles, tokens per tile, H), which the model merges.
    ProcessedFamily(
        title="SmolVLM2, Idefics3",
        model_types=("smolvlm", "idefics3"),
        vision_modules=("vision_model", "connector"),
    ),
    Gemma3(title="Gemma 3", model_types=("gemma3",), placeholder="boi_token_id", vision_modules=_TOWER, siglip=True),
    LlavaOneVision(
        title="LLaVA-OneVision",
        model_types=("llava_onevision",),
        vision_modules=_TOWER,
        vision_parameters=("image_newline",),
        siglip=True,
    ),
    Family(title="Qwen3", model_types=("qwen3",)),
    Family(
        title="Qwen2, Qwen2.5, Llama, Mistral, SmolLM3, OLMo 2, Phi-3",
        model_types=("qwen2", "llama", "mistral", "smollm3", "olmo2", "phi3"),
    ),
    Family(title="Qwen2-MoE, Qwen3-MoE", model_types=("qwen2_moe", "qwen3_moe"), has_experts=True),
)
"""All supported families, in the order of the table in docs/models.md."""

_BY_TYPE: dict[str, Family] = {model_type: family for family in FAMILIES for model_type in family.model_types}


def family_of(
    config: PreTrainedConfig, *, section: str = "worker.actor.model", trust_remote_code: bool = False
) -> Family:
    """Returns the family of a transformers configuration. An unlisted text model is tested once per process.

    Raises `ConfigError`, which names `section`: the architecture is not supported.
    """
    family = _BY_TYPE.get(config.model_type)
    has_tower = getattr(config, "vision_config", None) is not None  # text models' configurations lack the entry
    if family is not None and family.reads_images == has_tower:
        return family
    reason = "its images are not read here"
    if family is None and not has_tower:
        try:
            gap = plain_head_gap(config, trust_remote_code=trust_remote_code)
        except ConfigError as error:
            reason = str(error)
        else:
            if gap <= LARGEST_GAP:
                _BY_TYPE[config.model_type] = Family(title="text model", model_types=())
                logger.warning(
                    "no test covers model_type '%s'; a tiny model was tried, and its log-probs are correct to %.0e nats",
                    config.model_type,
                    gap,
                )
                return _BY_TYPE[config.model_type]
            reason = f"its log-probs are not those of a plain head on its last layer (they differ by {gap:.1e} nats)"
    # A configuration that was not read from a checkpoint has no architectures.
    architecture = ", ".join(getattr(config, "architectures", None) or ()) or "no named architecture"
    raise ConfigError(
        f"{section}.model_path is a checkpoint of model_type '{config.model_type}' ({architecture}), which is not supported: "
        f"{reason}. Supported are {', '.join(family.title for family in FAMILIES)} (docs/models.md)"
    )


LARGEST_GAP = 1e-5
"""The largest accepted gap in nats between the model's own float32 log-probs and those of a plain head."""


def plain_head_gap(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> float:
    """Returns the largest gap between the log-probs of a plain head and those of the model's own forward pass.

    The model has two layers, a small vocabulary and random weights. A gap reveals scaled or capped logits, or a last
    layer that is not the head. Raises `ConfigError`: such a model cannot be built or run.
    """
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = min(2, small.num_hidden_layers), 1024
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    if getattr(small, "layer_types", None):  # only some configurations list their layers
        small.layer_types = small.layer_types[: small.num_hidden_layers]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(
                small, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=trust_remote_code
            ).eval()
            inputs = {"input_ids": torch.arange(8)[None], "position_ids": torch.arange(8)[None]}
            own = model(**inputs, use_cache=False).logits.log_softmax(-1)
            plain = model.lm_head(model.model(**inputs, use_cache=False).last_hidden_state).log_softmax(-1)
    except (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError, ImportError) as error:
        raise ConfigError(
            f"a tiny model of this architecture cannot be run: {type(error).__name__}: {error}"
        ) from error
    return float((own - plain).abs().max())
