"""Implements `cepo doctor`: checks whether training can start on this machine, and says how to fix what prevents it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from cepo.config import RunConfig, check_config, load_config
from cepo.doctor.versions import Finding, installed_versions, version_findings
from cepo.live_view import SafeConsole

_STYLES = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}


def print_findings(settings: Sequence[str]) -> int:
    """Prints what was found; returns 1 if training cannot start, else 0."""
    config = load_config(settings) if settings else None
    if config is not None:
        check_config(config)
    findings = _findings(config)
    has_failed = any(finding.mark == "fail" for found in findings.values() for finding in found)
    verdict, style = "Training can start.", "bold green"
    if has_failed:
        verdict, style = "Training cannot start: see the lines marked fail.", "bold red"
    elif config is None:
        verdict = "No problem found. To check a run, give its configuration."
    SafeConsole().print(findings_table(findings), Text(verdict, style=style))
    return int(has_failed)


def _findings(config: RunConfig | None) -> dict[str, list[Finding]]:
    """Returns all findings by heading; if a library is missing, only those about versions."""
    installed = installed_versions()
    findings = {"versions": version_findings(installed)}
    if any(finding.mark == "fail" and installed[finding.subject] is None for finding in findings["versions"]):
        return findings
    from cepo.doctor.machine import machine_findings, run_findings, usable_gpus
    from cepo.microgeo.world import with_embedded_world

    gpus = usable_gpus()
    findings["machine"] = machine_findings(gpus)
    return findings if config is None else findings | run_findings(with_embedded_world(config), gpus)


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
            remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
            found = Text.assemble(finding.found, (remedy, style))
            table.add_row(Text(f"  {finding.subject}"), Text(finding.mark, style=style), found)
    return table
