"""Implements `cepo merge`: exports a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.config.recorded import CHAT_TEMPLATE, MODEL, recorded_model
from cepo.errors import CheckpointError, ConfigError, ForeignFileError
from cepo.foreign_files import read_text
from cepo.progress import log_to_stderr, phase
from cepo.terminal import print_plain
from cepo.tracking.run_folder import CONFIG_FILE

if TYPE_CHECKING:
    from cepo.config.rollout_schema import FloatType
    from cepo.workers.merged_model import BaseModel


def merge(
    checkpoint: Path,
    out: Path,
    *,
    base: str | None,
    chat_template: Path | None,
    dtype: FloatType | None,
    trust_remote_code: bool,
) -> None:
    """Writes the merged model to `out`; the parameters are the options of `cepo merge`.

    Raises:
        ConfigError, CheckpointError: the checkpoint or its base cannot be read.
    """
    log_to_stderr()
    with phase("loading libraries"):
        from cepo.workers.merged_model import actor_folder, merge_checkpoint

    actor = actor_folder(checkpoint)
    model = find_base(actor, path=base, chat_template=chat_template, trust_remote_code=trust_remote_code)
    print_plain(f"merging {actor} with base {model.path}")
    written = merge_checkpoint(actor, out, model, dtype=dtype)
    print_plain(f"written: {out} ({str(written).removeprefix('torch.')})")


def find_base(
    actor: Path, *, path: str | None = None, chat_template: Path | None = None, trust_remote_code: bool = False
) -> BaseModel:
    """Finds the base model of an actor's folder: `path`, else the one in the run's config.yaml, else the adapter's.

    Tokenizer, chat template and changed entries of the model's configuration come from the run's config.yaml, if there
    is one. The file `chat_template` replaces the recorded template.

    Raises:
        CheckpointError: no base model is named, or a file that the configuration names does not exist.
    """
    from cepo.workers.merged_model import BaseModel, adapter_base

    config_file = actor.resolve().parent.parent / CONFIG_FILE
    given = [] if path is None else [f"{MODEL}.model_path"]
    given += [] if chat_template is None else [CHAT_TEMPLATE]
    settings, template = _trained_with(config_file, given)
    if chat_template is not None:
        template = _template_text(chat_template)
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


def _trained_with(config_file: Path, given: Collection[str]) -> tuple[Mapping[str, Any], str | None]:
    """Returns `worker.actor.model` and the text of `data.override_chat_template`; both empty without a file.

    Other settings are ignored: reward files, plugins and data need not exist where the merge runs. Consent to remote
    code and references to environment variables must come from the user.
    """
    if not config_file.is_file():
        return {}, None
    try:
        model, template = recorded_model(config_file, given)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    return model, None if template is None else _template_text(Path(template))


def _template_text(file: Path) -> str:
    try:
        return read_text(file)
    except ForeignFileError as error:
        raise CheckpointError(
            f"the chat template {file} {error.fault}; the model was trained with it, so restore the file, or give "
            "its path with --chat-template"
        ) from error
