"""Loads checkpoints, in 4 bits for QLoRA, and prepares them for training: sharded blocks, the vision tower, packed rows."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cepo.config.checks import INSTALL_BITSANDBYTES
from cepo.config.worker_schema import LoraConfig
from cepo.errors import CheckpointError, ConfigError, DataError, EngineError
from cepo.files.safe_files import read_json
from cepo.models.cpu.matrix_products import use_fast_products
from cepo.models.families import family_of
from cepo.models.folder_check import check_model_folder, require_weights
from cepo.models.interface import Family
from cepo.models.patch_embedding import use_linear_patch_embedding
from cepo.models.segments import ATTENTION_NAME, segment_attention

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedConfig

_REPLACED_HEADS = re.compile(r"lm_head\..*|score\..*|v_head\..*|value_head\..*")
"""The heads of language, reward and value models, which the critic replaces by its own."""
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, DTYPE_NAMES[name])


def read_config(path: str, *, trust_remote_code: bool, section: str = "worker.actor.model") -> PreTrainedConfig:
    """Returns the configuration of a model folder or hub name; raises `ConfigError` if none can be read."""
    import transformers

    with unreadable(section, path):
        check_model_folder(path, trusted=trust_remote_code)
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


@contextmanager
def unreadable(section: str, path: str) -> Iterator[None]:
    """Makes every error a `ConfigError`: damaged files make transformers and tokenizers raise almost anything."""
    try:
        yield
    except BaseException as error:
        # A panic of tokenizers, which is written in Rust, is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        lines = str(error).strip().splitlines()
        first_line = lines[0] if lines else type(error).__name__
        raise ConfigError(
            f"{section}.model_path '{path}': no model can be read there ({first_line}); "
            "give a folder with a Hugging Face checkpoint, or a hub name where a hub can be reached"
        ) from error


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool,
    override_config: Mapping[str, object],
    section: str = "worker.actor.model",
    with_weights: bool = True,
    quantization: BitsAndBytesConfig | None = None,
) -> nn.Module:
    """Loads the checkpoint's vision-language or text model, with scaled-dot-product attention.

    `section` names the settings in errors. Without weights, parameters are on the meta device; buffers are real, because
    no checkpoint holds them. `quantization` quantises the language model's linear layers to 4 bits as they are loaded.

    Raises `ConfigError`: nothing can be loaded from `path`, its architecture is not supported, its weights are already
    quantised, or `override_config` names an unknown entry; `EngineError`: weights are missing, damaged or pickles.
    """
    config = read_config(path, trust_remote_code=trust_remote_code, section=section)
    family = family_of(config, section=section)
    for key, value in override_config.items():
        if not hasattr(config, key):
            raise ConfigError(f"{section}.override_config.{key}: the model's configuration has no such entry")
        setattr(config, key, value)
    if getattr(config, "quantization_config", None) is not None:  # only quantised checkpoints have it
        raise ConfigError(
            f"{section}.model_path '{path}' holds quantised weights, which cannot be trained. Give the checkpoint they "
            "were made from; worker.actor.model.lora.quantization=nf4 quantises it as it is loaded"
        )
    auto = model_class(family)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": family.attention,
        "trust_remote_code": trust_remote_code,
    }
    folder = Path(path)
    is_local = folder.is_dir()
    try:
        if not with_weights:
            return _with_fast_layers(_empty_model(auto, config, options), family)
        if is_local and not trust_remote_code:
            require_weights(folder)
        if quantization is not None:
            # An error in the head affects all logits of every token, and a tied head is the embeddings, which are not
            # linear layers. The vision tower has a small share of the weights, and its features are computed once per image.
            vision_modules = [f"model.{name}" for name in family.vision_modules]
            quantization.llm_int8_skip_modules = ["lm_head", *vision_modules]
            options["quantization_config"] = quantization
        with _without_bars(is_local=is_local):
            model, info = auto.from_pretrained(path, config=config, output_loading_info=True, **options)
        _check_loaded(info, is_critic=section == "worker.critic.model")
        if quantization is not None:
            _prepare_quantised(model)
        return _with_fast_layers(model, family)
    except Exception as error:  # damaged files make transformers and torch raise almost anything
        raise EngineError(
            f"{section}.model_path '{path}': its weights cannot be loaded ({type(error).__name__}: {error}). If a file is "
            "truncated or damaged, copy or download the folder again"
        ) from error


def _check_loaded(info: Any, *, is_critic: bool) -> None:
    """Raises DataError if the files lack weights of the model, which transformers has then drawn at random.

    `info` is transformers' `output_loading_info`, in which tied weights count as loaded. The critic's head is replaced, so
    that the files may lack it. transformers itself names weights that the model does not have, and reads none of them.
    """
    missing: list[str] = []
    for name in sorted(info["missing_keys"]):
        if not is_critic or _REPLACED_HEADS.fullmatch(name) is None:
            missing.append(name)
    if missing:
        examples = ", ".join(name[:100] for name in missing[:3])
        raise DataError(f"the files lack weights of the model: {len(missing)} ({examples})")
    if info["error_msgs"]:
        raise DataError(f"the files cannot be read: {info['error_msgs'][0]!s:.300}")


def model_class(family: Family) -> Any:
    """Returns transformers' class that loads a family's models."""
    import transformers

    if family.reads_images:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


@contextmanager
def _without_bars(*, is_local: bool) -> Generator[None]:
    """Hides transformers' bars for weights on the disk, whose loading has a line of our own; a download keeps its bar."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    if not is_local or not is_progress_bar_enabled():
        yield
        return
    disable_progress_bar()
    try:
        yield
    finally:
        enable_progress_bar()


