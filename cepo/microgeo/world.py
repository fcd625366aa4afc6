"""Builds a built-in toy task, a checkpoint folder and a Parquet file for each split, of generated geometry problems."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from cepo.config.paths import MICROGEO_MODELS
from cepo.errors import DataError
from cepo.files.own_cache import cached
from cepo.files.trees import Tree
from cepo.microgeo.figures import draw_figure
from cepo.microgeo.problems import ToyProblem, generate_problem
from cepo.run_folder.pictures import png_bytes
from cepo.terminal.progress import phase

if TYPE_CHECKING:
    from cepo.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class WorldKind:
    """The definition of a built-in toy task."""

    name: str
    assets: Path  # the folder of the shipped weights; the code beside it belongs to the world's fingerprint
    generate: Callable[..., ToyProblem]  # generate(seed, index, stream=...)
    draw: Callable[[Any], Image.Image]
    solution: Callable[[Any], str] | None = None  # the correct response for the column `solution`; None without it
    held_out: tuple[str, ...] = ()  # splits besides `train` and `validation`, each with its own distribution

    @property
    def splits(self) -> tuple[str, ...]:
        return "train", "validation", *self.held_out


SHAPES = WorldKind(name="shapes", assets=Path(__file__).parent / "assets", generate=generate_problem, draw=draw_figure)
ASSETS = SHAPES.assets
_MANIFEST = "world.json"
_PREFIX = "microgeo:"


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

    The folder is by default `microgeo-<fingerprint>` in `$XDG_CACHE_HOME/cepo/worlds` or `~/.cache/cepo/worlds`. An
    interrupted build leaves no partial world. Each held-out split has `num_validation` problems too. Raises `DataError`
    if the folder holds something else, or a count is not positive.
    """
    if num_train < 1 or num_validation < 1:
        raise DataError(
            f"A world needs problems: num_train={num_train}, num_validation={num_validation}; both must be at least 1."
        )
    fingerprint = _fingerprint(kind, seed, num_train, num_validation)
    if folder is None:
        with cached("worlds", f"microgeo-{fingerprint[:12]}") as entry:
            if _built_fingerprint(entry) != fingerprint:
                _write(World(entry), kind, fingerprint, (seed, num_train, num_validation))
        return World(entry)
    folder = folder.expanduser().absolute()
    world = World(folder)
    if _built_fingerprint(folder) == fingerprint:
        return world
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        _write(world, kind, fingerprint, (seed, num_train, num_validation))
    except BaseException:
        shutil.rmtree(folder)
        raise
    return world


def _write(world: World, kind: WorldKind, fingerprint: str, arguments: tuple[int, int, int]) -> None:
    """Writes the files of a world; `arguments`: seed, numbers of problems."""
    seed, num_train, num_validation = arguments
    with phase(f"building the built-in toy task in {world.folder}"):
        problems_of_splits = split_problems(seed, num_train, num_validation, kind)
        for split, problems in zip(kind.splits, problems_of_splits, strict=True):
            write_problems(world.split_file(split), problems, kind)
        shutil.copytree(kind.assets, world.model_path)
        manifest = json.dumps({"fingerprint": fingerprint, "seed": seed}, indent=2)
        (world.folder / _MANIFEST).write_text(manifest + "\n", encoding="utf-8")


def split_problems(seed: int, num_train: int, num_validation: int, kind: WorldKind = SHAPES) -> list[list[ToyProblem]]:
    """Returns each split's problems, from the stream of its name; none repeats a training problem's image and text."""
    train = [kind.generate(seed, index, stream="train") for index in range(num_train)]
    training_contents = {_content(problem, kind) for problem in train}
    splits = [train]
    for stream in kind.splits[1:]:
        problems: list[ToyProblem] = []
        for index in itertools.count():
            if len(problems) == num_validation:
                break
            problem = kind.generate(seed, index, stream=stream)
            if _content(problem, kind) not in training_contents:
                problems.append(problem)
        splits.append(problems)
    return splits


def _content(problem: ToyProblem, kind: WorldKind) -> tuple[str, bytes]:
    """Returns what a model sees of a problem: its text and its image's pixels."""
    return problem.question, kind.draw(problem).tobytes()


def write_problems(file: Path, problems: Iterable[ToyProblem], kind: WorldKind = SHAPES) -> None:
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
    folders = dict.fromkeys([Path(__file__).parent, kind.assets.parent])  # the same folder counts once
    files: list[Path] = []
    for folder in folders:
        files += sorted(folder.glob("*.py"))
    files += sorted(kind.assets.glob("*"))
    for file in files:
        content_digest = hashlib.sha256(file.read_bytes()).digest()
        digest.update(file.name.encode() + b"\0" + content_digest)
    return digest.hexdigest()


def embedded_model(name: str) -> str:
    """Returns the folder of `microgeo:model`, which is built if it is not in the cache, and any other name as it is."""
    return str(build_world().model_path) if name in MICROGEO_MODELS else name


def with_embedded_world(config: RunConfig) -> RunConfig:
    """Replaces `microgeo:*` names by paths of the built-in toy task, which is built if it is not in the cache."""
    data = config.data
    actor = config.worker.actor
    critic = config.worker.critic
    names = [*data.train_sources, data.val_files, actor.model.model_path, critic.model.model_path]
    if not any(name is not None and name.startswith(_PREFIX) for name in names):
        return config
    world = build_world()
    paths = {f"{_PREFIX}{split}": str(world.split_file(split)) for split in SHAPES.splits}
    paths[f"{_PREFIX}model"] = str(world.model_path)

    def with_path(section: Any) -> Any:
        path = section.model.model_path
        model = dataclasses.replace(section.model, model_path=paths.get(path, path))
        return dataclasses.replace(section, model=model)

    train_paths = [paths.get(source, source) for source in data.train_sources]
    val_path = paths.get(data.val_files or "", data.val_files)
    located_data = dataclasses.replace(data, train_files=",".join(train_paths), val_files=val_path)
    located_worker = dataclasses.replace(config.worker, actor=with_path(actor), critic=with_path(critic))
    return dataclasses.replace(config, data=located_data, worker=located_worker)
