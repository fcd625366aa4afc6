"""Configurations of the required settings and what a test adds, and the message that a faulty one ends with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cepo.config import RunConfig, load_config
from cepo.errors import ConfigError

REQUIRED = ["data.train_files=microgeo:train", "worker.actor.model.model_path=microgeo:model"]


def load(*arguments: str) -> RunConfig:
    return load_config([*REQUIRED, *arguments])


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return f"config={folder / name}"


def message_of(arguments: Sequence[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    return str(caught.value)