def _with_fast_layers(model: Any, family: Family) -> Any:
    use_linear_patch_embedding(family.vision_parts(model))
    use_fast_products(model)
    return model


def _empty_model(auto: Any, config: Any, options: Mapping[str, Any]) -> Any:
    """Returns a model whose parameters are on the meta device; buffers are real, because no checkpoint holds them."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = auto.from_config(copy.deepcopy(config), **options)
    model.tie_weights()
    return model


def sharded_blocks(model: Any, *, without: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Returns the blocks that FSDP gathers one at a time: decoder layers and vision blocks, except those in `without`.

    They are the elements of module lists that contain a module of `_no_split_modules`; in some vision towers such a
    module is only part of a block.
    """
    block_names = set(model._no_split_modules or ())
    excluded: set[nn.Module] = set()
    for module in without:
        excluded.update(module.modules())
    blocks: list[nn.Module] = []
    for part in model.modules():
        if not isinstance(part, nn.ModuleList):
            continue
        for element in part:
            has_block = any(type(inner).__name__ in block_names for inner in element.modules())
            if has_block and element not in excluded:
                blocks.append(element)
    return blocks


def freeze_vision_tower(model: Any, *, section: str = "worker.actor.model") -> None:
    """Freezes everything that image features depend on."""
    family = family_of(model.config)
    if not family.reads_images:
        raise ConfigError(f"{section}.freeze_vision_tower is true, but the model has no vision tower")
    for weight in family.vision_weights(model):
        weight.requires_grad_(False)


def frozen_vision_parts(model: Any) -> list[nn.Module]:
    """Returns the vision tower's modules; none if anything that image features depend on is trained."""
    family = family_of(model.config)
    if any(weight.requires_grad for weight in family.vision_weights(model)):
        return []
    return family.vision_parts(model)


def excluded_from_adapter(lora: LoraConfig, config: Any) -> str | None:
    """Returns a regular expression for the modules without an adapter: by default the vision tower, if there is one."""
    if lora.exclude_modules != LoraConfig().exclude_modules:
        return lora.exclude_modules
    family = family_of(config)
    return family.vision_pattern if family.reads_images else None


