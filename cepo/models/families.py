"""Finds the model family of a checkpoint by its `model_type`. Only this module distinguishes families."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy
import torch
from jaxtyping import Int64
from PIL import Image
from torch import Tensor, nn

from cepo.errors import ConfigError
from cepo.models.interface import (
    REFUSALS,
    EngineUse,
    Family,
    ImageFeatures,
    ImageInputs,
    ImageReader,
    ImageSource,
    Video,
    refused,
    units_ending_inside,
)
from cepo.models.patch_mask import PatchMask, with_black_patches
from cepo.models.without_waiting import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class ProcessedFamily(Family):
    """All images of a prompt are encoded together.

    `siglip` towers have `vision_model` in their names in published checkpoints; transformers omits it. Models for
    which `concatenates` is set take the features of their images as a list.
    """

    siglip: bool = False
    concatenates: bool = False

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        if self.siglip:
            name = re.sub(r"^(model\.)?vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model.", name)
        return name, weight

    def feature_inputs(self, features: Sequence[ImageFeatures]) -> dict[str, object]:
        if not self.concatenates:
            return super().feature_inputs(features)
        embeddings = [unit.embeddings for unit in features]
        return {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=embeddings)}}


class LlavaOneVision(ProcessedFamily):
    """Supports LLaVA-OneVision. Only a prompt's sole image is tiled; `batch_num_images` tells the model."""

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """vLLM serves no adapters for this architecture, and tiles images even if a prompt has several."""
        if use.with_adapter:
            return "vLLM serves no LoRA adapters on LLaVA-OneVision"
        if use.most_images > 1:
            return "vLLM cuts each of several images into tiles, but the model's own processor cuts none of them"
        return None


class Lfm2Vl(ProcessedFamily):
    """Supports LFM2-VL, whose tower reads images of any shape as patches, and whose layers are mostly convolutions."""

    why_padded = "short convolutions mix neighbouring tokens, which in a packed row can belong to different branches"


_WINDOWED_LAYERS = "most layers see only a window of tokens, which in a packed row can belong to different branches"

_JOINED_LINES = (("\n", "\n\n", "\n\n\n"), ("\n\n", "\n", "\n\n\n"), ("\n\n", "\n\n", "\n\n\n\n"))
"""Pairs of line-break tokens with the single token that the tokenizer produces for them within a text."""


class Gemma3Reader(ImageReader):
    """Reads Gemma 3's images. The empty lines around an image merge with adjacent line breaks into one token."""

    @cached_property
    def _rules(self) -> list[list[int]]:
        vocabulary = self._processor.tokenizer.get_vocab()
        rules: list[list[int]] = []
        for texts in _JOINED_LINES:
            if all(text in vocabulary for text in texts):
                rules.append([vocabulary[text] for text in texts])
        return rules

    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        """See `ImageReader.expand`. Adjacent line breaks are then merged, as by the tokenizer and vLLM in a text."""
        expanded = super().expand(engine_ids, images)
        for first, second, merged in self._rules:
            joined: list[int] = []
            for token in expanded:
                if joined and joined[-1] == first and token == second:
                    joined[-1] = merged
                else:
                    joined.append(token)
            expanded = joined
        return expanded


class Gemma3(ProcessedFamily):
    image_reader = Gemma3Reader
    why_padded = _WINDOWED_LAYERS

    def token_inputs(self, input_ids: Int64[Tensor, "R L"], config: PreTrainedConfig) -> dict[str, Tensor]:
        """Returns which tokens belong to an image; the model builds its attention mask from them."""
        return {"token_type_ids": (input_ids == config.image_token_id).long()}


class Gemma4Reader(ImageReader):
    """Reads Gemma 4's images; the processor also returns how many tokens each has."""

    counts = ("num_soft_tokens_per_image",)


