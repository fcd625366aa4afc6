"""Reads videos: chooses frames evenly, decodes and resizes them by Qwen's rules."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy
from PIL import Image

from cepo.data.images import bytes_or_path, load_rgb
from cepo.errors import ConfigError, DataError
from cepo.foreign_files import size_of

if TYPE_CHECKING:
    from cepo.config.schema import DataConfig
    from cepo.models.inputs import Video

_VIDEO_LIBRARIES = ("av", "qwen_vl_utils", "torchvision")
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif,asf"
"""FFmpeg's names of the accepted containers. Others name further files or addresses, which it would open: playlists."""


def load_video(value: object, config: DataConfig, *, factor: int) -> Video:
    """Returns the chosen frames of a video: a path in `data.image_dir`, bytes, a mapping with either, or a list of images.

    The sides of frames are multiples of `factor`, the patch size times the merge size. Raises `ConfigError` without the
    libraries of the extra `video`, `DataError` if the video is not readable or too short.
    """
    missing = [library for library in _VIDEO_LIBRARIES if importlib.util.find_spec(library) is None]
    if missing:
        raise ConfigError(f"videos need {', '.join(missing)}, not installed here: pip install 'cepo[video]'")
    if isinstance(value, list | tuple):
        frames = [load_rgb(frame, config.image_dir) for frame in cast("Sequence[object]", value)]
        if not frames:
            raise DataError("the video has no frame")
        frames += frames[-1:] * (len(frames) % 2)
        return _of_frames(dict(enumerate(frames)), config, factor, fps=config.video_fps, total=len(frames))
    value = bytes_or_path(value)
    if isinstance(value, bytes):
        return _decoded_video(io.BytesIO(value), config, factor)
    if isinstance(value, str):
        file = Path(config.image_dir or "") / value
        size_of(file, within=config.image_dir)
        return _decoded_video(str(file), config, factor)
    raise DataError(
        f"the video is a {type(value).__name__}; accepted: path, bytes, {{bytes, path}}, or a list of frames"
    )


def _decoded_video(source: object, config: DataConfig, factor: int) -> Video:
    with _opened(source) as (container, stream):
        total = stream.frames or sum(1 for _ in container.decode(stream))  # not every file states it
        fps = stream.average_rate or stream.guessed_rate
    if not total or not fps:
        raise DataError("the video has no frame, or does not state its frame rate")
    wanted = _frame_numbers(total, float(fps), config.video_fps)
    frames: dict[int, Image.Image] = {}
    if isinstance(source, io.BytesIO):
        source.seek(0)
    with _opened(source) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                frames[number] = frame.to_image()
            if number >= wanted[-1]:
                break
    lost = [number for number in wanted if number not in frames]
    if lost:
        raise DataError(f"the video announces {total} frames, but ends before frame {lost[0]}; it is damaged")
    return _of_frames({number: frames[number] for number in wanted}, config, factor, fps=float(fps), total=total)


def _of_frames(frames: Mapping[int, Image.Image], config: DataConfig, factor: int, *, fps: float, total: int) -> Video:
    from cepo.models.inputs import Video  # loads torch, which the images of a report do not need

    chosen = list(frames.values())
    size = _frame_size(chosen[0].size, len(chosen), config, factor)
    resized = [frame if frame.size == size else frame.resize(size, Image.Resampling.BICUBIC) for frame in chosen]
    pixels = numpy.stack([numpy.asarray(frame.convert("RGB")) for frame in resized])
    return Video(frames=pixels, frame_numbers=tuple(frames), source_fps=fps, num_source_frames=total)


@contextmanager
def _opened(source: object) -> Generator[tuple[Any, Any]]:
    import av

    try:
        with av.open(source, options={"format_whitelist": _CONTAINERS}) as container:
            if not container.streams.video:
                raise DataError("the file has no video in it")
            yield container, container.streams.video[0]
    except (OSError, ValueError) as error:  # PyAV raises both; DataError is a ValueError too
        if isinstance(error, DataError):
            raise
        raise DataError(f"the video cannot be read ({error}); accepted: {_CONTAINERS}") from error


def _frame_numbers(total: int, fps: float, wanted_fps: float) -> list[int]:
    """Returns evenly spaced frame numbers from the first to the last frame of the video."""
    try:
        count = _qwen_rules().smart_nframes({"fps": wanted_fps}, total_frames=total, video_fps=fps)
    except ValueError as error:
        raise DataError(f"the video has {total} frames; accepted: at least 2") from error
    return numpy.linspace(0, total - 1, int(count)).round().astype(int).tolist()


def _frame_size(size: tuple[int, int], num_frames: int, config: DataConfig, factor: int) -> tuple[int, int]:
    """Returns (width, height) of each frame within the pixel limits; all frames together fit the model's context."""
    qwen = _qwen_rules()
    area = factor**2
    lowest = config.min_pixels or qwen.VIDEO_MIN_TOKEN_NUM * area
    if config.min_pixels is None and config.max_pixels is not None and config.max_pixels < lowest:
        lowest = area  # a configured limit wins over a default one
    share = qwen.MODEL_SEQ_LEN * area * 0.9 / num_frames * qwen.FRAME_FACTOR
    ceiling = max(min(qwen.VIDEO_MAX_TOKEN_NUM * area, share), int(lowest * 1.05))
    highest = min(config.max_pixels or ceiling, ceiling)
    width, height = size
    try:
        height, width = qwen.smart_resize(
            height, width, factor=factor, min_pixels=lowest, max_pixels=max(lowest, highest)
        )
    except ValueError as error:
        raise DataError(f"the video's frames are {size[0]} x {size[1]}: {error}") from error
    return width, height


def _qwen_rules() -> Any:
    from qwen_vl_utils import vision_process  # pyright: ignore[reportMissingTypeStubs]

    return vision_process