def share_segments(model: Any) -> str | None:
    """Enables packed rows in the language model (`cepo.models.segments`), or returns why it does not support them.

    They need full causal attention in every layer: otherwise a token's result depends on more than what it sees.
    """
    from transformers import AttentionInterface

    family = family_of(model.config)
    if not family.packs:
        return family.why_padded
    config = model.get_decoder().config
    # Only models with several kinds of layers list them, and only some have a window.
    kinds_of_layers = set(getattr(config, "layer_types", None) or ())
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    has_full_layers_alone = kinds_of_layers <= {"full_attention"}
    if has_window or not has_full_layers_alone:
        return "a layer of this model is not full causal attention"
    AttentionInterface.register(ATTENTION_NAME, segment_attention)
    config._attn_implementation = ATTENTION_NAME
    return None


QUANTIZATION_CONFIG = "quantization_config.json"
"""The file stored with an adapter for a 4-bit base, with the arguments of transformers' `BitsAndBytesConfig`."""

logger = logging.getLogger(__name__)
# PEFT imports bitsandbytes if installed, which warns of a missing kernel that is not used here (`_prepare_quantised`).
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def quantization_of(lora: LoraConfig, *, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    from transformers import BitsAndBytesConfig

    if lora.quantization is None:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.quantization,
        bnb_4bit_use_double_quant=lora.double_quantization,
        bnb_4bit_compute_dtype=dtype,
    )


def _prepare_quantised(model: Any) -> None:
    """Makes 4-bit layers compute the same with and without gradient, and removes their scales from state dicts.

    On a CPU with AVX512-BF16, bitsandbytes would repack a weight in the first pass without gradient, for a kernel that
    rounds activations to bf16 and has no backward pass. Scales are not saved, because the base is quantised again.
    """
    layers = [layer for layer in model.modules() if _is_quantised(getattr(layer, "weight", None))]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
        layer.register_state_dict_post_hook(_without_scales)
    num_quantised = sum(layer.in_features * layer.out_features for layer in layers)
    num_others = sum(weight.numel() for weight in model.parameters() if not _is_quantised(weight))
    logger.info(
        "%d linear layers with %d weights are stored in 4 bits, %d weights are not",
        len(layers),
        num_quantised,
        num_others,
    )


def _is_quantised(weight: object) -> bool:
    return getattr(weight, "quant_state", None) is not None  # only bitsandbytes' parameters have it


def quantised_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in module.named_parameters() if _is_quantised(weight)}


def dequantised(weight: Any) -> Tensor:
    """Returns the packed weight as (out, in) in the compute type, with the values that a forward pass uses."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def write_quantization(model: Any, folder: Path) -> None:
    """Writes the base's quantisation settings, if it is quantised, to its adapter's folder."""
    settings = getattr(model.config, "quantization_config", None)  # only quantised models have it
    if settings is not None:
        text = json.dumps(settings.to_dict(), indent=2, default=str)
        (folder / QUANTIZATION_CONFIG).write_text(text + "\n", encoding="utf-8")


_QUANTIZATION_SETTINGS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")
"""What differs between 4-bit bases."""


def read_quantization(folder: Path) -> BitsAndBytesConfig | None:
    """Reads what `write_quantization` has written; None if there is nothing."""
    path = folder / QUANTIZATION_CONFIG
    if not path.exists():
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise CheckpointError(
            f"{folder} was trained on a base in 4 bits, and needs bitsandbytes to load it: {INSTALL_BITSANDBYTES}"
        )
    from transformers import BitsAndBytesConfig

    try:
        settings = read_json(path, dict, within=folder)
        recorded = {name: settings[name] for name in _QUANTIZATION_SETTINGS}
        return BitsAndBytesConfig(load_in_4bit=True, **recorded)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as settings of a 4-bit base: {error}") from error


def _without_scales(layer: nn.Module, state: dict[str, object], prefix: str, _: object) -> None:
    scales = [name for name in state if name.startswith(f"{prefix}weight.")]
    for name in scales:
        del state[name]
