"""Formats tables of means with standard errors as Markdown, LaTeX, CSV, JSON or terminal output."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from cepo.errors import ConfigError
from cepo.tracking.run_folder import write_atomically

_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A mean with its standard error, None if this is unknown."""

    mean: float
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A quantity. If `is_ranked`, the largest value of each group is bold."""

    name: str
    digits: int = 2
    signed: bool = False
    is_ranked: bool = False

    def shown(self, value: float, *, sign: bool = False) -> str:
        """Formats a value, with a plus sign if `sign` and the column is signed."""
        return f"{value:{'+' if sign and self.signed else ''}.{self.digits}f}"


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """The cells of one method by column; `group` is the model from which it starts, or empty."""

    name: str
    cells: Mapping[str, Cell | str]
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """A table, with notes on how far its numbers can be compared."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Returns the table as Markdown; the best cells are bold."""
        lines = [self.title, "", *self._markdown_lines(), ""] + [f"- {note}" for note in self.notes]
        return "\n".join(lines).rstrip("\n") + "\n"

    def _markdown_lines(self) -> Iterator[str]:
        head = ["", *(column.name for column in self.columns)]
        yield from ("| " + " | ".join(cells) + " |" for cells in (head, ["---", *["---:"] * len(self.columns)]))
        for group, rows in self.groups():
            if group:
                yield f"| *{_markdown(group)}* |" + " |" * len(self.columns)
            for row in rows:
                cells = [self._text(row, column, rows, "**{}**", "{} ± {}", _markdown) for column in self.columns]
                yield "| " + " | ".join([_markdown(row.name), *cells]) + " |"

    def latex(self) -> str:
        r"""Returns a `tabular` with booktabs rules and errors as subscripts, as in the paper's tables."""
        head = " & ".join(["", *(f"\\textbf{{{_latex(column.name)}}}" for column in self.columns)])
        lines = [f"% {self.title}", rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}", r"\toprule", head + r" \\"]
        for group, rows in self.groups():
            lines.append(r"\midrule")
            if group:
                lines.append(rf"\multicolumn{{{len(self.columns) + 1}}}{{l}}{{\textit{{{_latex(group)}}}}} \\")
            for row in rows:
                cells = [
                    self._text(row, column, rows, r"\textbf{{{}}}", r"{}$_{{\pm{}}}$", _latex)
                    for column in self.columns
                ]
                lines.append(" & ".join([_latex(row.name), *cells]) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in self.notes)]) + "\n"

    def csv(self) -> str:
        """Returns the table as CSV, with one column for each mean and one for its error."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["group", "name", *(text for column in self.columns for text in (column.name, "error"))])
        for row in self.rows:
            cells = [row.cells.get(column.name, "") for column in self.columns]
            pairs = [(cell, "") if isinstance(cell, str) else (cell.mean, cell.error) for cell in cells]
            writer.writerow([row.group, row.name, *(value for pair in pairs for value in pair)])
        return file.getvalue()

    def as_json(self) -> dict[str, Any]:
        """Returns title, columns, rows and notes as plain values, with unrounded numbers."""
        rows = [
            {"group": row.group, "name": row.name}
            | {
                name: cell if isinstance(cell, str) else {"mean": cell.mean, "error": cell.error}
                for name, cell in row.cells.items()
            }
            for row in self.rows
        ]
        columns = [column.name for column in self.columns]
        return {"title": self.title, "columns": columns, "rows": rows, "notes": list(self.notes)}

    def terminal(self) -> Table:
        """Returns the table in rich's form for a terminal."""
        table = Table(title=Text(self.title), caption=Text("\n".join(self.notes)), caption_justify="left")
        for name in ("", *(column.name for column in self.columns)):
            table.add_column(Text(name), justify="right" if name else "left")
        for group, rows in self.groups():
            table.add_section()
            if group:
                table.add_row(Text(group, style="italic"))
            for row in rows:
                cells = [self._text(row, column, rows, "{}", "{} ± {}", str) for column in self.columns]
                table.add_row(Text(row.name), *map(Text, cells))
        return table

    def groups(self) -> Iterator[tuple[str, list[TableRow]]]:
        """Yields the groups with their rows, in the order of their first rows."""
        for group in dict.fromkeys(row.group for row in self.rows):
            yield group, [row for row in self.rows if row.group == group]

    def _text(
        self,
        row: TableRow,
        column: Column,
        rows: Sequence[TableRow],
        bold: str,
        with_error: str,
        escape: Callable[[str], str],
    ) -> str:
        cell = row.cells.get(column.name, "")
        if isinstance(cell, str):
            return escape(cell)
        text = column.shown(cell.mean, sign=True)
        rivals = [one.mean for each in rows if isinstance(one := each.cells.get(column.name), Cell)]
        is_best = column.is_ranked and len(rivals) > 1 and cell.mean == max(rivals)
        text = bold.format(text) if is_best else text
        return text if cell.error is None else with_error.format(text, column.shown(cell.error))


def write_table(table: ScoreTable, path: Path) -> None:
    """Writes the table in the format of the file's extension: .md, .tex, .csv or .json; `ConfigError` for others."""
    forms = {
        ".md": table.markdown,
        ".tex": table.latex,
        ".csv": table.csv,
        ".json": lambda: json.dumps(table.as_json(), indent=2, ensure_ascii=False) + "\n",
    }
    if path.suffix not in forms:
        raise ConfigError(f"{path}: its suffix is not a table format; accepted: {', '.join(forms)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, forms[path.suffix]())


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_<>`\[\]])", r"\\\1", text)