@dataclass(frozen=True, kw_only=True)
class Gemma4(ProcessedFamily):
    """Supports Gemma 4, whose logits are capped (`cepo.models.head.CappedHead`), with dense layers or a mixture of experts.

    In the small models each image token sees the tokens before it, in the large ones all tokens of its image. Small
    models also have an audio tower, which counts as a part of the vision tower: nothing reads it.
    """

    why_padded = _WINDOWED_LAYERS
    image_reader = Gemma4Reader
    attention: ClassVar[str | Mapping[str, str]] = {"": "sdpa", "audio_config": "eager"}

    def of(self, config: PreTrainedConfig) -> Family:
        text: Any = config.get_text_config()
        sees_whole_images = text.use_bidirectional_attention == "vision"
        return dataclasses.replace(self, sees_whole_images=sees_whole_images, has_experts=text.enable_moe_block)

    def token_inputs(self, input_ids: Int64[Tensor, "R L"], config: PreTrainedConfig) -> dict[str, Tensor]:
        """Returns which tokens belong to an image; a model that sees whole images builds its mask from them."""
        return {"mm_token_type_ids": (input_ids == config.image_token_id).long()}

    def vision_parts(self, model: Any) -> list[nn.Module]:
        towers = dict(model.model.named_children())  # an audio tower only in some models
        return [towers[name] for name in self.vision_modules if name in towers]


_PIXELS = ("pixel_values", "pixel_values_videos")


