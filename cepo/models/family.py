"""What differs between model families: loading, decoder layers, the vision tower's output, the number of position axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cepo.errors import ConfigError, EngineError
from cepo.models.cpu_torch import repair_this_process_and_its_children
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
        EngineError: the checkpoint's architecture is neither a vision-language nor a causal language model.
    """
    repair_this_process_and_its_children()
    import transformers

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
    except (OSError, ValueError) as error:
        raise EngineError(f"the weights of '{path}' cannot be loaded: {error}") from error


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


def sharded_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that FSDP gathers one at a time: decoder layers and vision blocks."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def freeze_vision_tower(model: Any, *, section: str = "worker.actor.model") -> None:
    """Excludes the vision tower, merger included, from training. `section` names the settings in the error."""
    tower = getattr(model.model, "visual", None)
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


def encode_images(model: Any, pixel_values: Tensor, grid_thw: Tensor, order: Sequence[int]) -> dict[str, Any]:
    """Runs the vision tower once per distinct picture and lays its features out in the order the rows need them.

    Args:
        pixel_values: patches of the distinct pictures, concatenated.
        grid_thw: (distinct pictures, 3).
        order: for each picture in the batch, row by row, its index among the distinct ones.

    Returns:
        The keyword argument of the model's forward pass.
    """
    output = model.model.get_image_features(pixel_values, grid_thw, return_dict=True)
    output.pooler_output = tuple(output.pooler_output[index] for index in order)
    output.deepstack_features = [tuple(level[index] for index in order) for level in output.deepstack_features]
    return {"mm_encoder_outputs": {"image": output}}
