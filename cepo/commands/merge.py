"""Implements `cepo merge`: exports a checkpoint as a Hugging Face folder, and uploads it if asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.config.path_checks import require_file
from cepo.errors import ConfigError
from cepo.terminal.lines import print_plain
from cepo.terminal.progress import log_to_stderr, phase
from cepo.workers.named_checkpoint import find_base

if TYPE_CHECKING:
    import torch

    from cepo.config.worker_schema import FloatType
    from cepo.workers.merged_model import BaseModel


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
        from cepo.report.publishing import prepare_repository, publish_merged
        from cepo.workers.merged_model import actor_folder

    if public and upload is None:
        raise ConfigError("--public applies only to --upload; add --upload ORG/NAME, or leave --public out")
    actor = actor_folder(checkpoint)
    require_file("--config", config)
    model = find_base(actor, path=base, chat_template=chat_template, trust_remote_code=trust_remote_code, config=config)
    if upload is not None:
        prepare_repository(upload, private=not public)
    print_plain(f"merging {actor} with base {model.path}")
    written = merge_into(model, actor, out, dtype=dtype)
    print_plain(f"written: {out} ({str(written).removeprefix('torch.')})")
    if upload is not None:
        print_plain(f"uploaded: {publish_merged(actor, out, upload, base_model=model.path)}")


def merge_into(base: BaseModel, actor: Path, out: Path, *, dtype: FloatType | None) -> torch.dtype:
    """Does what `merge_checkpoint` does, for the toy task's model too, which is built if it is not in the cache."""
    from cepo.microgeo.world import embedded_model
    from cepo.workers.merged_model import merge_checkpoint

    located = dataclasses.replace(base, path=embedded_model(base.path))
    return merge_checkpoint(actor, out, located, dtype=dtype)
