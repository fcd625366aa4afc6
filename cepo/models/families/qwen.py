"""Supports Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images on a patch grid with M-RoPE positions.

The placeholder of an image of (h, w) patches is replaced by h w / merge^2 tokens, and each image has its own features.
Therefore equal images are encoded once, and rows that share an image can be packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int64
from torch import Tensor

from cepo.models.inputs import EngineUse, Family, ImageFeatures, ImageInputs, ImageReader

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PIXELS = ("pixel_values", "pixel_values_videos")


class GridReader(ImageReader):
    """Reads images as patches on a grid and, if the family does, videos as images preceded by their times.

    Each image, and each temporal patch of a video, is a unit.
    """

    def __init__(self, family: Family, processor: Any, config: PreTrainedConfig) -> None:
        super().__init__(family, processor, config)
        self._token_of = {"image": self.image_token_id, "video": self.video_token_id}
        self.merge_size: int = processor.image_processor.merge_size

    def num_tokens(self, size: tuple[int, int]) -> int:
        width, height = size
        patches = self._processor.image_processor.get_number_of_image_patches(height, width, {})
        return int(patches) // self.merge_size**2

    def positions(self, token_ids: Sequence[int], images: ImageInputs) -> Int64[Tensor, "3 L"]:
        """Returns the M-RoPE positions of a context by Qwen3-VL's rule.

        Text advances all three axes by one per token. An image of (h, w) merged patches that starts at position p has
        time p, height p + row and width p + column. The text after it continues at p + max(h, w). Each temporal patch
        of a video is such an image, preceded by its time as text.
        """
        remaining = {self._token_of[kind]: iter(grid.tolist()) for kind, grid in images.grids.items()}
        columns: list[tuple[int, int, int]] = []
        position = 0
        while len(columns) < len(token_ids):
            token, height, width = token_ids[len(columns)], 1, 1
            if token in remaining:
                height, width = (side // self.merge_size for side in next(remaining[token])[1:])
            columns += [
                (position, position + row, position + column) for row in range(height) for column in range(width)
            ]
            position += max(height, width)
        return torch.tensor(columns).t()

    def units_inside(self, token_ids: Sequence[int], images: ImageInputs, start: int, stop: int) -> list[int]:
        found: list[int] = []
        first = 0
        for kind, grid in images.grids.items():
            before = token_ids[:start].count(self._token_of[kind])
            here = token_ids[start:stop].count(self._token_of[kind])
            ends = (grid.prod(dim=1) // self.merge_size**2).cumsum(0).tolist()
            found += [first + index for index, end in enumerate(ends) if before < end <= before + here]
            first += len(grid)
        return found


@dataclass(frozen=True, kw_only=True)
class GridFamily(Family):
    """Implements families whose vision tower encodes patches on a grid and returns separate features per image."""

    vision_modules: tuple[str, ...] = ("visual",)
    num_position_axes = 3
    image_reader = GridReader

    def features(self, model: Any, images: Sequence[ImageInputs], device: torch.device) -> list[list[ImageFeatures]]:
        """Computes the features of all prompts' images in one pass of the tower."""
        pixels = [one.tensors[name] for one in images for name in _PIXELS if name in one.tensors]
        kinds = [kind for one in images for kind, grid in one.grids.items() for _ in grid]
        grid_thw = torch.cat([grid for one in images for grid in one.grids.values()]).to(device)
        output = model.model.get_image_features(torch.cat(pixels).to(device), grid_thw, return_dict=True)
        levels = getattr(output, "deepstack_features", None) or ()  # only Qwen3-VL has them
        found = iter(
            ImageFeatures(embeddings=embeddings, levels=tuple(deeper), kind=kind)
            for kind, embeddings, *deeper in zip(kinds, output.pooler_output, *levels, strict=True)
        )
        return [list(islice(found, one.num_encoded)) for one in images]

    def feature_inputs(self, features: Sequence[ImageFeatures]) -> dict[str, object]:
        found: dict[str, object] = {}
        for kind in dict.fromkeys(one.kind for one in features):
            chosen = [one for one in features if one.kind == kind]
            found[kind] = SimpleNamespace(
                pooler_output=tuple(one.embeddings for one in chosen),
                deepstack_features=[tuple(level) for level in zip(*(one.levels for one in chosen), strict=True)],
            )
        return {"mm_encoder_outputs": found}


class Qwen3VLMoe(GridFamily):
    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """Transposes experts from transformers' (experts, out, in) to published checkpoints' (experts, in, out)."""
        is_expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        return name, weight.transpose(-1, -2) if is_expert else weight


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
