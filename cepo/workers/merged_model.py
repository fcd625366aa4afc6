"""Reads a checkpoint's adapter, and merges a checkpoint into a model folder that transformers, vLLM and cepo can load."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor

from cepo.config.worker_schema import FloatType
from cepo.errors import CheckpointError, ConfigError, DataError, EngineError
from cepo.files.safe_files import irregular_file, read_json, size_of
from cepo.models import pretrained
from cepo.models.families import family_of
from cepo.models.interface import Family
from cepo.models.pretrained import read_quantization
from cepo.models.processing import Processing
from cepo.rollout.generator import AdapterWeights
from cepo.run_folder.layout import ACTOR_FOLDER, CHECKPOINT_PREFIX, missing_checkpoint
from cepo.workers.checkpoint import ADAPTER, SHARDS, Shards, shape_of

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
_WEIGHTS = "model."  # the prefix of weights in the saved state
_TRAINED = _WEIGHTS + "model."  # that of a weight's own name there: `ScoringModel.model` is between


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The model from which training started.

    Attributes:
        tokenizer_path: folder or hub name of tokenizer and processor; None for `path`.
        chat_template: replaces the tokenizer's template; None keeps it.
        override_config: entries that replaced those of the model configuration.
    """

    path: str
    tokenizer_path: str | None = None
    chat_template: str | None = field(default=None, repr=False)
    override_config: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


def actor_folder(checkpoint: Path) -> Path:
    """Returns the folder with the policy's weights: `actor` in a `global_step_<N>`, or `checkpoint` itself.

    Raises:
        CheckpointError: neither folder has an adapter or shards, or the folder has links, pipes or devices.
    """
    folders = (checkpoint / ACTOR_FOLDER, checkpoint)
    for folder in folders:
        if _has_adapter(folder) or (folder / SHARDS).is_dir():
            irregular = irregular_file(folder)
            if irregular is not None:
                raise CheckpointError(f"{irregular} is not a regular file; give a checkpoint without links and pipes")
            return folder
    if not checkpoint.is_dir():
        raise CheckpointError(missing_checkpoint(checkpoint))
    steps = sorted(path.name for path in checkpoint.glob(f"{CHECKPOINT_PREFIX}*"))
    if steps:
        raise CheckpointError(f"{checkpoint} is a run folder; give one of its checkpoints: {', '.join(steps)}")
    if any(list(folder.glob("model_world_size_*_rank_*.pt")) for folder in folders):
        raise CheckpointError(
            f"{checkpoint} holds rank files of EasyR1's full fine-tuning, but cepo reads only {ADAPTER}/ of EasyR1; "
            "merge them with EasyR1's own scripts/model_merger.py"
        )
    if (checkpoint / "config.json").is_file():
        raise CheckpointError(f"{checkpoint} is a whole model, with nothing to merge; give a checkpoint of a run")
    raise CheckpointError(
        f"{checkpoint} is not a checkpoint: it has neither {ADAPTER}/{ADAPTER_CONFIG} nor {SHARDS}/; "
        "give a folder global_step_<N>, or its subfolder actor"
    )


def adapter_base(folder: Path) -> str | None:
    """Returns the base model named by the adapter in an actor's folder; None without an adapter or a name."""
    if not _has_adapter(folder):
        return None
    path = _adapter_in(folder) / ADAPTER_CONFIG
    try:
        base = read_json(path, dict, within=folder).get("base_model_name_or_path") or None
    except DataError as error:
        raise CheckpointError(f"{path} cannot be read as an adapter's configuration: {error}") from error
    if not isinstance(base, str | None):
        raise CheckpointError(f"{path} names a base model that is not a text")
    return base


