"""Builds a built-in toy task, a checkpoint folder and a Parquet file for each split, of generated geometry problems.

The answer of a problem needs a quantity that only the image shows. A problem is a pure function of (seed, stream,
index). The numbers in the text are independent of that quantity, so the text alone does not reveal it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

from cepo.errors import DataError
from cepo.files.trees import Tree
from cepo.run_folder.pictures import png_bytes
from cepo.terminal.progress import phase

if TYPE_CHECKING:
    from cepo.config import RunConfig

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """A kind of problem; `answer` computes it from the quantity in the image and the numbers in the text."""

    seen_values: tuple[str, ...]
    draw_numbers: Callable[[random.Random], Numbers]
    question: Callable[[Numbers], str]
    answer: Callable[[str, Numbers], int]


@dataclass(frozen=True)
class Problem:
    """A problem without its image: `seen` is the quantity in the image, `numbers` are those in the text."""

    family: str
    seen: str
    numbers: Numbers
    seed: int
    stream: str
    index: int

    @property
    def question(self) -> str:
        return FAMILIES[self.family].question(self.numbers)

    @property
    def answer(self) -> str:
        return str(FAMILIES[self.family].answer(self.seen, self.numbers))

    @property
    def id(self) -> str:
        return f"{self.stream}-{self.seed}-{self.index}"


def _remaining_angle(seen: str, numbers: Numbers) -> int:
    count = int(seen)
    return (180 * (count - 2) - sum(numbers)) // (count - 2)


def _two_different_lengths(rng: random.Random) -> Numbers:
    width = rng.randint(11, 29)
    heights = [height for height in range(11, 30) if abs(height - width) >= 2]
    return width, rng.choice(heights)


FAMILIES: dict[str, Family] = {
    "perimeter": Family(
        ("3", "4", "5", "6"),
        lambda rng: (rng.randint(3, 15),),
        lambda numbers: f"Each side is {numbers[0]}. What is the perimeter?",
        lambda seen, numbers: int(seen) * numbers[0],
    ),
    "angle": Family(
        ("3", "4", "5"),
        lambda rng: (6 * rng.randint(5, 14), 6 * rng.randint(5, 14)),
        lambda numbers: f"Two angles are {numbers[0]} and {numbers[1]}, the others equal. How large is one of them?",
        _remaining_angle,
    ),
    "ticks": Family(
        ("2", "3", "4", "5", "6"),
        lambda rng: (rng.randint(3, 15),),
        lambda numbers: f"Each part is {numbers[0]}. How long is the bar?",
        lambda seen, numbers: int(seen) * numbers[0],
    ),
    "fence": Family(
        ("width", "height"),
        _two_different_lengths,
        lambda numbers: f"The yard is {numbers[0]} wide and {numbers[1]} high. How long is the fence?",
        lambda seen, numbers: 2 * sum(numbers) - numbers[0 if seen == "width" else 1],
    ),
}


def generate_problem(seed: int, index: int, *, stream: str = "train") -> Problem:
    """Returns problem number `index` of a stream; families alternate."""
    rng = random.Random(f"{stream}/{seed}/{index}")
    name, family = list(FAMILIES.items())[index % len(FAMILIES)]
    seen = rng.choice(family.seen_values)
    numbers = family.draw_numbers(rng)
    return Problem(name, seen, numbers, seed, stream, index)


IMAGE_SIDE = 64
PATCH_SIZE = 16
MERGE_SIZE = 2
_OVERSAMPLING = 2
_MAX_TURN_RADIANS = 0.25
INKS = ((20, 20, 60), (70, 10, 10), (10, 60, 20), (50, 20, 70), (25, 25, 25))
FILLS = ((120, 160, 235), (235, 150, 120), (130, 210, 140), (215, 170, 230), (225, 205, 110))
PAPERS = ((255, 255, 255), (246, 246, 240), (240, 246, 255))

Point = tuple[float, float]


def draw_figure(problem: Problem) -> Image.Image:
    """Draws the image of a problem (RGB, 64x64), a pure function of the problem."""
    rng = random.Random(f"figure/{problem.stream}/{problem.seed}/{problem.index}")
    side = IMAGE_SIDE * _OVERSAMPLING
    image = Image.new("RGB", (side, side), rng.choice(PAPERS))
    draw = ImageDraw.Draw(image)
    ink = rng.choice(INKS)
    fill = rng.choice(FILLS)
    if problem.family in ("perimeter", "angle"):
        _draw_polygon(draw, rng, int(problem.seen), ink, fill)
    elif problem.family == "ticks":
        _draw_ticked_bar(draw, rng, int(problem.seen), ink, fill)
    else:
        _draw_open_fence(draw, rng, problem.seen, ink, fill)
    return image.reduce(_OVERSAMPLING)


def _pixels(point: Point) -> Point:
    x, y = point
    return x * _OVERSAMPLING, y * _OVERSAMPLING


def _box(top_left: Point, bottom_right: Point) -> tuple[float, float, float, float]:
    """Returns a rectangle in pixels, as Pillow takes it."""
    return (*_pixels(top_left), *_pixels(bottom_right))


def _draw_polygon(draw: ImageDraw.ImageDraw, rng: random.Random, count: int, ink: tuple, fill: tuple) -> None:
    centre_x = 32 + rng.uniform(-2, 2)
    centre_y = 32 + rng.uniform(-2, 2)
    radius = rng.uniform(23, 26)
    first_angle = rng.uniform(-_MAX_TURN_RADIANS, _MAX_TURN_RADIANS) - math.pi / 2
    corners: list[Point] = []
    for number in range(count):
        angle = first_angle + 2 * math.pi * number / count
        corner = (centre_x + radius * math.cos(angle), centre_y + radius * math.sin(angle))
        corners.append(_pixels(corner))
    draw.polygon(corners, fill=fill)
    dot = 4.0 * _OVERSAMPLING
    for x, y in corners:
        draw.ellipse((x - dot, y - dot, x + dot, y + dot), fill=ink)


def _draw_ticked_bar(draw: ImageDraw.ImageDraw, rng: random.Random, count: int, ink: tuple, fill: tuple) -> None:
    """Draws a horizontal bar cut into `count` equal parts, with a tick at every cut and at both ends."""
    left = rng.uniform(4, 6)
    right = 64 - rng.uniform(4, 6)
    middle = 32 + rng.uniform(-4, 4)
    draw.rectangle(_box((left, middle - 6), (right, middle + 6)), fill=fill)
    for number in range(count + 1):
        x = left + (right - left) * number / count
        draw.rectangle(_box((x - 1.5, middle - 14), (x + 1.5, middle + 14)), fill=ink)


def _draw_open_fence(draw: ImageDraw.ImageDraw, rng: random.Random, seen: str, ink: tuple, fill: tuple) -> None:
    """Draws a yard with a fence on three sides; the open one is a width (top or bottom) or height (left or right)."""
    left = 8 + rng.uniform(-2, 2)
    top = 8 + rng.uniform(-2, 2)
    right = 56 + rng.uniform(-2, 2)
    bottom = 56 + rng.uniform(-2, 2)
    open_side = rng.choice(("top", "bottom") if seen == "width" else ("left", "right"))
    sides = {
        "top": ((left, top), (right, top)),
        "bottom": ((left, bottom), (right, bottom)),
        "left": ((left, top), (left, bottom)),
        "right": ((right, top), (right, bottom)),
    }
    draw.rectangle(_box((left, top), (right, bottom)), fill=fill)
    for name, (start, end) in sides.items():
        if name != open_side:
            draw.line([_pixels(start), _pixels(end)], fill=ink, width=6 * _OVERSAMPLING)


@dataclass(frozen=True, kw_only=True)
class WorldKind:
    """The definition of a built-in toy task."""

    name: str
    assets: Path  # the folder of the shipped weights; the code beside it belongs to the world's fingerprint
    generate: Callable[..., Problem]  # generate(seed, index, stream=...)
    draw: Callable[[Any], Image.Image]
    solution: Callable[[Any], str] | None = None  # the correct response for the column `solution`; None without it
    held_out: tuple[str, ...] = ()  # splits besides `train` and `validation`, each with its own distribution

    @property
    def splits(self) -> tuple[str, ...]:
        return "train", "validation", *self.held_out


SHAPES = WorldKind(name="shapes", assets=Path(__file__).parent / "assets", generate=generate_problem, draw=draw_figure)
ASSETS = SHAPES.assets
_MANIFEST = "world.json"


@dataclass(frozen=True)
class World:
    """The paths of a built world."""

    folder: Path

    @property
    def model_path(self) -> Path:
        return self.folder / "model"

    def split_file(self, split: str) -> Path:
        return self.folder / f"{split}.parquet"


def build_world(
    folder: Path | None = None,
    *,
    kind: WorldKind = SHAPES,
    seed: int = 0,
    num_train: int = 4096,
    num_validation: int = 512,
) -> World:
    """Builds the world in `folder`, or reuses one that was built there with the same arguments and code.

    The folder is by default `microgeo-<fingerprint>` in `$XDG_CACHE_HOME/cepo` or `~/.cache/cepo`. An interrupted build
    leaves no partial world. Each held-out split has `num_validation` problems too. Raises `DataError` if the folder
    holds something else, or a count is not positive.
    """
    if num_train < 1 or num_validation < 1:
        raise DataError(
            f"A world needs problems: num_train={num_train}, num_validation={num_validation}; both must be at least 1."
        )
    fingerprint = _fingerprint(kind, seed, num_train, num_validation)
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cepo" / f"microgeo-{fingerprint[:12]}"
    folder = folder.expanduser().absolute()
    world = World(folder)
    if _built_fingerprint(folder) == fingerprint:
        return world
    building = World(folder.with_name(f".{folder.name}.building-{os.getpid()}"))
    old = building.folder.with_name(f"{building.folder.name}-old")
    shutil.rmtree(building.folder, ignore_errors=True)
    building.folder.mkdir(parents=True)
    try:
        with phase(f"building the built-in toy task in {folder}"):
            problems_of_splits = split_problems(seed, num_train, num_validation, kind)
            for split, problems in zip(kind.splits, problems_of_splits, strict=True):
                write_problems(building.split_file(split), problems, kind)
            shutil.copytree(kind.assets, building.model_path)
            manifest = json.dumps({"fingerprint": fingerprint, "seed": seed}, indent=2)
            (building.folder / _MANIFEST).write_text(manifest + "\n", encoding="utf-8")
        if _built_fingerprint(folder) != fingerprint:  # another process may have built it meanwhile
            if folder.exists():
                folder.rename(old)
            building.folder.rename(folder)
    finally:
        for leftover in (building.folder, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return world


def split_problems(seed: int, num_train: int, num_validation: int, kind: WorldKind = SHAPES) -> list[list[Problem]]:
    """Returns each split's problems, from the stream of its name; none repeats a training problem's image and text."""
    train = [kind.generate(seed, index, stream="train") for index in range(num_train)]
    training_contents = {_content(problem, kind) for problem in train}
    splits = [train]
    for stream in kind.splits[1:]:
        problems: list[Problem] = []
        for index in itertools.count():
            if len(problems) == num_validation:
                break
            problem = kind.generate(seed, index, stream=stream)
            if _content(problem, kind) not in training_contents:
                problems.append(problem)
        splits.append(problems)
    return splits


def _content(problem: Problem, kind: WorldKind) -> tuple[str, bytes]:
    """Returns what a model sees of a problem: its text and its image's pixels."""
    return problem.question, kind.draw(problem).tobytes()


