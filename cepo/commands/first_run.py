"""Implements `cepo quickstart`, the first run, and `cepo init`, which copies the shipped files so that they can be changed."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cepo.commands.exit_codes import guarded
from cepo.config.help import asked_for_help
from cepo.config.paths import SHIPPED_FOLDER
from cepo.errors import ConfigError

_QUICKSTART = """\
usage: cepo quickstart [a.b.c=value ...]

Builds the embedded world, trains CEPO on it for 20 steps and writes the report of the run with the credit of its tokens.
The run folder is checkpoints/cepo/quickstart in the working directory.
"""
_COPIED = ("configs", "examples", "scripts/geo3k", "scripts/common.sh")


def run_quickstart_command(argv: Sequence[str]) -> int:
    """Runs `cepo train` with the quickstart's configuration, then `cepo report`; returns the exit code of what failed, or 0."""
    if asked_for_help(argv):
        sys.stdout.write(_QUICKSTART)
        return 0
    from cepo.commands.report import run_report_command
    from cepo.train import main as train

    key = "trainer.save_checkpoint_path="
    given = [argument.removeprefix(key) for argument in argv if argument.startswith(key)]
    folder = (given or [str(Path("checkpoints", "cepo", "quickstart").resolve())])[-1]
    code = train(["config=microgeo/quickstart", *argv, f"{key}{folder}"])
    return code or run_report_command([folder, "--open"])


def run_init_command(argv: Sequence[str]) -> int:
    """Runs `cepo init FOLDER`; returns 0, or 2 with a message if the folder is taken or cannot be written."""
    parser = argparse.ArgumentParser(
        prog="cepo init",
        description="Copies the shipped configurations, format prompts, teacher templates, examples and launchers.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    return guarded(parser, argv, lambda arguments: _copy_shipped(arguments.folder))


def _copy_shipped(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder; name a new one")
    for name in _COPIED:
        source, copy = SHIPPED_FOLDER / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    sys.stdout.write(f"{target}: {', '.join(_COPIED)}. Next: cepo train config={target}/configs/microgeo/base.yaml\n")
