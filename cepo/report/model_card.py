"""Writes the card of a published model from the records of its run: data, method, settings, curve, accuracy, versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

import cepo
from cepo.config.paths import find_path
from cepo.report.page import save_curves
from cepo.report.recorded_run import RunData, load_run
from cepo.report.summary import result_lines, summary_rows
from cepo.tracking.run_folder import read_environment
from cepo.trees import Tree

CARD_FILE = "README.md"
CURVES_FILE = "curves.png"
_SHOWN = (
    "algorithm.adv_estimator",
    "data.rollout_batch_size",
    "data.max_response_length",
    "trainer.seed",
    "trainer.max_steps",
    "worker.actor.global_batch_size",
    "worker.actor.optim.lr",
    "worker.actor.model.lora.rank",
    "worker.rollout.n",
    "worker.rollout.temperature",
    "worker.reward.reward_function",
)
"""The settings that the card names; `config.yaml` beside it has all."""
_VERSIONS = ("cepo", "torch", "transformers", "peft", "vllm")
_MOST_POINTS = 12


def write_card(
    run_folder: Path, folder: Path, *, base_model: str | None, step: int | None, adapter: str | None
) -> Path:
    """Writes `README.md` and `curves.png` into `folder`, which is to be published, and returns the card's path.

    Figures are those at the checkpoint's step; the image shows the whole run. Paths of this machine are shortened to names.

    Args:
        run_folder: the run that made the weights.
        base_model: the model that training started from.
        step: the step of the checkpoint; None if it is not known.
        adapter: folder of the adapter within `folder`; None for whole weights.

    Raises:
        DataError: the run has no metrics, or they are damaged.
    """
    run = load_run(run_folder)
    if step is not None:
        run = replace(run, rows=[row for row in run.rows if row.step <= step])
    if run.rows:
        save_curves(run_folder, folder / CURVES_FILE)
    lines = [*_front_matter(run, base_model, adapter), *_text(run, base_model, step, adapter)]
    card = folder / CARD_FILE
    card.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return card


def _front_matter(run: RunData, base_model: str | None, adapter: str | None) -> Iterator[str]:
    data = _public(run.setting("data.train_files"))
    values: Tree = {
        "library_name": "transformers" if adapter is None else "peft",
        "tags": ["cepo", "reinforcement-learning", run.estimator],
    }
    if base_model is not None and not _is_local(base_model):
        values["base_model"] = base_model
    if data and "/" in data:  # a hub name
        values["datasets"] = [data.partition("@")[0]]
    yield from ("---", yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip(), "---", "")


def _text(run: RunData, base_model: str | None, step: int | None, adapter: str | None) -> Iterator[str]:
    weights = "A LoRA adapter" if adapter is not None else "Weights"
    trained = f"of {_public(base_model) or 'a model'}, trained with [cepo](https://arxiv.org/abs/2605.19436) {cepo.__version__}"
    yield from (f"# {run.name}", "", f"{weights} {trained}{'' if step is None else f', after step {step}'}.", "")
    if adapter is not None:
        yield from (f"The adapter is in `{adapter}`, in PEFT's format.", "")
    yield from _section("Result", ((name, f"{last}, {story}") for last, name, story in result_lines(run)))
    yield from _section("Data", ((key, _public(run.setting(f"data.{key}"))) for key in ("train_files", "val_files")))
    yield from _section("Settings", ((key, run.setting(key)) for key in _SHOWN))
    yield from _curve(run)
    yield from _section("Run", summary_rows(run))
    yield from _section("Versions", _versions(run))


def _section(title: str, rows: Iterator[tuple[str, Any]] | Sequence[tuple[str, Any]]) -> Iterator[str]:
    listed = [(name, value) for name, value in rows if value not in (None, "")]
    if listed:
        yield from (f"## {title}", "", "| | |", "| --- | --- |")
        yield from (f"| {_cell(name)} | {_cell(value)} |" for name, value in listed)
        yield ""


def _curve(run: RunData) -> Iterator[str]:
    """Yields the curve as an image, and some of its points as a table: the first, the last, and evenly spaced ones between."""
    name = "val/accuracy" if len(run.series("val/accuracy")[0]) > 1 else "reward/mean"
    steps, values = run.series(name)
    if not steps:
        return
    last = len(steps) - 1
    chosen = sorted({round(part * last / (_MOST_POINTS - 1)) for part in range(_MOST_POINTS)})
    yield from ("## Curve", "", f"![curves]({CURVES_FILE})", "", f"| step | {name} |", "| ---: | ---: |")
    yield from (f"| {steps[place]} | {values[place]:.4f} |" for place in chosen)
    yield ""


def _versions(run: RunData) -> Iterator[tuple[str, str]]:
    start: Mapping[str, object] = next(iter(reversed(read_environment(run.folder))), {})
    found = start.get("versions")
    versions: Mapping[str, object] = found if isinstance(found, Mapping) else {}
    yield from ((name, str(versions[name])) for name in _VERSIONS if versions.get(name))


def _is_local(name: str) -> bool:
    return Path(name).expanduser().is_absolute() or name.startswith((".", "~")) or find_path(name) is not None


def _public(name: object) -> str | None:
    """Returns a hub name as it is, and of a path only its last part, which says nothing about the machine."""
    if name in (None, ""):
        return None
    parts = [part.strip() for part in str(name).split(",")]
    return ", ".join(Path(part).name if _is_local(part.partition("@")[0]) else part for part in parts)


def _cell(value: object) -> str:
    text = Path(str(value)).name if str(value).startswith("/") else str(value)
    return " ".join(text.replace("|", "\\|").split())
