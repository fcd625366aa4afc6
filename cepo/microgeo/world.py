"""Builds the embedded world: a checkpoint folder and two parquet files in Geo3k's format."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.errors import DataError
from cepo.microgeo.figures import draw_figure, figure_png
from cepo.microgeo.problems import Problem, generate_problem

if TYPE_CHECKING:
    from cepo.config import RunConfig
    from cepo.microgeo.warmstart import Progress, WarmStartSettings

ASSETS = Path(__file__).parent / "assets"
_MANIFEST = "world.json"


@dataclass(frozen=True)
class World:
    """The paths of the built parts."""

    model_path: Path
    train_file: Path
    validation_file: Path


@dataclass(frozen=True)
class _Plan:
    seed: int
    num_train: int
    num_validation: int
    retrain: bool
    settings: WarmStartSettings | None


def build_world(
    folder: Path | None = None,
    *,
    seed: int = 0,
    num_train: int = 4096,
    num_validation: int = 512,
    retrain: bool = False,
    settings: WarmStartSettings | None = None,
    progress: Progress | None = None,
) -> World:
    """Builds the world in `folder`, or reuses one built there with the same arguments and the same code.

    Args:
        folder: default `microgeo-<fingerprint>` in the user's cache folder (`$XDG_CACHE_HOME/cepo` or `~/.cache/cepo`).
        seed: of the problems, and with `retrain` of the weights too. The shipped weights are those of seed 0.
        retrain: train the weights here (minutes) instead of copying the shipped ones (seconds).
        settings: of the warm start; only with `retrain`.
        progress: called as `progress(stage, done, total)`.

    The parts are written beside the folder and put in place by one rename, so an interrupted build leaves no partial
    world.

    Raises:
        DataError: the folder holds something else, a count is not positive, or weights were not shipped.
    """
    if num_train < 1 or num_validation < 1:
        raise DataError(
            f"A world needs problems: num_train={num_train}, num_validation={num_validation}; both must be at least 1."
        )
    plan = _Plan(seed, num_train, num_validation, retrain, settings)
    fingerprint = _fingerprint(plan)
    if folder is None:
        folder = _user_cache_folder() / f"microgeo-{fingerprint[:12]}"
    folder = folder.expanduser().absolute()
    world = World(folder / "model", folder / "train.parquet", folder / "validation.parquet")
    if _built_fingerprint(folder) == fingerprint:
        return world
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        with _without_library_bars():
            _build(building, plan, fingerprint, progress)
        _put_in_place(building, folder, fingerprint)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return world


def _user_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cepo"


def split_problems(seed: int, num_train: int, num_validation: int) -> tuple[list[Problem], list[Problem]]:
    """Returns the first problems of the streams `train` and `validation`; none has the same image and text in both."""
    train = [generate_problem(seed, index, stream="train") for index in range(num_train)]
    known = {(problem.question, draw_figure(problem).tobytes()) for problem in train}
    unseen = (
        problem
        for problem in (generate_problem(seed, index, stream="validation") for index in itertools.count())
        if (problem.question, draw_figure(problem).tobytes()) not in known
    )
    return train, list(itertools.islice(unseen, num_validation))


def write_problems(file: Path, problems: Iterable[Problem]) -> None:
    """Writes a parquet file with the columns images, problem, answer (as Geo3k) and id, family."""
    from datasets import Dataset, Features, Image, List, Value

    columns: dict[str, list[Any]] = {"images": [], "problem": [], "answer": [], "id": [], "family": []}
    for problem in problems:
        columns["images"].append([{"bytes": figure_png(problem), "path": f"{problem.id}.png"}])
        columns["problem"].append(f"<image>{problem.question}")
        columns["answer"].append(problem.answer)
        columns["id"].append(problem.index)
        columns["family"].append(problem.family)
    features = Features(
        {
            "images": List(Image()),
            "problem": Value("string"),
            "answer": Value("string"),
            "id": Value("int64"),
            "family": Value("string"),
        }
    )
    Dataset.from_dict(columns, features=features).to_parquet(str(file))


def _build(folder: Path, plan: _Plan, fingerprint: str, progress: Progress | None) -> None:
    splits = split_problems(plan.seed, plan.num_train, plan.num_validation)
    for done, (name, problems) in enumerate(zip(("train", "validation"), splits, strict=True), start=1):
        write_problems(folder / f"{name}.parquet", problems)
        if progress is not None:
            progress("problems", done, 2)
    if plan.retrain:
        from cepo.microgeo.model import build_untrained_model
        from cepo.microgeo.warmstart import warm_start

        build_untrained_model(folder / "model", seed=plan.seed)
        warm_start(folder / "model", settings=plan.settings, seed=plan.seed, progress=progress)
    else:
        if not (ASSETS / "model.safetensors").is_file():
            raise DataError(
                f"The embedded model's weights are not in {ASSETS}; make them with `python3 -m cepo.microgeo --retrain`."
            )
        shutil.copytree(ASSETS, folder / "model")
    manifest = {"fingerprint": fingerprint, "seed": plan.seed, "retrain": plan.retrain}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _without_library_bars() -> Iterator[None]:
    """Keeps the progress bars of datasets and transformers from writing into the caller's own."""
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets_bars = not datasets.are_progress_bars_disabled()
    transformers_bars = transformers_logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if datasets_bars:
            datasets.enable_progress_bars()
        if transformers_bars:
            transformers_logging.enable_progress_bar()


