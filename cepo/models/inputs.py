"""Defines the types of a model's inputs: conversation turns, images, videos and encoded prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy
import torch
from jaxtyping import Int64
from PIL import Image
from torch import Tensor

from cepo.trees import Tree


@dataclass(frozen=True)
class Turn:
    """One message: `role` is system, user or assistant; `text` has an `<image>` per image and a `<video>` per video."""

    role: str
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Video:
    """The frames sampled from a video file.

    Attributes:
        frames: (frames, height, width, 3) uint8, an even number of frames in RGB.
        frame_numbers: the 0-based index of each frame in the source.
        source_fps: frames per second of the source.
        num_source_frames: number of frames of the source.
    """

    frames: numpy.ndarray = field(repr=False)
    frame_numbers: tuple[int, ...]
    source_fps: float
    num_source_frames: int

    @property
    def size(self) -> tuple[int, int]:
        _, height, width, _ = self.frames.shape
        return width, height

    def some_frames(self, most: int = 4) -> list[Image.Image]:
        """Returns at most `most` evenly spaced frames as images, starting with the first."""
        return [Image.fromarray(frame) for frame in self.frames[:: -(-len(self.frames) // most)]]

    def metadata(self) -> Tree:
        """Returns the metadata that the processors of transformers and vLLM need with the frames."""
        width, height = self.size
        return {
            "fps": self.source_fps,
            "total_num_frames": self.num_source_frames,
            "duration": self.num_source_frames / self.source_fps,
            "frames_indices": list(self.frame_numbers),
            "width": width,
            "height": height,
            "video_backend": "pyav",
        }

    def times(self, temporal_patch_size: int) -> tuple[float, ...]:
        """Returns each temporal patch's time in seconds: the mean of its first and last frame's times.

        Copies of the last frame fill an incomplete last patch.
        """
        missing = -len(self.frame_numbers) % temporal_patch_size
        seconds = [number / self.source_fps for number in (*self.frame_numbers, *self.frame_numbers[-1:] * missing)]
        return tuple(
            (seconds[start] + seconds[start + temporal_patch_size - 1]) / 2
            for start in range(0, len(seconds), temporal_patch_size)
        )


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """The row of a dataset, named as in `data.train_files`, from which a prompt's images can be read again.

    `column` is None for the column `data.image_key`.
    """

    data: str
    row: int
    column: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageInputs:
    """The images of a prompt as inputs of the vision tower; compared by identity.

    Families with a patch grid treat each image separately. A video is then a sequence of images, one per temporal
    patch, because the tower attends only within each patch; these follow the prompt's own images. Other families keep
    all images of a prompt together, as their processor returns them.

    Attributes:
        pixel_values: with a grid (patches, channels x temporal patch x patch x patch), float32; else as processed.
        grid_thw: (images, 3), patches along time, height and width; None without a grid.
        frame_times: for each video the times of its temporal patches in seconds.
        source: where the images can be read again, so that it can be sent instead of pixels; None if nowhere.
        more_tensors: the vision tower's further inputs, by the processor's names; empty with a grid.
        expansions: for each image the token ids that replace its placeholder; empty with a grid, which determines them.
    """

    pixel_values: Tensor = field(repr=False)
    grid_thw: Tensor | None = None
    source: ImageSource | None = None
    frame_times: tuple[tuple[float, ...], ...] = ()
    more_tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    expansions: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @property
    def grid(self) -> Tensor:
        assert self.grid_thw is not None, "these images are known together, not by a grid"
        return self.grid_thw

    @property
    def num_units(self) -> int:
        """The number of units with separate features: images and temporal patches with a grid, else 1 per prompt."""
        return 1 if self.grid_thw is None else len(self.grid_thw)

    @property
    def num_encoded(self) -> int:
        """The number of images and temporal patches that go through the vision tower."""
        return len(self.expansions) if self.grid_thw is None else len(self.grid_thw)

    @property
    def num_images(self) -> int:
        """The number of images that do not belong to a video."""
        return self.num_encoded - sum(map(len, self.frame_times))

    @property
    def is_frame(self) -> tuple[bool, ...]:
        """Whether each unit belongs to a video."""
        return tuple(number >= self.num_images for number in range(self.num_units))

    @cached_property
    def content_key(self) -> str:
        """A hash of the images' content, equal for equal images in all processes."""
        digest = hashlib.blake2b(digest_size=16)
        grid = {} if self.grid_thw is None else {"grid_thw": self.grid_thw}
        for name, tensor in (grid | dict(self.more_tensors) | {"pixel_values": self.pixel_values}).items():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(repr((self.frame_times, self.expansions)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A tokenised prompt that ends with the assistant header.

    Attributes:
        token_ids: the trained model's input, with one placeholder per image token.
        engine_ids: the rollout engine's input, with one placeholder per image and per video.
        images: the prompt's images and videos; None for text only.
        teacher_images: what teachers see instead of `images`; None if they see the same.
    """

    token_ids: tuple[int, ...]
    engine_ids: tuple[int, ...]
    images: ImageInputs | None
    teacher_images: ImageInputs | None = None


def sequence_positions(context: Int64[Tensor, "3 C"], num_response_tokens: int) -> Int64[Tensor, "3 L"]:
    """Appends the response's positions, which continue after the context's largest position on all axes."""
    start = int(context.max()) + 1
    return torch.cat([context, torch.arange(start, start + num_response_tokens).expand(3, -1)], dim=1)