class GridReader(ImageReader):
    """Reads images as patches on a grid and, if the family does, videos as images preceded by their times.

    Each image, and each temporal patch of a video, is a unit.
    """

    def __init__(self, family: Family, processor: Any, config: PreTrainedConfig) -> None:
        super().__init__(family, processor, config)
        self._token_of = {"image": self.image_token_id, "video": self.video_token_id}
        self.merge_size: int = processor.image_processor.merge_size

    def read_masked(
        self,
        images: Sequence[Image.Image],
        mask: PatchMask,
        source: ImageSource | None = None,
        videos: Sequence[Video] = (),
    ) -> ImageInputs:
        """Blackens the patches that the tower reads, unless `mask` names squares of the image itself."""
        if mask.square is not None:
            return super().read_masked(images, mask, source, videos)
        inputs = self.read(images, source, videos)
        black_images = [Image.new("RGB", image.size) for image in images]
        black_videos = [replace(video, frames=numpy.zeros_like(video.frames)) for video in videos]
        black = self.read(black_images, videos=black_videos)
        return replace(inputs, tensors=with_black_patches(inputs.tensors, black.tensors, mask, self.merge_size))

    def num_tokens(self, size: tuple[int, int]) -> int:
        width, height = size
        try:
            patches = self._processor.image_processor.get_number_of_image_patches(height, width, {})
        except REFUSALS as error:
            raise refused([size], error) from error
        return int(patches) // self.merge_size**2

    def positions(self, token_ids: Sequence[int], images: ImageInputs) -> Int64[Tensor, "3 L"]:
        """Returns the M-RoPE positions of a context by Qwen3-VL's rule.

        Text advances all three axes by one per token. An image of (h, w) merged patches that starts at position p has
        time p, height p + row and width p + column. The text after it continues at p + max(h, w). Each temporal patch
        of a video is such an image, preceded by its time as text.
        """
        remaining_grids = {self._token_of[kind]: iter(grid.tolist()) for kind, grid in images.grids.items()}
        pieces: list[Tensor] = []  # each (3, tokens)
        position = 0
        index = 0
        while index < len(token_ids):
            token = token_ids[index]
            if token in remaining_grids:
                _, patch_rows, patch_columns = next(remaining_grids[token])
                height = patch_rows // self.merge_size
                width = patch_columns // self.merge_size
                num_tokens = height * width
                extent = max(height, width)
                offsets = _image_offsets(height, width)
            else:
                num_tokens = _length_of_text(token_ids[index:], remaining_grids.keys())
                extent = num_tokens
                offsets = torch.arange(num_tokens).expand(3, -1)
            pieces.append(offsets + position)
            position += extent
            index += num_tokens
        return torch.cat(pieces, dim=1)

    def units_inside(self, token_ids: Sequence[int], images: ImageInputs, start: int, stop: int) -> list[int]:
        units: list[int] = []
        num_units = 0
        for kind, grid in images.grids.items():
            placeholder = self._token_of[kind]
            tokens_per_unit = (grid.prod(dim=1) // self.merge_size**2).tolist()
            for unit in units_ending_inside(token_ids, placeholder, tokens_per_unit, start, stop):
                units.append(num_units + unit)
            num_units += len(grid)
        return units


def _image_offsets(height: int, width: int) -> Int64[Tensor, "3 tokens"]:
    """Returns time, row and column of each merged patch of an image, row by row."""
    rows = torch.arange(height).repeat_interleave(width)
    columns = torch.arange(width).repeat(height)
    return torch.stack([torch.zeros_like(rows), rows, columns])


def _length_of_text(token_ids: Sequence[int], placeholders: Collection[int | None]) -> int:
    """Returns the number of tokens before the first placeholder."""
    for index, token in enumerate(token_ids):
        if token in placeholders:
            return index
    return len(token_ids)


@dataclass(frozen=True, kw_only=True)
class GridFamily(Family):
    """Implements families with M-RoPE positions whose tower encodes patches on a grid and returns features per image.

    The placeholder of an image of (h, w) patches is replaced by h w / merge^2 tokens. Equal images are encoded once, and
    rows that share an image can be packed.
    """

    vision_modules: tuple[str, ...] = ("visual",)
    processors: tuple[str, ...] = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
    num_position_axes = 3
    image_reader = GridReader

    def features(self, model: Any, images: Sequence[ImageInputs], device: torch.device) -> list[list[ImageFeatures]]:
        """Computes the features of all prompts' images in one pass of the tower."""
        pixels: list[Tensor] = []
        grids: list[Tensor] = []
        kinds: list[str] = []
        for inputs in images:
            for name in _PIXELS:
                if name in inputs.tensors:
                    pixels.append(inputs.tensors[name])
            for kind, grid in inputs.grids.items():
                grids.append(grid)
                kinds += [kind] * len(grid)
        grid_thw = to_device(torch.cat(grids), device)  # (units, 3)
        output = model.model.get_image_features(to_device(torch.cat(pixels), device), grid_thw, return_dict=True)
        levels = getattr(output, "deepstack_features", None) or ()  # only Qwen3-VL has them
        units: list[ImageFeatures] = []
        for kind, embeddings, *unit_levels in zip(kinds, output.pooler_output, *levels, strict=True):
            units.append(ImageFeatures(embeddings=embeddings, levels=tuple(unit_levels), kind=kind))
        units_of_prompts: list[list[ImageFeatures]] = []
        first = 0
        for inputs in images:
            end = first + inputs.num_encoded
            units_of_prompts.append(units[first:end])
            first = end
        return units_of_prompts

    def feature_inputs(self, features: Sequence[ImageFeatures]) -> dict[str, object]:
        units_by_kind: dict[str, list[ImageFeatures]] = {}
        for unit in features:
            units_by_kind.setdefault(unit.kind, []).append(unit)
        outputs: dict[str, object] = {}
        for kind, units in units_by_kind.items():
            # The model expects a sequence of levels, each with the features of all units.
            levels = zip(*(unit.levels for unit in units), strict=True)
            outputs[kind] = SimpleNamespace(
                pooler_output=tuple(unit.embeddings for unit in units),
                deepstack_features=[tuple(level) for level in levels],
            )
        return {"mm_encoder_outputs": outputs}


class Qwen3VLMoe(GridFamily):
    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """Transposes experts from transformers' (experts, out, in) to published checkpoints' (experts, in, out)."""
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return name, weight.transpose(-1, -2)
        return name, weight


class Qwen35(GridFamily):
    """Supports Qwen3.5. LoRA adapts attention and, in a mixture of experts, the expert that all tokens share."""

    why_padded = (
        "linear-attention layers carry a state from token to token, which the branches of a packed row cannot share"
    )

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """vLLM's CPU build has a linear-attention kernel only for bf16."""
        if use.on_gpu:
            return super().why_not_vllm(use)
        if use.dtype != "bf16":
            return f"vLLM computes linear attention on a CPU only in bf16, but worker.rollout.dtype is {use.dtype}"
        # torch has no public name for what oneDNN computes on this processor; ONEDNN_MAX_CPU_ISA limits it.
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "vLLM computes linear attention on a CPU with oneDNN's products in bf16, which this processor lacks"
        return super().why_not_vllm(use)


_TOWER = ("vision_tower", "multi_modal_projector")

FAMILIES: tuple[Family, ...] = (
    GridFamily(title="Qwen2-VL", model_types=("qwen2_vl",)),
    GridFamily(title="Qwen2.5-VL", model_types=("qwen2_5_vl",)),
    GridFamily(title="Qwen3-VL", model_types=("qwen3_vl",), reads_videos=True),
    Qwen3VLMoe(title="Qwen3-VL-MoE", model_types=("qwen3_vl_moe",), reads_videos=True, has_experts=True),
    Qwen35(title="Qwen3.5, Qwen3.6", model_types=("qwen3_5",)),
    Qwen35(title="Qwen3.5-MoE", model_types=("qwen3_5_moe",), has_experts=True),
    GridFamily(title="GLM-4.1V, GLM-4.6V-Flash", model_types=("glm4v",), processors=("Glm4v", "Glm46V")),
    # It cuts a large image into tiles of equally many tokens between `<img>` and `</img>`.
    ProcessedFamily(
        title="InternVL3",
        model_types=("internvl",),
        vision_modules=_TOWER,
        processors=("InternVL", "GotOcr2"),
    ),
    # Features are (tiles, tokens per tile, H), which the model merges.
    ProcessedFamily(
        title="SmolVLM2, Idefics3",
        model_types=("smolvlm", "idefics3"),
        vision_modules=("vision_model", "connector"),
        processors=("SmolVLM", "Idefics3"),
    ),
    Gemma3(
        title="Gemma 3",
        model_types=("gemma3",),
        placeholder="boi_token_id",
        sees_whole_images=True,
        vision_modules=_TOWER,
        processors=("Gemma3",),
        siglip=True,
    ),
    Gemma4(
        title="Gemma 4",
        model_types=("gemma4",),
        vision_modules=("vision_tower", "embed_vision", "audio_tower", "embed_audio"),
        processors=("Gemma4",),
        concatenates=True,
    ),
    LlavaOneVision(
        title="LLaVA-OneVision",
        model_types=("llava_onevision",),
        vision_modules=_TOWER,
        vision_parameters=("image_newline",),
        processors=("LlavaOnevision",),
        siglip=True,
        concatenates=True,
    ),
    Lfm2Vl(
        title="LFM2-VL, LFM2.5-VL",
        model_types=("lfm2_vl",),
        vision_modules=_TOWER,
        processors=("Lfm2Vl",),
        siglip=True,
        concatenates=True,
    ),
    Family(title="Qwen3", model_types=("qwen3",)),
    Family(
        title="Qwen2, Qwen2.5, Llama, Mistral, SmolLM3, OLMo 2, Phi-3",
        model_types=("qwen2", "llama", "mistral", "smollm3", "olmo2", "phi3"),
    ),
    Family(title="Qwen2-MoE, Qwen3-MoE", model_types=("qwen2_moe", "qwen3_moe"), has_experts=True),
)
"""All supported families, in the order of the table in docs/models.md."""

TOKENIZERS = (
    "Qwen2Tokenizer", "Qwen3_5Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer",
    "PreTrainedTokenizer", "TokenizersBackend",
)  # fmt: skip
"""The classes of the families' tokenizers, as `tokenizer_config.json` names them; an ending `Fast` names the same."""

_BY_TYPE: dict[str, Family] = {}
for _family in FAMILIES:
    for _model_type in _family.model_types:
        _BY_TYPE[_model_type] = _family

_PARTS = ("siglip", "siglip2", "lfm2")
"""Names in the `model_type` of parts that are no supported model by themselves."""


def is_part(kind: str) -> bool:
    """Returns whether a supported model may have a text model or a tower of this `model_type`."""
    base = re.sub("(_text|_audio|_vision|_vision_model)$", "", kind)
    return base in _PARTS or any(base in family.model_types for family in FAMILIES)


def processors_of(model_type: object) -> list[str]:
    """Returns the starts of the names of the processors of a `model_type`; of all families, if none has that type."""
    of_type = [family for family in FAMILIES if model_type in family.model_types and family.reads_images]
    starts: list[str] = []
    for family in of_type or FAMILIES:
        for start in family.processors:
            if start not in starts:
                starts.append(start)
    return starts


def family_of(config: PreTrainedConfig, *, section: str = "worker.actor.model") -> Family:
    """Returns the family of a transformers configuration.

    Raises `ConfigError`, which names `section`: the architecture is not supported.
    """
    family = _BY_TYPE.get(config.model_type)
    has_tower = getattr(config, "vision_config", None) is not None  # text models' configurations lack the entry
    if family is not None and family.reads_images == has_tower:
        return family.of(config)
    if family is not None or has_tower:
        raise _unsupported(config, section, "its images are not read here")
    raise _unsupported(config, section, "no family here has that type")


def _unsupported(config: PreTrainedConfig, section: str, reason: str) -> ConfigError:
    architectures = getattr(config, "architectures", None)  # only one that was read from a checkpoint has them
    architecture = ", ".join(architectures) if architectures else "no named architecture"
    supported = ", ".join(family.title for family in FAMILIES)
    return ConfigError(
        f"{section}.model_path is a checkpoint of model_type '{config.model_type}' ({architecture}), which is not supported: "
        f"{reason}. Supported are {supported} (docs/models.md)"
    )
