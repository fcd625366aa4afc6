"""What a model reads of a prompt: turns of a conversation, tokens, images and videos."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    from PIL.Image import Image
    from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """What one side said: `role` is system, user or assistant, `text` has one `<image>` per image and one `<video>` per video."""

    role: str
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Video:
    """Frames chosen from a source.

    Attributes:
        frames: (frames, height, width, 3) uint8, an even number of frames in RGB.
        frame_numbers: for each frame its place in the source, from 0.
        source_fps: frames per second of the source.
        num_source_frames: frames of the source.
    """

    frames: numpy.ndarray = field(repr=False)
    frame_numbers: tuple[int, ...]
    source_fps: float
    num_source_frames: int

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the frames in pixels."""
        _, height, width, _ = self.frames.shape
        return width, height

    def first_frame(self) -> Image:
        """As an image."""
        from PIL import Image

        return Image.fromarray(self.frames[0])

    def metadata(self) -> dict[str, Any]:
        """What transformers' and vLLM's processors are told beside the frames."""
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
        """Seconds of each temporal patch: the middle between its first and its last frame; the last frame fills the last one."""
        missing = -len(self.frame_numbers) % temporal_patch_size
        seconds = [number / self.source_fps for number in (*self.frame_numbers, *self.frame_numbers[-1:] * missing)]
        return tuple(
            (seconds[start] + seconds[start + temporal_patch_size - 1]) / 2
            for start in range(0, len(seconds), temporal_patch_size)
        )


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Where a prompt's images can be read again: a data set as `data.train_files` names it, and the row in it."""

    data: str
    row: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageInputs:
    """A prompt's images as the vision tower takes them; compared by identity.

    Families with a patch grid (`cepo.models.families.grid`) know each image by itself. A video is then a row of images, one per
    temporal patch: the tower attends within each of them alone. They stand behind the prompt's own images. The other
    families (`cepo.models.families.processed`) know all images of a prompt together, as their processor returned them.

    Attributes:
        pixel_values: with a grid (patches, channels x temporal patch x patch x patch), float32; else as the processor has it.
        grid_thw: (images, 3), patches along time, height and width; None without a grid.
        frame_times: for each video the seconds of its temporal patches.
        source: where the same images can be read, so that a handle travels in place of pixels; None if nowhere.
        more_tensors: the vision tower's further inputs, by the processor's names; none with a grid.
        expansions: for each image the token ids that replace its placeholder; none with a grid, which tells them.
    """

    pixel_values: Tensor = field(repr=False)
    grid_thw: Tensor | None = None
    source: ImageSource | None = None
    frame_times: tuple[tuple[float, ...], ...] = ()
    more_tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    expansions: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @property
    def grid(self) -> Tensor:
        """`grid_thw` of a family that has it."""
        assert self.grid_thw is not None, "these images are known together, not by a grid"
        return self.grid_thw

    @property
    def num_units(self) -> int:
        """Parts whose features are kept and placed by themselves: images and temporal patches, or all of a prompt as one."""
        return 1 if self.grid_thw is None else len(self.grid_thw)

    @property
    def num_encoded(self) -> int:
        """Images and temporal patches that go through the vision tower."""
        return len(self.expansions) if self.grid_thw is None else len(self.grid_thw)

    @property
    def num_images(self) -> int:
        """Images that are no part of a video."""
        if self.grid_thw is None:
            return len(self.expansions)
        return len(self.grid_thw) - sum(map(len, self.frame_times))

    @property
    def is_frame(self) -> tuple[bool, ...]:
        """For each unit whether it is part of a video."""
        first_frame = self.num_units if self.grid_thw is None else self.num_images
        return tuple(number >= first_frame for number in range(self.num_units))

    @cached_property
    def content_key(self) -> str:
        """Equal exactly where the images are, also in another process."""
        digest = hashlib.blake2b(digest_size=16)
        grid = {} if self.grid_thw is None else {"grid_thw": self.grid_thw}
        for name, tensor in (grid | dict(self.more_tensors) | {"pixel_values": self.pixel_values}).items():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(repr((self.frame_times, self.expansions)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A user turn with the assistant header behind it.

    Attributes:
        token_ids: with one placeholder per image token, as the trained model reads it.
        engine_ids: with one placeholder per image and per video, as the rollout engine reads it.
        images: None for text alone.
    """

    token_ids: tuple[int, ...]
    engine_ids: tuple[int, ...]
    images: ImageInputs | None
