"""Which rows of a source can be used: every row is checked once, and the outcome is kept for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cepo.config.schema import DataConfig
from cepo.errors import DataError

logger = logging.getLogger(__name__)

_ROWS_FOR_A_BAR = 200
"""Fewer are checked before a bar could be read."""


def user_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/cepo`, or `~/.cache/cepo` where that variable is empty."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cepo"


@dataclass(frozen=True, kw_only=True)
class RowChecks:
    """The outcome of checking a source.

    Attributes:
        num_rows: rows of the source.
        bad, overlong: numbers of the rows left out.
        most_images, most_videos: the most pictures and videos a usable row has.
        shortest_overlong, longest_overlong: tokens of the shortest and longest prompt that was left out for its length.
        visual_tokens: of the shortest of them, those of its pictures and videos.
    """

    num_rows: int
    bad: Sequence[int]
    overlong: Sequence[int]
    most_images: int
    most_videos: int = 0
    shortest_overlong: int = 0
    longest_overlong: int = 0
    visual_tokens: int = 0

    @property
    def usable(self) -> list[int]:
        """Numbers of the rows that can be used."""
        left_out = {*self.bad, *self.overlong}
        return [number for number in range(self.num_rows) if number not in left_out]


@dataclass(frozen=True, kw_only=True)
class RowMeasure:
    """A row's prompt: its length in tokens, those of pictures and videos (`visual_tokens`) included, and how many it has."""

    length: int
    num_images: int
    num_videos: int = 0
    visual_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """What is done with rows that cannot be used as they are; see the settings of the same names."""

    max_prompt_length: int
    filter_overlong_prompts: bool
    skip_bad_rows: bool


def check_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    num_rows: int,
    source: str,
    rules: RowRules,
    measure: Callable[[Mapping[str, Any]], RowMeasure],
) -> RowChecks:
    """Applies `measure` to every row.

    Raises:
        DataError: a bad or overlong row, where the rules do not leave it out.
    """
    bad: list[int] = []
    overlong: list[int] = []
    too_long: list[RowMeasure] = []
    most_images = most_videos = 0
    for number, row in enumerate(_with_progress(rows, num_rows, source)):
        try:
            measured = measure(row)
        except DataError as error:
            if not rules.skip_bad_rows:
                raise DataError(
                    f"{source}, row {number}: {error}. data.skip_bad_rows=true leaves such rows out"
                ) from error
            bad.append(number)
            logger.warning("%s, row %d is left out: %s", source, number, error)
            continue
        if measured.length > rules.max_prompt_length:
            if not rules.filter_overlong_prompts:
                raise DataError(
                    f"{source}, row {number}: the prompt has {measured.length} tokens{_of_pictures(measured.visual_tokens)}; "
                    f"data.max_prompt_length is {rules.max_prompt_length}. data.filter_overlong_prompts=true leaves such rows out"
                )
            overlong.append(number)
            too_long.append(measured)
            continue
        most_images = max(most_images, measured.num_images)
        most_videos = max(most_videos, measured.num_videos)
    shortest = min(too_long, key=lambda measured: measured.length, default=RowMeasure(length=0, num_images=0))
    return RowChecks(
        num_rows=num_rows,
        bad=bad,
        overlong=overlong,
        most_images=most_images,
        most_videos=most_videos,
        shortest_overlong=shortest.length,
        longest_overlong=max((measured.length for measured in too_long), default=0),
        visual_tokens=shortest.visual_tokens,
    )


def why_none_is_usable(checks: RowChecks, source: str, config: DataConfig) -> str:
    """What to tell where no row is left."""
    limit = config.max_prompt_length
    if not checks.num_rows:
        return f"{source} has no row; accepted: at least one problem"
    if checks.bad:
        left_out = f"{len(checks.bad)} bad and {len(checks.overlong)} longer than data.max_prompt_length={limit} tokens"
        return f"{source}: none of its {checks.num_rows} rows can be used: {left_out}. The warnings above name each bad one"
    enlarged = (
        f". Images of fewer pixels than data.min_pixels={config.min_pixels} are enlarged to that many; "
        "data.min_pixels=null leaves them as they are"
    )
    return (
        f"{source}: all of its {checks.num_rows} prompts are overlong: they have {checks.shortest_overlong} to "
        f"{checks.longest_overlong} tokens{_of_pictures(checks.visual_tokens, 'in the shortest ')}, and "
        f"data.max_prompt_length={limit}. Raise it to {checks.longest_overlong} for all of them"
        + (enlarged if checks.visual_tokens and config.min_pixels is not None else "")
    )


def _of_pictures(tokens: int, where: str = "") -> str:
    return f" ({where}{tokens} of them of images and videos)" if tokens else ""


def remembered_checks(identity: Mapping[str, Any], *, num_rows: int, check: Callable[[], RowChecks]) -> RowChecks:
    """The outcome of `check`, from the user's cache where one with the same `identity` is there.

    `identity` holds all that determines the outcome, as JSON values; the code that checks is added to it. Only outcomes are
    kept, not errors. A cache that cannot be read or written costs time, nothing else.
    """
    file = user_cache_folder() / "row-checks" / f"{_digest(identity)}.json"
    known = _read(file, num_rows)
    if known is not None:
        logger.info("the %d rows were checked by an earlier run: %s", num_rows, file)
        return known
    checked = check()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        beside.write_text(json.dumps(asdict(checked)), encoding="utf-8")
        os.replace(beside, file)
    except OSError as error:
        logger.warning("the outcome of checking rows is not kept for the next start: %s", error)
    return checked


def file_identity(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, size in bytes and time of change in ns of each file; -1 for one that is missing."""
    found = []
    for file in files:
        try:
            status = file.stat()
        except (OSError, ValueError):  # ValueError: a null byte
            found.append((str(file.absolute()), -1, -1))
            continue
        found.append((str(file.absolute()), status.st_size, status.st_mtime_ns))
    return found


def _digest(identity: Mapping[str, Any]) -> str:
    from cepo.data import dataset, images, messages, sources, videos
    from cepo.models import families, processing

    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    modules = [Path(str(part.__file__)) for part in (dataset, images, messages, sources, videos, processing)]
    for module in (Path(__file__), *modules, *sorted(Path(str(families.__file__)).parent.glob("*.py"))):
        digest.update(hashlib.sha256(module.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _read(file: Path, num_rows: int) -> RowChecks | None:
    try:
        known = RowChecks(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be read, so rows are checked again: %s", file, error)
        return None
    return known if known.num_rows == num_rows else None


def _with_progress(rows: Iterable[Mapping[str, Any]], num_rows: int, source: str) -> Iterator[Mapping[str, Any]]:
    """The rows, with a bar on standard error while they are read; none without a terminal."""
    if num_rows < _ROWS_FOR_A_BAR or not sys.stderr.isatty():
        yield from rows
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(
        rows, total=num_rows, description=f"checking {source}", console=Console(stderr=True), transient=True
    )
