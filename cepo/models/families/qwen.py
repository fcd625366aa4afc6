"""Supports Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images on a patch grid with M-RoPE positions.

The placeholder of an image of (h, w) patches is replaced by h w / merge^2 tokens, and each image has its own features.
Therefore equal images are encoded once, and rows that share an image can be packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int64
from PIL.Image import Image
from torch import Tensor

from cepo.models.inputs import (
    EncodeText,
    EngineUse,
    Family,
    ImageFeatures,
    ImageInputs,
    ImageReader,
    ImageSource,
    Video,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class GridReader(ImageReader):
    """Reads images as patches on a grid and, if the family does, videos as images preceded by their times."""

    def __init__(self, family: Family, processor: Any, config: PreTrainedConfig, encode_text: EncodeText) -> None:
        super().__init__(family, processor, config, encode_text)
        self._images: Any = processor.image_processor
        self._vision, self._encode_text = config.vision_config, encode_text
        self._around_a_frame: tuple[int, int] = (config.vision_start_token_id, config.vision_end_token_id)
        self.merge_size: int = self._images.merge_size

    def read(
        self, images: Sequence[Image], source: ImageSource | None = None, videos: Sequence[Video] = ()
    ) -> ImageInputs:
        if not videos:
            values = self._images(images=list(images), return_tensors="pt")
            return ImageInputs(pixel_values=values["pixel_values"], grid_thw=values["image_grid_thw"], source=source)
        reader = self.video_processor
        values = reader(
            videos=[video.frames for video in videos],
            video_metadata=[video.metadata() for video in videos],
            do_sample_frames=False,
            return_tensors="pt",
        )
        pixels = values["pixel_values_videos"]
        grids = values["video_grid_thw"].repeat_interleave(values["video_grid_thw"][:, 0], dim=0)
        grids[:, 0] = 1
        if images:
            own = self.read(images)
            pixels, grids = torch.cat([own.pixel_values, pixels]), torch.cat([own.grid, grids])
        times = tuple(video.times(reader.temporal_patch_size) for video in videos)
        return ImageInputs(pixel_values=pixels, grid_thw=grids, frame_times=times)

    def num_tokens(self, size: tuple[int, int]) -> int:
        width, height = size
        return int(self._images.get_number_of_image_patches(height, width, {})) // self.merge_size**2

    def num_video_tokens(self, video: Video) -> int:
        width, height = video.size
        times = video.times(self.video_processor.temporal_patch_size)
        patches = self.video_processor.get_num_of_video_patches(len(video.frames), height, width, {})
        around = sum(len(self._encode_text(_time_text(time))) + len(self._around_a_frame) for time in times)
        return int(patches) // self.merge_size**2 + around

    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        counts = [int(grid.prod()) // self.merge_size**2 for grid in images.grid]
        stills, frames = iter(counts[: images.num_images]), iter(counts[images.num_images :])
        videos = iter(images.frame_times)
        start, end = self._around_a_frame
        expanded: list[int] = []
        for token in engine_ids:
            if token == self.image_token_id:
                expanded += [token] * next(stills)
            elif token == self.video_token_id:
                for time in next(videos):
                    expanded += [*self._encode_text(_time_text(time)), start, *[token] * next(frames), end]
            else:
                expanded.append(token)
        return expanded

    def positions(self, token_ids: Sequence[int], images: ImageInputs) -> Int64[Tensor, "3 L"]:
        """Returns the M-RoPE positions of a context by Qwen3-VL's rule.

        Text advances all three axes by one per token. An image of (h, w) merged patches that starts at position p has
        time p, height p + row and width p + column. The text after it continues at p + max(h, w). Each temporal patch
        of a video is such an image, preceded by its time as text.
        """
        grids = images.grid.tolist()
        remaining = {self.image_token_id: iter(grids[: images.num_images])}
        if self.video_token_id is not None:
            remaining[self.video_token_id] = iter(grids[images.num_images :])
        pieces: list[Tensor] = []
        position = index = 0
        while index < len(token_ids):
            if token_ids[index] in remaining:
                time, height, width = next(remaining[token_ids[index]])
                height, width = height // self.merge_size, width // self.merge_size
                axes = torch.meshgrid(
                    torch.zeros(time, dtype=torch.long), torch.arange(height), torch.arange(width), indexing="ij"
                )
                pieces.append(torch.stack([axis.reshape(-1) for axis in axes]) + position)
                index += time * height * width
                position += max(height, width)
                continue
            end = index
            while end < len(token_ids) and token_ids[end] not in remaining:
                end += 1
            pieces.append(torch.arange(position, position + end - index).expand(3, -1))
            position += end - index
            index = end
        return torch.cat(pieces, dim=1)

    def units_inside(self, token_ids: Sequence[int], images: ImageInputs, start: int, stop: int) -> list[int]:
        sizes = [int(grid.prod()) // self.merge_size**2 for grid in images.grid]
        found: list[int] = []
        kinds = ((self.image_token_id, 0, images.num_images), (self.video_token_id, images.num_images, None))
        for placeholder, first, last in kinds:
            before = sum(token == placeholder for token in token_ids[:start])
            here = sum(token == placeholder for token in token_ids[start:stop])
            ends = torch.tensor(sizes[first:last]).cumsum(0).tolist()
            found += [first + index for index, end in enumerate(ends) if before < end <= before + here]
        return found

    def smallest(self) -> tuple[tuple[int, ...], ImageInputs]:
        vision, merge = self._vision, self.merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        black = ImageInputs(pixel_values=torch.zeros(merge**2, width), grid_thw=torch.tensor([[1, merge, merge]]))
        return (self.image_token_id,), black


@dataclass(frozen=True, kw_only=True)
class GridFamily(Family):
    """Implements families whose vision tower encodes patches on a grid and returns separate features per image."""

    vision_modules: tuple[str, ...] = ("visual",)
    num_position_axes = 3
    image_reader = GridReader

    def model_inputs(self, images: ImageInputs) -> dict[str, Tensor]:
        num_patches = int(images.grid[: images.num_images].prod(dim=1).sum())
        inputs: dict[str, Tensor] = {}
        if images.num_images:
            inputs["pixel_values"] = images.pixel_values[:num_patches]
            inputs["image_grid_thw"] = images.grid[: images.num_images]
        if images.frame_times:
            inputs["pixel_values_videos"] = images.pixel_values[num_patches:]
            inputs["video_grid_thw"] = images.grid[images.num_images :]
        return inputs

    def features(self, model: Any, images: Sequence[ImageInputs], device: torch.device) -> list[list[ImageFeatures]]:
        """Computes the features of all prompts' images in one pass of the tower."""
        pixel_values = torch.cat([one.pixel_values for one in images]).to(device)
        grid_thw = torch.cat([one.grid for one in images]).to(device)
        output = model.model.get_image_features(pixel_values, grid_thw, return_dict=True)
        levels = getattr(output, "deepstack_features", None) or ()  # only Qwen3-VL has them
        found = iter(
            ImageFeatures(embeddings=embeddings, levels=tuple(deeper))
            for embeddings, *deeper in zip(output.pooler_output, *levels, strict=True)
        )
        return [[next(found) for _ in range(one.num_units)] for one in images]

    def feature_inputs(self, features: Sequence[ImageFeatures], is_frame: Sequence[bool]) -> dict[str, object]:
        found: dict[str, object] = {}
        for kind, wanted in (("image", False), ("video", True)):
            chosen = [one for one, flag in zip(features, is_frame, strict=True) if flag == wanted]
            if chosen:
                found[kind] = SimpleNamespace(
                    pooler_output=tuple(one.embeddings for one in chosen),
                    deepstack_features=[tuple(level) for level in zip(*(one.levels for one in chosen), strict=True)],
                )
        return {"mm_encoder_outputs": found}


def _time_text(seconds: float) -> str:
    return f"<{seconds:.1f} seconds>"


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
