"""Reads videos: chooses frames evenly, decodes and resizes them one by one by Qwen's rules."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy
from PIL import Image

from cepo.data.image_files import content_or_path, name_of
from cepo.data.images import ImageRules, load_rgb, located
from cepo.errors import ConfigError, DataError, ForeignFileError
from cepo.files.safe_files import size_of

if TYPE_CHECKING:
    from cepo.models.interface import Video

_VIDEO_LIBRARIES = ("av", "qwen_vl_utils", "torchvision")
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif,asf"
"""FFmpeg's names of the accepted containers. Others name further files or addresses, which it would open: playlists."""
_QUARTER_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    -180: Image.Transpose.ROTATE_180,
    -90: Image.Transpose.ROTATE_270,
}
"""Maps the rotation that a video states, in degrees against the clock, to the one that shows its frames upright."""


def load_video(value: object, rules: ImageRules, *, fps: float, factor: int) -> Video:
    """Returns `fps` frames per second of a video: a path in `rules.image_dir`, bytes, a mapping with either, or a list of
    images, which are all shown.

    The sides of frames are multiples of `factor`, the patch size times the merge size. Each frame is upright, in RGB, and
    resized as soon as it is decoded. Raises `ConfigError` without the libraries of the extra `video`, and `DataError` if
    the video is not readable or too short.
    """
    missing = [library for library in _VIDEO_LIBRARIES if importlib.util.find_spec(library) is None]
    if missing:
        raise ConfigError(
            f"videos need {', '.join(missing)}, not installed here: pip install -e '.[video]', in cepo's checkout"
        )
    if isinstance(value, list | tuple):
        return _of_images(cast("Sequence[object]", value), rules, fps, factor)
    name = name_of(value, "video")
    source = _playable(value, rules.image_dir, name)
    with located(name):
        return _of_file(source, rules, fps, factor)


def _playable(value: object, image_dir: str | None, name: str) -> str | io.BytesIO:
    """Returns what FFmpeg opens: the path of a regular file in `image_dir`, or a file in memory."""
    value = content_or_path(value)
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str):
        raise DataError(
            f"{name} is a {type(value).__name__}; accepted: path, bytes, {{bytes, path}}, or a list of frames"
        )
    file = Path(image_dir or "") / value
    try:
        size_of(file, within=image_dir)
    except ForeignFileError as error:
        raise DataError(f"{name} {error.fault}") from error
    # A relative path could begin like the name of a protocol of FFmpeg: "concat:/other/file".
    return str(file.absolute())


def _of_images(values: Sequence[object], rules: ImageRules, fps: float, factor: int) -> Video:
    """Returns a video of images, with the last one twice if their number is odd."""
    from cepo.models.interface import Video  # loads torch, which the images of a report do not need

    if not values:
        raise DataError("the video has no frame")
    frames_in_pairs = [*values]
    if len(frames_in_pairs) % 2:
        frames_in_pairs.append(frames_in_pairs[-1])
    count = len(frames_in_pairs)
    images = (load_rgb(value, rules.image_dir, hosts=rules.image_hosts) for value in frames_in_pairs)
    return Video(
        frames=_resized(images, count, rules, factor),
        frame_numbers=tuple(range(count)),
        source_fps=fps,
        num_source_frames=count,
    )


def _of_file(source: str | io.BytesIO, rules: ImageRules, wanted_fps: float, factor: int) -> Video:
    from cepo.models.interface import Video  # loads torch, which the images of a report do not need

    total, fps = _length(source)
    numbers = _frame_numbers(total, fps, wanted_fps)
    pixels = _resized(_decoded(source, numbers, total), len(numbers), rules, factor)
    return Video(frames=pixels, frame_numbers=tuple(numbers), source_fps=fps, num_source_frames=total)


def _resized(frames: Iterable[Image.Image], count: int, rules: ImageRules, factor: int) -> numpy.ndarray:
    """Returns `count` frames, (count, height, width, 3) uint8, each resized to the size of the first within the limits."""
    size = (0, 0)
    pixels = numpy.empty((0, 0, 0, 3), numpy.uint8)
    for number, frame in enumerate(frames):
        if number == 0:
            size = _frame_size(frame.size, count, rules, factor)
            width, height = size
            pixels = numpy.empty((count, height, width, 3), numpy.uint8)
        resized = frame if frame.size == size else frame.resize(size, Image.Resampling.BICUBIC)
        pixels[number] = numpy.asarray(resized)
    return pixels


def _decoded(source: str | io.BytesIO, numbers: Sequence[int], total: int) -> Iterator[Image.Image]:
    """Yields the frames of a video of `total` frames with these numbers."""
    missing = list(numbers)
    with _opened(source) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number == missing[0]:
                yield _upright(frame)
                missing.pop(0)
            if not missing:
                return
    raise DataError(f"it announces {total} frames, but ends before frame {missing[0]}; it is damaged")


def _length(source: str | io.BytesIO) -> tuple[int, float]:
    """Returns the number of frames of a video, and how many are shown per second."""
    with _opened(source) as (container, stream):
        fps = stream.average_rate or stream.guessed_rate
        # Some files do not state their number of frames.
        total: int = stream.frames or sum(1 for _ in container.decode(stream))
    if not total or not fps:
        raise DataError("it has no frame, or does not state its frame rate")
    return total, float(fps)


def _upright(frame: Any) -> Image.Image:
    """Returns a frame in RGB, turned as the video states."""
    image = frame.to_image()
    turn = _QUARTER_TURNS.get(round(frame.rotation))
    return image if turn is None else image.transpose(turn)


@contextmanager
def _opened(source: str | io.BytesIO) -> Generator[tuple[Any, Any]]:
    import av.error

    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with av.open(source, options={"format_whitelist": _CONTAINERS}) as container:
            stream: Any = next(iter(container.streams.video), None)
            if stream is None or stream.codec_context is None:
                raise DataError("it has no video in it that can be decoded")
            yield container, stream
    except DataError:
        raise
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"it cannot be read ({error}); accepted: {_CONTAINERS}") from error


def _frame_numbers(total: int, fps: float, wanted_fps: float) -> list[int]:
    """Returns evenly spaced frame numbers from the first to the last frame of the video."""
    try:
        count = _qwen_rules().smart_nframes({"fps": wanted_fps}, total_frames=total, video_fps=fps)
    except ValueError as error:
        raise DataError(f"it has {total} frames; accepted: at least 2") from error
    return numpy.linspace(0, total - 1, int(count)).round().astype(int).tolist()


def _frame_size(size: tuple[int, int], num_frames: int, rules: ImageRules, factor: int) -> tuple[int, int]:
    """Returns (width, height) of each frame within the pixel limits; all frames together fit the model's context."""
    qwen = _qwen_rules()
    area = factor**2
    lowest = rules.min_pixels or qwen.VIDEO_MIN_TOKEN_NUM * area
    if rules.min_pixels is None and rules.max_pixels is not None and rules.max_pixels < lowest:
        lowest = area  # a configured limit wins over a default one
    share = qwen.MODEL_SEQ_LEN * area * 0.9 / num_frames * qwen.FRAME_FACTOR
    ceiling = max(min(qwen.VIDEO_MAX_TOKEN_NUM * area, share), int(lowest * 1.05))
    highest = min(rules.max_pixels or ceiling, ceiling)
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
