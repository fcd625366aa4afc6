"""Writes the card of a published model: data, method, settings, curve, accuracy and versions of its run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import cepo
from cepo.config.paths import find_path
from cepo.files.trees import Fields, is_mapping
from cepo.report.page import save_curves
from cepo.report.recorded_run import RunData, load_run
from cepo.report.summary import result_lines, summary_rows
from cepo.run_folder.environment import read_environment
from cepo.run_folder.layout import CHECKPOINT_PREFIX, METRICS_FILE

CARD_FILE = "README.md"
CURVES_FILE = "curves.png"
_SETTINGS_NAMED = """
    algorithm.adv_estimator data.rollout_batch_size data.max_response_length trainer.seed trainer.max_steps
    worker.actor.global_batch_size worker.actor.optim.lr worker.actor.model.lora.rank
    worker.rollout.n worker.rollout.temperature worker.reward.reward_function
""".split()  # noqa: SIM905
"""The settings that the card names; `config.yaml` beside it has all."""
_VERSIONS_NAMED = ("cepo", "torch", "transformers", "peft", "vllm")


def write_card(actor: Path, folder: Path, *, base_model: str | None, adapter: str | None) -> None:
    """Writes `README.md` and `curves.png` of an actor's run into `folder`, which is to be published.

    Figures are those at the checkpoint's step, if it is known; the image shows the whole run. `adapter` is the adapter's
    folder within `folder`, None for whole weights. Paths of this machine are shortened to names. Without the run's metrics
    nothing is written; raises `DataError` if they are damaged.
    """
    checkpoint = actor.resolve().parent
    if not (checkpoint.parent / METRICS_FILE).is_file():
        return
    run = load_run(checkpoint.parent)
    step = checkpoint.name.removeprefix(CHECKPOINT_PREFIX)
    after = ""
    if step.isdecimal():
        after = f", after step {step}"
        run = replace(run, rows=[row for row in run.rows if row.step <= int(step)])
    weights = "Weights" if adapter is None else "A LoRA adapter"
    parts = [
        _front_matter(run, base_model, adapter),
        f"# {run.name}",
        f"{weights} of {_public(base_model) or 'a model'}, trained with [cepo](https://arxiv.org/abs/2605.19436) "
        f"{cepo.__version__}{after}.",
        "" if adapter is None else f"The adapter is in `{adapter}`, in PEFT's format.",
        _section("Result", ((name, f"{last}, {change}") for last, name, change in result_lines(run))),
        _section("Data", ((key, _public(run.setting(f"data.{key}"))) for key in ("train_files", "val_files"))),
        _section("Settings", ((key, run.setting(key)) for key in _SETTINGS_NAMED)),
        f"## Curve\n\n![curves]({CURVES_FILE})" if run.rows else "",
        _section("Run", summary_rows(run)),
        _section("Versions", _versions(run)),
    ]
    if run.rows:
        save_curves(run.folder, folder / CURVES_FILE)
    text = "\n\n".join(part for part in parts if part)
    (folder / CARD_FILE).write_text(text + "\n", encoding="utf-8")


def _front_matter(run: RunData, base_model: str | None, adapter: str | None) -> str:
    from huggingface_hub import ModelCardData

    data = _public(run.setting("data.train_files"))
    datasets = None
    if data and "/" in data:  # a hub name
        datasets = [data.partition("@")[0]]
    card = ModelCardData(
        library_name="transformers" if adapter is None else "peft",
        tags=["cepo", "reinforcement-learning", run.estimator],
        base_model=None if base_model is None or _is_local(base_model) else base_model,
        datasets=datasets,
    )
    return f"---\n{card.to_yaml()}\n---"


def _versions(run: RunData) -> Iterable[tuple[str, object]]:
    """Returns the versions of the last start that the run recorded."""
    starts = read_environment(run.folder)
    recorded = starts[-1].get("versions") if starts else None
    versions: Fields = recorded if is_mapping(recorded) else {}
    return [(name, versions.get(name)) for name in _VERSIONS_NAMED]


def _section(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Returns a table under a title, without rows that lack a value; an empty text without any row."""
    lines: list[str] = []
    for name, value in rows:
        if value is not None and value != "":
            lines.append(f"| {_cell(name)} | {_cell(value)} |")
    if not lines:
        return ""
    return "\n".join([f"## {title}", "", "| | |", "| --- | --- |", *lines])


def _cell(value: object) -> str:
    text = str(value)
    if text.startswith("/"):
        text = Path(text).name
    return " ".join(text.replace("|", "\\|").split())


def _public(name: object) -> str | None:
    """Returns a hub name as it is, and of a path only its last part, which says nothing about the machine."""
    if name is None or name == "":
        return None
    public_names: list[str] = []
    for part in str(name).split(","):
        source = part.strip()
        path, _, _ = source.partition("@")
        public_names.append(Path(source).name if _is_local(path) else source)
    return ", ".join(public_names)


def _is_local(name: str) -> bool:
    return Path(name).expanduser().is_absolute() or name.startswith((".", "~")) or find_path(name) is not None
