"""Tiny checkpoint folders with random weights, one for each model family, in the form of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_checkpoints.families import FAMILIES as BUILDERS
from tiny_checkpoints.families import Parts

TEXT_FAMILIES = ("qwen2", "qwen3")
FAMILIES = tuple(BUILDERS)
VISION_FAMILIES = tuple(family for family in FAMILIES if family not in TEXT_FAMILIES)


def write_checkpoint(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes configuration, weights, tokenizer, chat template, processor and generation config of a tiny model.

    The folder can be read by transformers' Auto classes and by vLLM. The weights are large enough that the model's
    distributions are not flat and depend on the image. `family` is the configuration's `model_type`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    parts = BUILDERS[family]()
    tokenizer = getattr(parts.processor, "tokenizer", parts.processor)
    auto: Any = AutoModelForCausalLM if family in TEXT_FAMILIES else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(parts.config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.1)
            for end, value in parts.scaled.items():
                if name.endswith(end):
                    torch.nn.init.constant_(parameter, value)
    model.generation_config = GenerationConfig(
        do_sample=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in parts.end_tokens],
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    parts.processor.save_pretrained(folder)
    _publish(folder, parts)
    return folder


_OLD_QWEN = ("qwen2_vl", "qwen2_5_vl")
_IN_TOKENIZER_CONFIG = (*_OLD_QWEN, "qwen3_vl", "qwen3_vl_moe")
_KEPT_INSIDE = {"model_type", "rope_parameters", "layer_types", "dtype"}


def _publish(folder: Path, parts: Parts) -> None:
    """Changes the files in `folder`; transformers reads both forms, other programs often the published one alone."""
    _publish_weights(folder / "model.safetensors", parts)
    family = parts.config.model_type
    if family in _OLD_QWEN:
        _flatten(folder / "config.json")
    if (folder / "processor_config.json").exists():
        _split_processor(folder, family)
    if family in _IN_TOKENIZER_CONFIG:
        _move_template(folder)


def _publish_weights(file: Path, parts: Parts) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(file).items():
        start = next((start for start in parts.renamed if name.startswith(start)), "")
        published = parts.renamed.get(start, "") + name.removeprefix(start)
        tensors[published] = tensor.transpose(-1, -2).contiguous() if name.endswith(parts.transposed) else tensor
    save_file(tensors, file, metadata={"format": "pt"})


def _flatten(file: Path) -> None:
    """Qwen2-VL and Qwen2.5-VL are older than `text_config`: its entries stand at the top."""
    config = _read(file)
    text = config.pop("text_config")
    rope = text["rope_parameters"]
    config |= {name: value for name, value in text.items() if name not in _KEPT_INSIDE}
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["sliding_window"] = 32768  # named, and not used
    config["torch_dtype"] = config.pop("dtype")
    for name in ("model_type", "rope_parameters", "dtype", "initializer_range"):
        config["vision_config"].pop(name)
    config["vision_config"]["in_chans"] = config["vision_config"].pop("in_channels")
    _write(file, config)


def _split_processor(folder: Path, family: str) -> None:
    """The image processor has a file of its own, and the video processor too but in the oldest folders."""
    processor = _read(folder / "processor_config.json")
    images = processor.pop("image_processor")
    videos = processor.pop("video_processor", None)
    named = {"processor_class": processor["processor_class"]}
    if family in _OLD_QWEN:
        size = images.pop("size")
        images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        videos = None
    _write(folder / "preprocessor_config.json", images | named)
    if videos is not None:
        _write(folder / "video_preprocessor_config.json", videos | named)
    if processor.keys() > named.keys():
        _write(folder / "processor_config.json", processor)
    else:
        (folder / "processor_config.json").unlink()


def _move_template(folder: Path) -> None:
    """Qwen keeps the chat template in two JSON files."""
    template = {"chat_template": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
    (folder / "chat_template.jinja").unlink()
    _write(folder / "chat_template.json", template)
    _write(folder / "tokenizer_config.json", _read(folder / "tokenizer_config.json") | template)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
