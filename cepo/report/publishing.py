"""Publishes checkpoints and merged models on the Hugging Face hub, each with a card."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cepo.errors import CheckpointError, ConfigError
from cepo.files.safe_files import irregular_file
from cepo.report.model_card import write_card
from cepo.run_folder.layout import CONFIG_FILE


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
