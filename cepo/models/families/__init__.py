"""Finds the model family of a checkpoint by its `model_type`. Only this package distinguishes families."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cepo.errors import ConfigError
from cepo.models.families.family import EngineUse, Family, ImageFeatures, ImageReader
from cepo.models.families.processed import Gemma3, InternVL, LlavaOneVision, SmolVLM
from cepo.models.families.qwen import Qwen2VL, Qwen3VL, Qwen3VLMoe, Qwen25VL, Qwen35, Qwen35Moe
from cepo.models.families.text import LARGEST_GAP, Qwen3, TextModel, TextMoe, UntriedText, plain_head_gap

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

__all__ = ["FAMILIES", "EngineUse", "Family", "ImageFeatures", "ImageReader", "family_of"]

FAMILIES: tuple[Family, ...] = (
    *(Qwen2VL(), Qwen25VL(), Qwen3VL(), Qwen3VLMoe(), Qwen35(), Qwen35Moe()),
    *(InternVL(), SmolVLM(), Gemma3(), LlavaOneVision()),
    *(Qwen3(), TextModel(), TextMoe()),
)
"""All supported families, in the order of the table in docs/models.md."""

_BY_TYPE: dict[str, Family] = {model_type: family for family in FAMILIES for model_type in family.model_types}


def family_of(
    config: PreTrainedConfig, *, section: str = "worker.actor.model", trust_remote_code: bool = False
) -> Family:
    """Returns the family of a transformers configuration. An unlisted text model is tested once per process.

    Args:
        section: the settings that the error names.
        trust_remote_code: whether Python code from the checkpoint may run.

    Raises:
        ConfigError: the architecture is not supported; the message names those that are.
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
                _BY_TYPE[config.model_type] = UntriedText()
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
