"""Checks the tokenizer of a model folder in the process with limits, before transformers reads it in this one."""

from __future__ import annotations

import signal
from pathlib import Path

from cepo.errors import DataError
from cepo.models.folder_check import TOKENIZER
from cepo.models.limited_process import ask

SECONDS = 20.0
"""The processor time of a tokenizer's check; those of 260,000 tokens take about 3."""


def check_tokenizer(path: str, *, trusted: bool = False) -> None:
    """Raises DataError unless the tokenizer of a model folder can be used within the limits of time and memory.

    Without `trusted`, the folder must have a `tokenizer.json` whose parts are those of the supported families. Names of
    the hub are not checked, as in `check_model_folder`.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    file = folder / TOKENIZER
    if not file.exists():
        if trusted:
            return
        raise DataError(
            f"{file} does not exist; other forms of a tokenizer are read only of models whose code is trusted. Load the "
            "tokenizer with transformers' AutoTokenizer and write it with save_pretrained"
        )
    request = {"file": str(file.absolute()), "trusted": trusted}
    kind, answer = ask("tokenizer", request, seconds=SECONDS)
    if kind == "ended" and answer == -signal.SIGPROF:
        raise DataError(f"{file} is not done with a short text within {SECONDS:g} s of processor time")
    if kind == "ended":
        raise DataError(f"{file} ends its process with code {answer}")
    if kind == "memory":
        raise DataError(f"{file} takes more than {answer}")
    if kind != "usable":
        raise DataError(f"{file} {answer}")
