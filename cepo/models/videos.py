"""A video as the processor, the rollout engine and the trainer take it: some of its frames, and when they were shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy
from PIL import Image


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

    def first_frame(self) -> Image.Image:
        """As a picture."""
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
