"""Finds the configuration, the weights and the base model of a checkpoint that a command names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.config import RunConfig, load_config
from cepo.config.paths import HUB_NAME, MICROGEO_MODELS
from cepo.config.untrusted_record import CHAT_TEMPLATE, MODEL, recorded_for_evaluation, recorded_model
from cepo.errors import CheckpointError, ConfigError, ForeignFileError
from cepo.files.safe_files import read_text
from cepo.files.trees import Fields
from cepo.run_folder.layout import CHECKPOINT_PREFIX, CONFIG_FILE, missing_checkpoint

if TYPE_CHECKING:
    from cepo.workers.merged_model import BaseModel

_MODEL = f"{MODEL}.model_path"
_OVERRIDES = f"{MODEL}.override_config"


def config_of_checkpoint(
    checkpoint: str | None, settings: Sequence[str], *, also: Collection[str] = (), unread: Collection[str] = ()
) -> tuple[RunConfig, Path | None]:
    """Returns the configuration, whose model is loaded first, and the folder of trained weights to load into it if any.

    Without `config=` among the settings, data, model, sampling, correctness rule and the sections `also` are those of
    the checkpoint's run, as far as `cepo.config.untrusted_record` takes them. The command does not read the data `unread`.
    """
    actor, model = _resolved(checkpoint)
    named_keys = [argument.partition("=")[0] for argument in settings]
    recorded = None
    if "config" not in named_keys:
        file = None if actor is None else _config_file(actor)
        if file is None or not file.is_file():
            reason = "" if file is None else f" (there is no {file})"
            raise ConfigError(
                f"give config=FILE, which defines the prompts{reason}, or the checkpoint of a run, whose configuration is used"
            )
        recorded = recorded_for_evaluation(file, named_keys, also=also, without_data=unread)
    arguments = list(settings)
    if model is not None:
        arguments.append(f"{_MODEL}={model}")
    config = load_config(arguments, recorded=recorded)
    if actor is not None:
        config = _with_base(config, actor, named_keys)
    return config, actor


def _config_file(actor: Path) -> Path:
    return actor.resolve().parent.parent / CONFIG_FILE


def name_of_results(checkpoint: str) -> str:
    last_parts = "-".join(Path(checkpoint).parts[-2:]).strip("-")
    return re.sub(r"[^\w.-]+", "-", last_parts)


def _resolved(checkpoint: str | None) -> tuple[Path | None, str | None]:
    """Returns the folder of trained weights, or else the model to load; both None without a checkpoint."""
    if checkpoint is None:
        return None, None
    path = Path(checkpoint).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        from cepo.workers.merged_model import actor_folder

        return actor_folder(path), None
    on_hub = not path.exists() and HUB_NAME.fullmatch(checkpoint) and not path.name.startswith(CHECKPOINT_PREFIX)
    if path.is_dir() or checkpoint in MICROGEO_MODELS or on_hub:
        return None, checkpoint
    raise CheckpointError(f"{missing_checkpoint(path)}; or give a model folder, or a hub name org/name")


def _with_base(config: RunConfig, actor: Path, given: Collection[str]) -> RunConfig:
    """Returns the configuration with the checkpoint's base model, which its run or its adapter names.

    Entries of the model that are among the keys `given` on the command line remain.
    """
    model = config.worker.actor.model
    named = dataclasses.asdict(model)
    try:
        base = find_base(
            actor,
            path=model.model_path if _MODEL in given else None,
            trust_remote_code=model.trust_remote_code,
            named=named,
            given=given,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{error} (of cepo merge), here with {_MODEL}=MODEL") from error
    overridden = any(key.startswith(_OVERRIDES) for key in given)
    model = dataclasses.replace(
        model,
        model_path=base.path,
        tokenizer_path=model.tokenizer_path or base.tokenizer_path,
        override_config=model.override_config if overridden else base.override_config,
        trust_remote_code=base.trust_remote_code,
    )
    actor_section = dataclasses.replace(config.worker.actor, model=model)
    return dataclasses.replace(config, worker=dataclasses.replace(config.worker, actor=actor_section))


def find_base(
    actor: Path,
    *,
    path: str | None = None,
    chat_template: Path | None = None,
    trust_remote_code: bool = False,
    config: Path | None = None,
    named: Fields | None = None,
    given: Collection[str] = (),
) -> BaseModel:
    """Finds the base model of an actor's folder: `path`, else the one in the run's config.yaml, else the adapter's.

    Tokenizer, chat template and changed entries of the model's configuration come from the run's config.yaml, if there
    is one. The file `chat_template` replaces the recorded template.

    Args:
        config: a file to read in place of the run's config.yaml, which the user trusts.
        named: entries of `worker.actor.model` that the user has named; a record or an adapter of a stranger may repeat
            them, and names no other model but `microgeo:model`.
        given: keys that the command line has, whose recorded values are not read.

    Raises:
        ConfigError: the run's config.yaml names what it may not decide.
        CheckpointError: no model is named, an adapter of a stranger names one, or the chat template cannot be read.
    """
    from cepo.workers.merged_model import BaseModel

    config_file = config or _config_file(actor)
    unread_keys = list(given)
    if path is not None:
        unread_keys.append(_MODEL)
    if chat_template is not None:
        unread_keys.append(CHAT_TEMPLATE)
    settings: Fields = {}
    # Other recorded settings are ignored: reward files, plugins and data need not exist where the merge runs. Consent to
    # remote code and references to environment variables must come from the user.
    if config_file.is_file():
        settings, recorded_template = recorded_model(config_file, unread_keys, named=named, trusted=config is not None)
        if chat_template is None and recorded_template is not None:
            chat_template = Path(recorded_template)
    base = path or settings.get("model_path")
    template = None if chat_template is None else _read_template(chat_template)
    if not base:
        base = _base_of_adapter(actor, named)
    if base is None:
        raise CheckpointError(
            f"{actor} does not say which model was trained (there is no {config_file}); name it with --base"
        )
    return BaseModel(
        path=base,
        tokenizer_path=settings.get("tokenizer_path"),
        chat_template=template,
        override_config=settings.get("override_config") or {},
        trust_remote_code=trust_remote_code,
    )


def _read_template(path: Path) -> str:
    try:
        return read_text(path)
    except ForeignFileError as error:
        raise CheckpointError(
            f"the chat template {path} {error.fault}; the model was trained with it, so restore the file, or give "
            "its path with --chat-template"
        ) from error


def _base_of_adapter(actor: Path, named: Fields | None) -> str | None:
    """Returns the base model that the adapter names; raises `CheckpointError` if the user has not named it."""
    from cepo.workers.merged_model import adapter_base

    base = adapter_base(actor)
    named_model = None if named is None else named.get("model_path")
    if base is None or base in MICROGEO_MODELS or base == named_model:
        return base
    raise CheckpointError(
        f"{actor} names the base model {base[:200]!a}, and anybody can have written that; if it is the one you mean, name it "
        f"with --base {base:.200}"
    )
