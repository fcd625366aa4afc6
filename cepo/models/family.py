"""What differs between model families: loading, decoder layers, the vision tower's output, the number of position axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cepo.errors import ConfigError, EngineError
from cepo.models.processing import ImageInputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of `bf16`, `fp16` or `fp32`."""
    import torch

    return getattr(torch, DTYPE_NAMES[name])


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool,
    override_config: Mapping[str, Any],
    section: str = "worker.actor.model",
    with_weights: bool = True,
) -> nn.Module:
    """The checkpoint's vision-language or text model, with scaled-dot-product attention.

    `section` names the settings in errors. Without weights the parameters are on the meta device and the buffers are real.

    Raises:
        ConfigError: nothing can be loaded from `path`, or `override_config` names an unknown entry.
        EngineError: the checkpoint's architecture is neither a vision-language nor a causal language model, or its weights
            are missing or damaged.
    """
    import transformers
    from safetensors import SafetensorError

    try:
        config: Any = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}.model_path '{path}' cannot be read: {error}") from error
    for key, value in override_config.items():
        if not hasattr(config, key):
            raise ConfigError(f"{section}.override_config.{key}: the model's configuration has no such entry")
        setattr(config, key, value)
    auto: Any = transformers.AutoModelForImageTextToText if is_multimodal(config) else transformers.AutoModelForCausalLM
    options = {"dtype": dtype, "attn_implementation": "sdpa", "trust_remote_code": trust_remote_code}
    try:
        if with_weights:
            return auto.from_pretrained(path, config=config, **options)
        return _without_weights(auto, config, options)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        raise EngineError(
            f"{section}.model_path '{path}': its weights cannot be loaded ({type(error).__name__}: {error}). If a file was cut "
            "short on its way or is damaged, copy or download the folder anew"
        ) from error


def _without_weights(auto: Any, config: Any, options: Mapping[str, Any]) -> nn.Module:
    """Buffers that no checkpoint holds, such as rotary frequencies, are computed where they are made."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = auto.from_config(config, **options)
    model.tie_weights()
    return model


def is_multimodal(config: Any) -> bool:
    """Whether the checkpoint has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def sharded_blocks(model: nn.Module, *, without: nn.Module | None = None) -> list[nn.Module]:
    """The repeated blocks that FSDP gathers one at a time: decoder layers and vision blocks, but those inside `without`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    excluded = set() if without is None else set(without.modules())
    return [module for module in model.modules() if type(module).__name__ in names and module not in excluded]


def freeze_vision_tower(model: Any, *, section: str = "worker.actor.model") -> None:
    """Excludes the vision tower, merger included, from training. `section` names the settings in the error."""
    tower = vision_tower(model)
    if tower is None:
        raise ConfigError(f"{section}.freeze_vision_tower is true, but the model has no vision tower")
    tower.requires_grad_(False)


def smallest_picture(config: Any) -> ImageInputs:
    """A black picture of one image token, for passes that have to run through the vision tower without a picture."""
    import torch

    vision = config.vision_config
    merge = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return ImageInputs(pixel_values=torch.zeros(merge**2, width), grid_thw=torch.tensor([[1, merge, merge]]))


def share_segments(model: Any) -> bool:
    """Lets the language model take packed rows (`cepo.models.segments`); other calls run as before.

    False, and nothing is changed, where a layer is not full causal attention: a token's result would then depend on more
    than the tokens that it sees.
    """
    from transformers import AttentionInterface

    from cepo.models.segments import ATTENTION_NAME, segment_attention

    config = model.get_decoder().config
    kinds = set(getattr(config, "layer_types", None) or ())
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if kinds - {"full_attention"} or sliding:
        return False
    AttentionInterface.register(ATTENTION_NAME, segment_attention)
    config._attn_implementation = ATTENTION_NAME
    return True


@dataclass(frozen=True, kw_only=True)
class PictureFeatures:
    """What the language model takes of one picture.

    Attributes:
        embeddings: (image tokens, H), in place of the placeholders' embeddings.
        levels: (image tokens, H) each, added behind the first decoder layers.
    """

    embeddings: Tensor
    levels: tuple[Tensor, ...]


def picture_features(model: Any, pixel_values: Tensor, grid_thw: Tensor) -> list[PictureFeatures]:
    """Runs the vision tower.

    Args:
        pixel_values: patches of the pictures, concatenated.
        grid_thw: (pictures, 3).
    """
    output = model.model.get_image_features(pixel_values, grid_thw, return_dict=True)
    return [
        PictureFeatures(embeddings=embeddings, levels=tuple(levels))
        for embeddings, *levels in zip(output.pooler_output, *output.deepstack_features, strict=True)
    ]


def picture_inputs(features: Sequence[PictureFeatures], is_frame: Sequence[bool]) -> dict[str, Any]:
    """The pictures, in the order of their placeholders, as the model's forward pass takes them.

    `is_frame` tells those that are part of a video, which have placeholders of their own.
    """
    found: dict[str, Any] = {}
    for kind, wanted in (("image", False), ("video", True)):
        chosen = [one for one, flag in zip(features, is_frame, strict=True) if flag == wanted]
        if chosen:
            found[kind] = SimpleNamespace(
                pooler_output=tuple(one.embeddings for one in chosen),
                deepstack_features=[tuple(level) for level in zip(*(one.levels for one in chosen), strict=True)],
            )
    return {"mm_encoder_outputs": found}


def vision_tower(model: Any) -> nn.Module | None:
    """The vision tower, merger included; None for a text model."""
    return getattr(model.model, "visual", None)


def frozen_vision_tower(model: Any) -> nn.Module | None:
    """The vision tower if none of its weights gets a gradient."""
    tower = vision_tower(model)
    trained = tower is None or any(parameter.requires_grad for parameter in tower.parameters())
    return None if trained else tower
