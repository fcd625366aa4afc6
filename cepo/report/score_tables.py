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

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cepo.tracking.run_folder import write_atomically

TABLE_FORMATS = (".md", ".tex", ".csv", ".json")
_NOTHING = "–"
_WIDEST = 18
"""Width of a column on a terminal, if there are more than fit; longer values are folded."""
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

    def value(self, row: TableRow) -> str | tuple[float, str]:
        """Returns a row's cell for a page: its text, with the exact mean by which the reader sorts."""
        cell = row.cells.get(self.name, "")
        if isinstance(cell, str):
            return cell or _NOTHING
        error = "" if cell.error is None else f" ± {self.shown(cell.error)}"
        return cell.mean, self.shown(cell.mean, sign=True) + error


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
        notes = [f"- {_markdown(note)}" for note in self.notes]
        lines = [_markdown(self.title), "", *self._markdown_lines(), "", *notes]
        return "\n".join(lines).rstrip("\n") + "\n"

    def _markdown_lines(self) -> Iterator[str]:
        head = ["", *(_markdown(column.name) for column in self.columns)]
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
        lines = [
            f"% {_one_line(self.title)}",
            rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}",
            r"\toprule",
            head + r" \\",
        ]
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
        return (
            "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(f"% {_one_line(note)}" for note in self.notes)])
            + "\n"
        )

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

    def terminal(self, width: int = 80) -> Group:
        """Returns the table in rich's form; too narrow a terminal gets few rows as columns, or columns in blocks."""
        lines = [["", *(column.name for column in self.columns)]]
        for group, rows in self.groups():
            lines += [[group, *[""] * len(self.columns)]] if group else []
            for row in rows:
                lines.append([row.name, *(self._text(row, each, rows, "{}", "{} ± {}", str) for each in self.columns)])
        is_turned = _width(lines) > width and len(self.rows) <= len(self.columns)
        parts = [
            Text(self.title, style="bold"),
            *terminal_blocks([*zip(*lines, strict=True)] if is_turned else lines, width),
        ]
        return Group(*parts, *(Text(note) for note in self.notes))

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
            return escape(cell) or _NOTHING
        text = column.shown(cell.mean, sign=True)
        rivals = [one.mean for each in rows if isinstance(one := each.cells.get(column.name), Cell)]
        is_best = column.is_ranked and len(rivals) > 1 and cell.mean == max(rivals)
        text = bold.format(text) if is_best else text
        return text if cell.error is None else with_error.format(text, column.shown(cell.error))


def terminal_blocks(lines: Sequence[Sequence[str]], width: int) -> Iterator[Table]:
    """Yields a table, given with its head as first line, in blocks of columns that fit into `width` side by side."""
    columns = [*zip(*lines, strict=True)]
    while len(columns) > 1:
        count = 2
        while count < len(columns) and _width([*zip(*columns[: count + 1], strict=True)]) <= width:
            count += 1
        head, *rows = zip(*columns[:count], strict=True)
        table = Table(box=SIMPLE, pad_edge=False)
        for name in head:
            table.add_column(
                Text(name), justify="right" if table.columns else "left", overflow="fold", no_wrap=not table.columns
            )
        for row in rows:
            table.add_row(*map(Text, row))
        yield table
        columns = [columns[0], *columns[count:]]


def _width(lines: Sequence[Sequence[str]]) -> int:
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    return sum(min(width, _WIDEST) + 2 for width in widths[1:]) + widths[0] + 2


def write_table(table: ScoreTable, path: Path) -> None:
    """Writes the table in the format of the file's extension: .md, .tex, .csv or .json."""
    forms = {
        ".md": table.markdown,
        ".tex": table.latex,
        ".csv": table.csv,
        ".json": lambda: json.dumps(table.as_json(), indent=2, ensure_ascii=False) + "\n",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, forms[path.suffix]())


def _one_line(text: str) -> str:
    """Replaces control characters, among them ends of lines, which would end a comment or a row."""
    return "".join(character if character.isprintable() else " " for character in text)


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_<>`\[\]&])", r"\\\1", _one_line(text))