def _put_in_place(building: Path, folder: Path, fingerprint: str) -> None:
    """Renames the finished world into place; replaces an older world but nothing else."""
    if folder.exists():
        if _built_fingerprint(folder) == fingerprint:
            return
        old = building.with_name(building.name + "-old")
        folder.rename(old)
        building.rename(folder)
        shutil.rmtree(old)
        return
    building.rename(folder)


def _built_fingerprint(folder: Path) -> str | None:
    if not folder.exists():
        return None
    manifest = folder / _MANIFEST
    if not folder.is_dir() or (not manifest.is_file() and any(folder.iterdir())):
        raise DataError(
            f"{folder} exists and is not an embedded world (it has no {_MANIFEST}); name a new or empty folder."
        )
    if not manifest.is_file():
        return ""
    return json.loads(manifest.read_text(encoding="utf-8"))["fingerprint"]


def _fingerprint(plan: _Plan) -> str:
    """Hashes all that determines the world: the arguments, this package's code, and the shipped weights if used."""
    digest = hashlib.sha256()
    settings = asdict(plan.settings) if plan.settings is not None else None
    arguments = (plan.seed, plan.num_train, plan.num_validation, plan.retrain, settings)
    digest.update(json.dumps(arguments, sort_keys=True).encode())
    package = Path(__file__).parent
    files = sorted(package.glob("*.py")) + ([] if plan.retrain else sorted(ASSETS.glob("*")))
    for file in files:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def with_embedded_world(config: RunConfig) -> RunConfig:
    """Replaces `microgeo:*` by the paths of the embedded world, which is built if it is not in the cache."""
    data, model, critic = config.data, config.worker.actor.model, config.worker.critic
    names = (*data.train_sources, data.val_files or "", model.model_path, critic.model.model_path or "")
    if not any(name.startswith("microgeo:") for name in names):
        return config
    world = build_world()
    places = {
        "microgeo:train": str(world.train_file),
        "microgeo:validation": str(world.validation_file),
        "microgeo:model": str(world.model_path),
    }
    new_data = dataclasses.replace(
        data,
        train_files=",".join(places.get(source, source) for source in data.train_sources),
        val_files=places.get(data.val_files or "", data.val_files),
    )
    new_model = dataclasses.replace(model, model_path=places.get(model.model_path, model.model_path))
    actor = dataclasses.replace(config.worker.actor, model=new_model)
    critic_path = places.get(critic.model.model_path or "", critic.model.model_path)
    critic = dataclasses.replace(critic, model=dataclasses.replace(critic.model, model_path=critic_path))
    worker = dataclasses.replace(config.worker, actor=actor, critic=critic)
    return dataclasses.replace(config, data=new_data, worker=worker)
