"""Implements what Qwen-VL families share: images on a patch grid with M-RoPE positions.

The placeholder of an image of (h, w) patches is replaced by h w / merge^2 tokens, and each image has its own features.
Therefore equal images are encoded once, and rows that share an image can be packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Int64
from PIL.Image import Image
from torch import Tensor

from cepo.errors import DataError
from cepo.models.families.family import EncodeText, Family, ImageFeatures, ImageReader
from cepo.models.inputs import ImageInputs, ImageSource, Video
from cepo.models.positions import context_positions


class GridReader(ImageReader):
    """Reads images as patches on a grid and, with `reads_videos`, videos as images preceded by their times."""

    def __init__(self, processor: Any, config: Any, encode_text: EncodeText, *, reads_videos: bool) -> None:
        self._images: Any = processor.image_processor
        self._videos: Any = getattr(processor, "video_processor", None) if reads_videos else None  # older folders
        self._vision, self._encode_text = config.vision_config, encode_text
        self.image_token_id: int = config.image_token_id
        self.placeholder_id = self.image_token_id
        self.video_token_id = config.video_token_id if reads_videos else None
        self._around_a_frame: tuple[int, int] = (config.vision_start_token_id, config.vision_end_token_id)
        self.merge_size: int = self._images.merge_size

    def read(self, images: Sequence[Image], source: ImageSource | None = None) -> ImageInputs:
        values = self._images(images=list(images), return_tensors="pt")
        return ImageInputs(pixel_values=values["pixel_values"], grid_thw=values["image_grid_thw"], source=source)

    def read_visuals(self, images: Sequence[Image], videos: Sequence[Video], source: ImageSource | None) -> ImageInputs:
        """See `ImageReader.read_visuals`. A video becomes images, one per temporal patch, after the other images."""
        reader = self._video_reader
        own = self.read(images, source) if images else None
        values = reader(
            videos=[video.frames for video in videos],
            video_metadata=[video.metadata() for video in videos],
            do_sample_frames=False,
            return_tensors="pt",
        )
        grids = values["video_grid_thw"].repeat_interleave(values["video_grid_thw"][:, 0], dim=0)
        grids[:, 0] = 1
        pixels = values["pixel_values_videos"]
        return ImageInputs(
            pixel_values=pixels if own is None else torch.cat([own.pixel_values, pixels]),
            grid_thw=grids if own is None else torch.cat([own.grid, grids]),
            frame_times=tuple(video.times(reader.temporal_patch_size) for video in videos),
        )

    def num_tokens(self, size: tuple[int, int]) -> int:
        """See `ImageReader.num_tokens`; no pixel is read."""
        width, height = size
        return int(self._images.get_number_of_image_patches(height, width, {})) // self.merge_size**2

    def num_video_tokens(self, video: Video) -> int:
        """See `ImageReader.num_video_tokens`; no pixel is read."""
        width, height = video.size
        times = video.times(self._video_reader.temporal_patch_size)
        patches = self._video_reader.get_num_of_video_patches(len(video.frames), height, width, {})
        around = sum(len(self._encode_text(_time_text(time))) + len(self._around_a_frame) for time in times)
        return int(patches) // self.merge_size**2 + around

    @property
    def video_factor(self) -> int:
        return self._video_reader.patch_size * self._video_reader.merge_size

    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        """Replaces an image's placeholder by one per image token, and a video's by its frames, each after its time."""
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
        return context_positions(
            token_ids,
            images,
            image_token_id=self.image_token_id,
            merge_size=self.merge_size,
            video_token_id=self.video_token_id,
        )

    def units_inside(self, token_ids: Sequence[int], images: ImageInputs, start: int, stop: int) -> list[int]:
        """Returns the images and then the video frames whose last placeholder is in [start, stop)."""
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
        """See `ImageReader.smallest`: one image token."""
        vision, merge = self._vision, self.merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        black = ImageInputs(pixel_values=torch.zeros(merge**2, width), grid_thw=torch.tensor([[1, merge, merge]]))
        return (self.image_token_id,), black

    @property
    def _video_reader(self) -> Any:
        if self._videos is None:
            raise DataError(
                "the row has videos, which are not supported for this model; docs/models.md lists the models that read videos"
            )
        return self._videos


class GridFamily(Family):
    """Implements families whose vision tower encodes patches on a grid and returns separate features per image."""

    num_position_axes = 3
    vision_modules = ("visual",)

    def image_reader(self, processor: Any, config: Any, encode_text: EncodeText) -> ImageReader:
        return GridReader(processor, config, encode_text, reads_videos=self.reads_videos)

    def placeholders(self, config: Any) -> tuple[int | None, int | None]:
        """Returns the image token and, if videos are read, the video token."""
        return config.image_token_id, config.video_token_id if self.reads_videos else None

    def model_inputs(self, images: ImageInputs) -> dict[str, Tensor]:
        """Returns patches and grids of images and videos; a video's grid has one row per temporal patch."""
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

    def feature_inputs(self, features: Sequence[ImageFeatures], is_frame: Sequence[bool]) -> dict[str, Any]:
        """See `Family.feature_inputs`; images and video frames are separate entries."""
        found: dict[str, Any] = {}
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