def merge_checkpoint(actor: Path, out: Path, base: BaseModel, *, dtype: FloatType | None = None) -> torch.dtype:
    """Writes the trained model with tokenizer, processor, chat template and generation config; returns the weights' type.

    Under LoRA the weights are `W + scale B A`, summed in float32 and rounded once; otherwise they are those of the
    shards. For a 4-bit base, W is the dequantised weight, because the adapter was trained on it. The base's generation
    config is copied byte for byte, because its end tokens decide where responses stop. The folder appears only when it
    is complete. Memory needed: the model in float32.

    Args:
        actor: the result of `actor_folder`.
        out: a folder that does not exist or is empty.
        dtype: the type of the written weights; None for the base's.

    Raises:
        CheckpointError: the base cannot be read, the checkpoint does not match it, or `out` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is not empty; give a new folder")
    processing, model = _load_base(base, read_quantization(_adapter_in(actor)))
    written_dtype = _declared_dtype(base) if dtype is None else pretrained.torch_dtype(dtype)
    if _has_adapter(actor):
        model = _with_adapter_merged(model, _adapter_in(actor))
    else:
        _load_shards(model, actor / SHARDS)
    model = model.to(written_dtype)
    infinite = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    if infinite:
        raise CheckpointError(
            f"{actor} gives weights that are not finite in {written_dtype}, such as {infinite[0]}; give an earlier checkpoint, "
            "or --dtype"
        )
    logger.info("writing %s in %s", out, written_dtype)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _write(model, partial, base, written_dtype)
    processing.save(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return written_dtype


def _load_base(base: BaseModel, quantization: Any) -> tuple[Processing, Any]:
    """Loads the processing and the model in float32; a 4-bit base is dequantised after it was loaded as in training."""
    try:
        processing = Processing(
            base.tokenizer_path or base.path,
            trust_remote_code=base.trust_remote_code,
            chat_template=base.chat_template,
        )
        model: Any = pretrained.load_model(
            base.path,
            dtype=torch.float32 if quantization is None else quantization.bnb_4bit_compute_dtype,
            trust_remote_code=base.trust_remote_code,
            override_config=base.override_config,
            quantization=quantization,
        )
    except (ConfigError, EngineError) as error:
        raise CheckpointError(f"the base model '{base.path}' cannot be read; name it with --base: {error}") from error
    if quantization is not None:
        model = model.dequantize(dtype=torch.float32).float()
    return processing, model


def _has_adapter(folder: Path) -> bool:
    return (_adapter_in(folder) / ADAPTER_CONFIG).is_file()


def _adapter_in(folder: Path) -> Path:
    """Returns the folder of an adapter: `lora_adapter`, or the checkpoint itself, as PEFT saves it and so TRL."""
    return folder if (folder / ADAPTER_CONFIG).is_file() else folder / ADAPTER


def _declared_dtype(base: BaseModel) -> torch.dtype:
    config: Any = pretrained.read_config(base.path, trust_remote_code=base.trust_remote_code)
    # Some checkpoints declare the type in their text part alone, or not at all.
    declared = config.dtype or config.get_text_config().dtype or torch.float32
    if declared not in (torch.bfloat16, torch.float16, torch.float32):
        raise CheckpointError(
            f"the base model '{base.path}' declares its weights in {declared}; choose a type with --dtype"
        )
    return declared


def _with_adapter_merged(model: Any, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    adapter = read_adapter(folder)
    settings: dict[str, Any] = dict(adapter.adapter_config)
    settings.pop("peft_type", None)  # which the class says
    try:
        wrapped: Any = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=False)
        result: Any = set_peft_model_state_dict(wrapped, dict(adapter.tensors))
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        raise CheckpointError(f"the adapter {folder} does not fit this base model: {error}") from error
    # PEFT ignores unknown names and leaves missing adapter weights at zero, so the base would be written unchanged.
    absent = [name for name in result.missing_keys if ".lora_" in name or ".modules_to_save." in name]
    _require_none(result.unexpected_keys, f"the adapter {folder} has weights for layers that the base model lacks")
    _require_none(absent, f"the adapter {folder} lacks weights")
    tied = [name for name in adapter.tensors if "lm_head" in name or "embed_tokens" in name]
    if getattr(model.config, "tie_word_embeddings", False):  # in some families only the text part has this entry
        _require_none(tied, f"the adapter {folder} changes one of two tied weights, which a merge cannot keep apart")
    logger.info("adding %d tensors of the adapter %s", len(adapter.tensors), folder)
    return wrapped.merge_and_unload()


def _load_shards(model: Any, folder: Path) -> None:
    weights = {_TRAINED + name: tensor for name, tensor in model.state_dict().items()}
    shards = Shards(folder)
    saved_shapes = {name: shape for name, shape in shards.shapes.items() if name.startswith(_WEIGHTS)}
    _require_none(saved_shapes.keys() - weights.keys(), f"{folder} has weights that the base model lacks")
    differing: list[str] = []
    for name, shape in saved_shapes.items():
        base_shape = shape_of(weights[name])
        if shape != base_shape:
            differing.append(f"{name} {shape} for {base_shape}")
    _require_none(differing, f"{folder} has weights of other shapes than the base model")
    _require_none(_untrained(model, weights, saved_shapes), f"{folder} lacks weights of the base model")
    logger.info("reading %d tensors from %s", len(saved_shapes), folder)
    shards.fill({name: weights[name] for name in saved_shapes})


def _untrained(model: Any, weights: Mapping[str, torch.Tensor], saved_names: Collection[str]) -> set[str]:
    """Returns the weights missing from the shards, except those tied to a saved weight or in a frozen vision tower."""
    saved_addresses = {weights[name].data_ptr() for name in saved_names}
    missing: set[str] = set()
    for name, tensor in weights.items():
        is_tied = tensor.data_ptr() in saved_addresses
        if name not in saved_names and not is_tied:
            missing.add(name)
    vision_modules = family_of(model.config).vision_modules
    vision_prefixes = tuple(f"{_TRAINED}model.{module}." for module in vision_modules)
    tower = {name for name in weights if name.startswith(vision_prefixes)}
    was_tower_frozen = tower <= missing  # none of its weights were saved
    if was_tower_frozen:
        missing -= tower
    return missing


def _require_none(names: Iterable[str], complaint: str) -> None:
    own_names = sorted(name.removeprefix(_TRAINED) for name in names)
    if own_names:
        examples = ", ".join(name[:200] for name in own_names[:3])
        if len(own_names) > 3:
            examples += ", ..."
        raise CheckpointError(
            f"{complaint}: {len(own_names)} ({examples}); was it trained from another base? See --base"
        )


def _write(model: Any, folder: Path, base: BaseModel, dtype: torch.dtype) -> None:
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    model.config.dtype = dtype
    # A model need not have all sub-configurations that its class names.
    for name in model.config.sub_configs:
        part = getattr(model.config, name, None)
        if part is not None:
            part.dtype = dtype
    source = cached_file(base.path, GENERATION_CONFIG, _raise_exceptions_for_missing_entries=False)
    if source is not None:
        model.generation_config = GenerationConfig()  # transformers refuses to write some of the configs that it reads
    model.save_pretrained(folder)
    _publish(folder, family_of(model.config))
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)  # safetensors makes files that only their owner can read
    if source is not None:
        shutil.copyfile(source, folder / GENERATION_CONFIG)


def _publish(folder: Path, family: Family) -> None:
    """Converts saved weights to the shapes of published checkpoints, which vLLM reads; they have their names already."""
    from safetensors.torch import load_file, save_file

    for file in sorted(folder.glob("*.safetensors")):
        saved = load_file(file)
        published: dict[str, Tensor] = {}
        for name, weight in saved.items():
            _, converted = family.published(name, weight)
            published[name] = converted.contiguous()
        if any(published[name] is not weight for name, weight in saved.items()):
            save_file(published, file, metadata={"format": "pt"})


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class _AdapterSettings(pydantic.BaseModel):
    """What is read of an adapter's settings, with PEFT's names, types and defaults."""

    model_config = pydantic.ConfigDict(strict=True)

    r: pydantic.PositiveInt
    lora_alpha: pydantic.FiniteFloat = 8
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    bias: Literal["none"] = "none"
    modules_to_save: list[str] | None = None


_NEEDLESS = (
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout",
    "base_model_name_or_path", "peft_version", "revision", "task_type", "inference_mode", "auto_mapping",
)  # fmt: skip
"""What is for training or for information alone, and which layers are adapted, which the tensors themselves name."""


def read_adapter(folder: Path) -> AdapterWeights:
    """Returns the tensors of an adapter with the settings that PEFT needs to add them to a model.

    The layers are those that have tensors. A setting that PEFT would follow but that is not read here is refused, so that
    no adapter imports a module, or means something else than trained.

    Raises:
        CheckpointError: a file breaks the policy of `cepo.files.safe_files`, or the two contradict each other.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            size_of(folder / name, within=folder.parent)
        recorded = read_json(folder / ADAPTER_CONFIG, dict, within=folder.parent)
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        return AdapterWeights(tensors=tensors, adapter_config=_settings(recorded, tensors))
    except (OSError, ValueError, TypeError, SafetensorError) as error:  # DataError is a ValueError
        raise CheckpointError(f"{folder} cannot be read as an adapter: {error}") from error


def _settings(recorded: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the settings of an adapter for PEFT; raises ValueError for others, and if no tensor is an adapter's."""
    from peft import LoraConfig

    defaults = LoraConfig().to_dict()
    foreign: list[str] = []
    for name in sorted(recorded.keys() - {*_AdapterSettings.model_fields, *_NEEDLESS}):
        is_set = recorded[name] and recorded[name] != defaults.get(name)
        if is_set:
            foreign.append(name)
    if foreign:
        names = ", ".join(name[:100] for name in foreign[:5])
        raise ValueError(
            f"{ADAPTER_CONFIG} has settings that cepo does not read: {names}; if you trust it, merge it with PEFT itself"
        )
    known_settings = {name: recorded[name] for name in _AdapterSettings.model_fields if name in recorded}
    _AdapterSettings.model_validate(known_settings)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{ADAPTER_WEIGHTS} has {name[:200]!a} in {tensor.dtype}, which is no type of weights")
    layers = {name.partition(".lora_")[0].removeprefix(_PREFIX) for name in tensors if ".lora_" in name}
    if not layers:
        raise ValueError(f"{ADAPTER_WEIGHTS} has no adapter")
    return {**known_settings, "peft_type": "LORA", "target_modules": sorted(layers)}