def write_problems(file: Path, problems: Iterable[Problem], kind: WorldKind = SHAPES) -> None:
    """Writes a Parquet file with the columns images, problem, answer (as in Geo3k), id, family, and solution if any."""
    from datasets import Dataset, Features, Image, List, Value, disable_progress_bars

    disable_progress_bars()  # they would disturb the caller's
    types: Tree = {
        "images": List(Image()),
        "problem": Value("string"),
        "answer": Value("string"),
        "id": Value("int64"),
        "family": Value("string"),
    }
    if kind.solution is not None:
        types["solution"] = Value("string")
    rows: list[Tree] = []
    for problem in problems:
        row: Tree = {
            "images": [{"bytes": png_bytes(kind.draw(problem)), "path": f"{problem.id}.png"}],
            "problem": f"<image>{problem.question}",
            "answer": problem.answer,
            "id": problem.index,
            "family": problem.family,
        }
        if kind.solution is not None:
            row["solution"] = kind.solution(problem)
        rows.append(row)
    Dataset.from_list(rows, features=Features(types)).to_parquet(str(file))


def _built_fingerprint(folder: Path) -> str | None:
    """Returns the fingerprint of the world in the folder; None if there is no such folder or it is empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    manifest = folder / _MANIFEST
    if not manifest.is_file():
        raise DataError(
            f"{folder} exists and is not a built-in toy task (it has no {_MANIFEST}); name a new or empty folder."
        )
    return json.loads(manifest.read_text(encoding="utf-8"))["fingerprint"]


def _fingerprint(kind: WorldKind, *arguments: int) -> str:
    """Hashes everything that determines the world: arguments, this package's code and the kind's, and the weights."""
    digest = hashlib.sha256(json.dumps((kind.name, *arguments)).encode())
    files: list[Path] = []
    for folder in dict.fromkeys((Path(__file__).parent, kind.assets.parent)):  # each once
        files += sorted(folder.glob("*.py"))
    files += sorted(kind.assets.glob("*"))
    for file in files:
        content_digest = hashlib.sha256(file.read_bytes()).digest()
        digest.update(file.name.encode() + b"\0" + content_digest)
    return digest.hexdigest()


def with_embedded_world(config: RunConfig) -> RunConfig:
    """Replaces `microgeo:*` names by paths of the built-in toy task, which is built if it is not in the cache."""
    data = config.data
    actor = config.worker.actor
    critic = config.worker.critic
    names = {*data.train_sources, data.val_files or "", actor.model.model_path, critic.model.model_path or ""}
    if not any(name.startswith("microgeo:") for name in names):
        return config
    world = build_world()
    paths = {f"microgeo:{split}": str(world.split_file(split)) for split in SHAPES.splits}
    paths["microgeo:model"] = str(world.model_path)

    def with_path(section: Any) -> Any:
        path = section.model.model_path
        model = dataclasses.replace(section.model, model_path=paths.get(path, path))
        return dataclasses.replace(section, model=model)

    train_paths = [paths.get(source, source) for source in data.train_sources]
    val_path = paths.get(data.val_files or "", data.val_files)
    data = dataclasses.replace(data, train_files=",".join(train_paths), val_files=val_path)
    worker = dataclasses.replace(config.worker, actor=with_path(actor), critic=with_path(critic))
    return dataclasses.replace(config, data=data, worker=worker)
