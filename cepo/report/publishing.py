"""Publishes checkpoints and merged models on the Hugging Face hub, each with a card that tells their run."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import cepo
from cepo.config.paths import HUB_NAME, find_path
from cepo.errors import CheckpointError, ConfigError
from cepo.files.safe_files import irregular_file
from cepo.files.trees import Fields, is_mapping
from cepo.report.page import save_curves
from cepo.report.recorded_run import RunData, load_run
from cepo.report.summary import accuracies, summary_rows
from cepo.run_folder.environment import read_environment
from cepo.run_folder.layout import CHECKPOINT_PREFIX, CONFIG_FILE, METRICS_FILE
from cepo.terminal.lines import without_controls

CARD_FILE = "README.md"
CURVES_FILE = "curves.png"
_SETTINGS_NAMED = """
    algorithm.adv_estimator data.rollout_batch_size data.max_response_length trainer.seed trainer.max_steps
    worker.actor.global_batch_size worker.actor.optim.lr worker.actor.model.lora.rank
    worker.rollout.n worker.rollout.temperature worker.reward.reward_function
""".split()  # noqa: SIM905
"""The settings that the card names; `config.yaml` beside it has all."""
_MARKUP = re.compile(r"[\\`*\[\]<>&|!]")
"""Characters with which Markdown and HTML begin or end links, images, tags and cells."""
_VERSIONS_NAMED = ("cepo", "torch", "transformers", "peft", "vllm")


def publish_checkpoint(checkpoint: Path, name: str, *, private: bool) -> str:
    """Publishes a checkpoint as the repository `name` and returns the address of the commit; see `cepo.push`.

    The run's record has no secrets, but it has paths of this machine.
    """
    import huggingface_hub

    from cepo.workers.merged_model import ADAPTER, actor_folder, adapter_base

    actor = actor_folder(checkpoint).resolve()
    step_folder = actor.parent
    irregular = irregular_file(step_folder)
    if irregular is not None:
        raise CheckpointError(f"{irregular} is not a regular file; give a checkpoint without links and pipes")
    prepare_repository(name, private=private)
    adapter = actor / ADAPTER
    files: dict[str, Path] = {}  # by the path in the repository
    for path in sorted(step_folder.rglob("*")):
        if path.is_file():
            files[f"{step_folder.name}/{path.relative_to(step_folder)}"] = path
    if adapter.is_dir():
        files |= _files_in(adapter)
    record = step_folder.parent / CONFIG_FILE
    if record.is_file():
        files[CONFIG_FILE] = record
    with tempfile.TemporaryDirectory() as folder:
        card_folder = Path(folder)
        write_card(actor, card_folder, base_model=adapter_base(actor), adapter="." if adapter.is_dir() else None)
        files |= _files_in(card_folder)
        additions = [huggingface_hub.CommitOperationAdd(target, path) for target, path in files.items()]
        message = f"Add {step_folder.name}, trained with cepo"
        with _hub_errors(f"{checkpoint} remains as it is"):
            return str(huggingface_hub.create_commit(name, additions, commit_message=message))


def publish_merged(actor: Path, folder: Path, name: str, *, base_model: str) -> str:
    """Publishes the merged model in `folder` as the repository `name` and returns the address of the commit."""
    import huggingface_hub

    write_card(actor, folder, base_model=base_model, adapter=None)
    with _hub_errors(f"{folder} is whole; once the cause is gone, publish it with `hf upload {name} {folder}`"):
        return str(huggingface_hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Merged by cepo"))


def prepare_repository(name: str, *, private: bool) -> None:
    """Creates the model repository `name` on the hub before the merge, so that problems show before the work.

    An existing repository is used unchanged, public or private. Raises `ConfigError` for a wrong name or without a token,
    and `CheckpointError` if the hub cannot be reached or rejects the request.
    """
    import huggingface_hub
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name if "/" in name else f"/{name}")
    except ValueError as error:
        raise ConfigError(f"--upload '{name}' is not a repository name of the hub ({error}); give ORG/NAME") from error
    if huggingface_hub.get_token() is None:
        raise ConfigError(
            f"--upload {name} needs a token with write access, and none is set: run `hf auth login`, or set HF_TOKEN"
        )
    with _hub_errors(f"--upload {name}: nothing was merged yet"):
        huggingface_hub.create_repo(name, private=private, exist_ok=True)


def _files_in(folder: Path) -> dict[str, Path]:
    """Returns the files directly in a folder by their names, in alphabetical order."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}


@contextmanager
def _hub_errors(situation: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the operating system's types
        reason = str(error).strip() or type(error).__name__
        raise CheckpointError(
            f"the hub cannot be reached, or refuses: {reason}. {situation}. Check the network (HF_HUB_OFFLINE must not be "
            "set), and with `hf auth whoami` whether the token may write there"
        ) from error


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
    stage = ""
    if step.isdecimal():
        stage = f", after step {step}"
        run = replace(run, rows=[row for row in run.rows if row.step <= int(step)])
    weights = "Weights" if adapter is None else "A LoRA adapter"
    parts = [
        _front_matter(run, base_model, adapter),
        f"# {_plain(run.name)}",
        f"{weights} of {_plain(_public(base_model) or 'a model')}, trained with [cepo](https://arxiv.org/abs/2605.19436) "
        f"{cepo.__version__}{stage}.",
        "" if adapter is None else f"The adapter is in `{adapter}`, in PEFT's format.",
        _section("Result", ((kind.label, f"{kind.last}, {kind.change}") for kind in accuracies(run))),
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

    sources = [part.partition("@")[0] for part in (_public(run.setting("data.train_files")) or "").split(", ")]
    datasets = [name for name in sources if HUB_NAME.fullmatch(name)]
    is_on_hub = base_model is not None and HUB_NAME.fullmatch(base_model) and not _is_local(base_model)
    card = ModelCardData(
        library_name="transformers" if adapter is None else "peft",
        tags=["cepo", "reinforcement-learning", run.estimator],
        base_model=base_model if is_on_hub else None,
        datasets=datasets or None,
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
    return _plain(text)


def _plain(text: str) -> str:
    """Returns a text in one line as Markdown that shows it as it is: a run's records may be a stranger's."""
    return _MARKUP.sub(r"\\\g<0>", without_controls(" ".join(text.split())))


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
