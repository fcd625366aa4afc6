"""Implements `cepo merge`: exports a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.config.record import CHAT_TEMPLATE, MODEL, recorded_model
from cepo.errors import CheckpointError, ConfigError, ForeignFileError
from cepo.foreign_files import irregular_file, read_text
from cepo.progress import log_to_stderr, phase
from cepo.terminal import print_plain
from cepo.tracking.run_folder import CONFIG_FILE
from cepo.trees import Fields

if TYPE_CHECKING:
    from cepo.config.worker_schema import FloatType
    from cepo.workers.merged_model import BaseModel


def merge_and_upload(
    checkpoint: Path,
    out: Path,
    *,
    base: str | None,
    chat_template: Path | None,
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
    model = find_base(actor, path=base, chat_template=chat_template, trust_remote_code=trust_remote_code)
    if upload is not None:
        prepare_repository(upload, private=not public)
    print_plain(f"merging {actor} with base {model.path}")
    written = merge_checkpoint(actor, out, model, dtype=dtype)
    print_plain(f"written: {out} ({str(written).removeprefix('torch.')})")
    if upload is not None:
        import huggingface_hub

        from cepo.commands.model_card import write_card

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

    from cepo.commands.model_card import write_card
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


def find_base(
    actor: Path, *, path: str | None = None, chat_template: Path | None = None, trust_remote_code: bool = False
) -> BaseModel:
    """Finds the base model of an actor's folder: `path`, else the one in the run's config.yaml, else the adapter's.

    Tokenizer, chat template and changed entries of the model's configuration come from the run's config.yaml, if there
    is one. The file `chat_template` replaces the recorded template.
    """
    from cepo.workers.merged_model import BaseModel, adapter_base

    config_file = actor.resolve().parent.parent / CONFIG_FILE
    given = [key for key, value in ((f"{MODEL}.model_path", path), (CHAT_TEMPLATE, chat_template)) if value is not None]
    settings: Fields = {}
    # Other recorded settings are ignored: reward files, plugins and data need not exist where the merge runs. Consent to
    # remote code and references to environment variables must come from the user.
    if config_file.is_file():
        settings, recorded = recorded_model(config_file, given)
        chat_template = chat_template or (None if recorded is None else Path(recorded))
    try:
        template = None if chat_template is None else read_text(chat_template)
    except ForeignFileError as error:
        raise CheckpointError(
            f"the chat template {chat_template} {error.fault}; the model was trained with it, so restore the file, or give "
            "its path with --chat-template"
        ) from error
    found = path or settings.get("model_path") or adapter_base(actor)
    if found is None:
        raise CheckpointError(
            f"{actor} does not say which model was trained (there is no {config_file}); name it with --base"
        )
    return BaseModel(
        path=found,
        tokenizer_path=settings.get("tokenizer_path"),
        chat_template=template,
        override_config=settings.get("override_config") or {},
        trust_remote_code=trust_remote_code,
    )
