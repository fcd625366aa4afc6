"""Writes the table of a program into a Markdown page, between two marks that stay."""

from __future__ import annotations

from pathlib import Path

END = "<!-- end of the table -->\n"
"""What stands after a table."""


def start_mark(program: str) -> str:
    """Returns what stands before the table of a program, such as `lab.studies.seeds`."""
    return f"<!-- table of {program} -->\n"


def with_table(page: str, written: str, *, program: str) -> str:
    """Returns the page with the table between its marks; raises `ValueError` if it lacks them."""
    before, start, rest = page.partition(start_mark(program))
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page lacks the marks {start_mark(program).strip()} and {END.strip()} around the table")
    return f"{before}{start}\n{written.strip()}\n\n{end}{after}"


def write_table(page: Path, written: str, *, program: str) -> None:
    """Writes the table between its marks in the file `page`; raises `ValueError` if it lacks them."""
    text = page.read_text(encoding="utf-8")
    page.write_text(with_table(text, written, program=program), encoding="utf-8")
