"""Implements `cepo merge` and `cepo.push`: exports a checkpoint as a Hugging Face folder, and publishes it with a card."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import cepo
from cepo.config.named_files import require_file
from cepo.config.paths import find_path
from cepo.errors import CheckpointError, ConfigError
from cepo.files.foreign import irregular_file
from cepo.files.trees import Fields, is_mapping
from cepo.run_folder.environment import read_environment
from cepo.run_folder.layout import CHECKPOINT_PREFIX, CONFIG_FILE, METRICS_FILE
from cepo.terminal.lines import print_plain
from cepo.terminal.progress import log_to_stderr, phase
from cepo.workers.named_checkpoint import find_base

if TYPE_CHECKING:
    from cepo.config.worker_schema import FloatType
    from cepo.report.recorded_run import RunData

CARD_FILE = "README.md"
CURVES_FILE = "curves.png"
_SHOWN = """
    algorithm.adv_estimator data.rollout_batch_size data.max_response_length trainer.seed trainer.max_steps
    worker.actor.global_batch_size worker.actor.optim.lr worker.actor.model.lora.rank
    worker.rollout.n worker.rollout.temperature worker.reward.reward_function
""".split()  # noqa: SIM905
"""The settings that the card names; `config.yaml` beside it has all."""
_VERSIONS = ("cepo", "torch", "transformers", "peft", "vllm")


def merge_and_upload(
    checkpoint: Path,
    out: Path,
    *,
    base: str | None,
    chat_template: Path | None,
    config: Path | None,
    dtype: FloatType | None,
    trust_remote_code: bool,
    upload: str | None,
    public: bool,
) -> None:
    """Writes the merged model to `out` and, with `upload`, to the hub; the parameters are the options of `cepo merge`."""
    log_to_stderr()
    with phase("loading libraries"):
        from cepo.workers.merged_model import actor_folder, merge_checkpoint

    if public and upload is None:
        raise ConfigError("--public applies only to --upload; add --upload ORG/NAME, or leave --public out")
    actor = actor_folder(checkpoint)
    require_file("--config", config)
    model = find_base(actor, path=base, chat_template=chat_template, trust_remote_code=trust_remote_code, config=config)
    if upload is not None:
        prepare_repository(upload, private=not public)
    print_plain(f"merging {actor} with base {model.path}")
    written = merge_checkpoint(actor, out, model, dtype=dtype)
    print_plain(f"written: {out} ({str(written).removeprefix('torch.')})")
    if upload is not None:
        import huggingface_hub

        write_card(actor, out, base_model=model.path, adapter=None)
        with _hub_errors(f"{out} is whole; once the cause is gone, publish it with `hf upload {upload} {out}`"):
            commit = huggingface_hub.upload_folder(repo_id=upload, folder_path=out, commit_message="Merged by cepo")
        print_plain(f"uploaded: {commit}")


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


def publish_checkpoint(checkpoint: Path, name: str, *, private: bool) -> str:
    """Implements `cepo.push`. The run's record has no secrets, but it has paths of this machine."""
    import huggingface_hub

    from cepo.workers.merged_model import ADAPTER, actor_folder, adapter_base

    actor = actor_folder(checkpoint).resolve()
    whole, adapter = actor.parent, actor / ADAPTER
    if (odd := irregular_file(whole)) is not None:
        raise CheckpointError(f"{odd} is not a regular file; give a checkpoint without links and pipes")
    prepare_repository(name, private=private)
    files = {f"{whole.name}/{path.relative_to(whole)}": path for path in sorted(whole.rglob("*")) if path.is_file()}
    if adapter.is_dir():
        files |= {path.name: path for path in sorted(adapter.iterdir()) if path.is_file()}
    if (record := whole.parent / CONFIG_FILE).is_file():
        files[CONFIG_FILE] = record
    with tempfile.TemporaryDirectory() as made:
        write_card(actor, Path(made), base_model=adapter_base(actor), adapter="." if adapter.is_dir() else None)
        files |= {path.name: path for path in Path(made).iterdir()}
        additions = [huggingface_hub.CommitOperationAdd(target, path) for target, path in files.items()]
        with _hub_errors(f"{checkpoint} remains as it is"):
            return str(
                huggingface_hub.create_commit(name, additions, commit_message=f"Add {whole.name}, trained with cepo")
            )


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
    from cepo.report.page import result_lines, save_curves, summary_rows
    from cepo.report.recorded_run import load_run

    checkpoint = actor.resolve().parent
    if not (checkpoint.parent / METRICS_FILE).is_file():
        return
    run, step = load_run(checkpoint.parent), checkpoint.name.removeprefix(CHECKPOINT_PREFIX)
    if step.isdecimal():
        run = replace(run, rows=[row for row in run.rows if row.step <= int(step)])
    starts = read_environment(run.folder)
    recorded = starts[-1].get("versions") if starts else None
    versions: Fields = recorded if is_mapping(recorded) else {}
    weights = "Weights" if adapter is None else "A LoRA adapter"
    after = f", after step {step}" if step.isdecimal() else ""
    parts = [
        _front_matter(run, base_model, adapter),
        f"# {run.name}",
        f"{weights} of {_public(base_model) or 'a model'}, trained with [cepo](https://arxiv.org/abs/2605.19436) "
        f"{cepo.__version__}{after}.",
        "" if adapter is None else f"The adapter is in `{adapter}`, in PEFT's format.",
        _section("Result", ((name, f"{last}, {change}") for last, name, change in result_lines(run))),
        _section("Data", ((key, _public(run.setting(f"data.{key}"))) for key in ("train_files", "val_files"))),
        _section("Settings", ((key, run.setting(key)) for key in _SHOWN)),
        f"## Curve\n\n![curves]({CURVES_FILE})" if run.rows else "",
        _section("Run", summary_rows(run)),
        _section("Versions", ((name, versions.get(name)) for name in _VERSIONS)),
    ]
    if run.rows:
        save_curves(run.folder, folder / CURVES_FILE)
    (folder / CARD_FILE).write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _front_matter(run: RunData, base_model: str | None, adapter: str | None) -> str:
    from huggingface_hub import ModelCardData

    data = _public(run.setting("data.train_files"))
    card = ModelCardData(
        library_name="transformers" if adapter is None else "peft",
        tags=["cepo", "reinforcement-learning", run.estimator],
        base_model=None if base_model is None or _is_local(base_model) else base_model,
        datasets=[data.partition("@")[0]] if data and "/" in data else None,  # a hub name
    )
    return f"---\n{card.to_yaml()}\n---"


def _section(title: str, rows: Iterable[tuple[str, object]]) -> str:
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows if value not in (None, "")]
    return "\n".join([f"## {title}", "", "| | |", "| --- | --- |", *lines]) if lines else ""


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
