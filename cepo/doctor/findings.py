"""What the doctor found: one line each, with a mark and, where something is wrong, a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

DEVICES = "this config's devices"
"""The heading of what a run would run on."""

Mark = Literal["ok", "info", "warn", "fail"]
_STYLES: dict[Mark, str] = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One fact about the machine or the run.

    Attributes:
        section: the heading it stands under.
        subject: what was looked at.
        mark: `fail` means that training could not start; `warn` that it could, with a drawback or a risk.
        found: the fact.
        remedy: what to do about it; a failure has one.
    """

    section: str
    subject: str
    mark: Mark
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.mark != "fail" or self.remedy, f"{self.subject}: a failure names its remedy"


def exit_code(findings: Sequence[Finding]) -> int:
    """1 where anything failed, else 0."""
    return int(any(finding.mark == "fail" for finding in findings))


def findings_table(findings: Sequence[Finding]) -> Table:
    """All findings under their sections, remedies below the facts they belong to."""
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
