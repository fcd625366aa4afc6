"""Defines the doctor's findings, which have a mark and, for problems, a remedy, and lays them out as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

DEVICES = "this config's devices"
"""The heading of the devices that a run would use."""

Mark = Literal["ok", "info", "warn", "fail"]
_STYLES: dict[Mark, str] = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Finding:
    """A fact about the machine or the run.

    Attributes:
        section: the heading in the table.
        subject: what was checked.
        mark: `fail` if training cannot start; `warn` if it can, with a drawback or a risk.
        found: the fact.
        remedy: how to fix it; every failure has one.
    """

    section: str
    subject: str
    mark: Mark
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.mark != "fail" or self.remedy, f"{self.subject}: a failure names its remedy"


def exit_code(findings: Sequence[Finding]) -> int:
    """Returns 1 if any finding failed, else 0."""
    return int(any(finding.mark == "fail" for finding in findings))


def findings_table(findings: Sequence[Finding]) -> Table:
    """Lays out all findings by section, with each remedy below its fact."""
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("what", overflow="fold", max_width=30)
    table.add_column("mark", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=1)
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            table.add_row(Text(section, style="bold cyan"), "", "")
        found = Text(finding.found)
        if finding.remedy:
            found.append(f"\n-> {finding.remedy}", style=_STYLES[finding.mark])
        table.add_row(Text(f"  {finding.subject}"), Text(finding.mark, style=_STYLES[finding.mark]), found)
    return table
