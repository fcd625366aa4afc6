"""Formats tables of means with standard errors as Markdown, LaTeX, JSON or terminal output."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from cepo.files.trees import Tree
from cepo.metrics import wilson_interval
from cepo.run_folder.writing import write_atomically

TABLE_FORMATS = (".md", ".tex", ".json")
NOTHING = "–"
_UNBOUNDED = 100_000
_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A mean with its standard error, None if this is unknown; `low` and `high` are its 95 % interval, if known."""

    mean: float
    error: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def over(cls, values: Sequence[float]) -> Cell:
        """Returns the mean over runs, or other independent units, with its standard error `sd / sqrt(n)`.

        The variance has n - 1; the error is None for a single value or a NaN.
        """
        error: float | None = None
        if len(values) > 1 and all(math.isfinite(value) for value in values):
            error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean=statistics.fmean(values), error=error)

    @classmethod
    def of_fraction(cls, fraction: float, count: float | None) -> Cell:
        """Returns a fraction of `count` samples with Wilson's interval of 95 %, and half of that of one standard error."""
        one_error = wilson_interval(fraction, count)
        interval = wilson_interval(fraction, count, 1.96)
        if one_error is None or interval is None:
            return cls(mean=fraction)
        below, above = one_error
        low, high = interval
        return cls(mean=fraction, error=(above - below) / 2, low=low, high=high)

    @property
    def percent(self) -> Cell:
        """A fraction in percent."""
        ends = (self.error, self.low, self.high)
        error, low, high = (None if end is None else 100 * end for end in ends)
        return Cell(mean=100 * self.mean, error=error, low=low, high=high)

    def text(self, digits: int = 1, *, signed: bool = False, best: str = "{}", error: str = "{} ± {}") -> str:
        """Formats the mean by `best`, and with its error, if that is known, by `error`."""
        mean = best.format(f"{self.mean:{'+' if signed else ''}.{digits}f}")
        return mean if self.error is None else error.format(mean, f"{self.error:.{digits}f}")

    def with_interval(self, quantile: float = 1.96) -> Cell:
        """Adds the 95 % interval of a mean whose error is known, by default the normal one."""
        if self.error is None:
            return self
        half = quantile * self.error
        return replace(self, low=self.mean - half, high=self.mean + half)

    def less(self, other: Cell) -> Cell:
        """Returns the difference of independent means, with the error `sqrt(error^2 + other.error^2)` if both are known."""
        error: float | None = None
        if self.error is not None and other.error is not None:
            error = math.hypot(self.error, other.error)
        return Cell(mean=self.mean - other.mean, error=error)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A quantity. If `is_ranked`, the largest value of each group is bold."""

    name: str
    digits: int = 2
    signed: bool = False
    is_ranked: bool = False

    def shown(self, cell: Cell, best: str = "{}", error: str = "{} ± {}") -> str:
        return cell.text(self.digits, signed=self.signed, best=best, error=error)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """The cells of one method by column; `group` is the model from which it starts, or empty."""

    name: str
    cells: Mapping[str, Cell | str]
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """A table, with notes on how far its numbers can be compared, and its result in one sentence, if it has one."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    notes: Sequence[str] = ()
    headline: str = ""

    def lines(
        self, escape: Callable[[str], str] = str, best: str = "{}", error: str = "{} ± {}"
    ) -> Iterator[list[str]]:
        """Yields the head, then for each group a line with its name alone and a line for each of its rows."""
        yield ["", *(escape(column.name) for column in self.columns)]
        for group in dict.fromkeys(row.group for row in self.rows):
            yield [escape(group)]
            rows = [row for row in self.rows if row.group == group]
            for row in rows:
                line = [escape(row.name)]
                for column in self.columns:
                    cell = row.cells.get(column.name, "")
                    if isinstance(cell, str):
                        line.append(escape(cell) or NOTHING)
                    elif _is_best(cell, column, rows):
                        line.append(column.shown(cell, best, error))
                    else:
                        line.append(column.shown(cell, error=error))
                yield line

    def markdown(self) -> str:
        """Returns the table as Markdown; the best cells are bold."""
        head, *lines = self.lines(_markdown, "**{}**")
        rule = ["---"] + ["---:"] * len(self.columns)
        rows = [head, rule]
        for line in lines:
            if len(line) > 1:
                rows.append(line)
            elif line[0]:  # the name of a group, across all columns
                rows.append([f"*{line[0]}*"] + [""] * len(self.columns))
        texts = [_markdown(self.title), ""]
        texts += [f"| {' | '.join(row)} |" for row in rows]
        texts.append("")
        texts += [f"- {_markdown(note)}" for note in self.notes]
        return "\n".join(texts).rstrip("\n") + "\n"

    def latex(self) -> str:
        r"""Returns a `tabular` with booktabs rules and errors as subscripts, as in the paper's tables."""
        head, *lines = self.lines(_latex, r"\textbf{{{}}}", r"{}$_{{\pm{}}}$")
        alignment = "l" + "r" * len(self.columns)
        texts = [
            f"% {_one_line(self.title)}",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
        ]
        names = [rf"\textbf{{{name}}}" for name in head[1:]]
        texts.append(" & ".join(["", *names]) + r" \\")
        for line in lines:
            if len(line) > 1:
                texts.append(" & ".join(line) + r" \\")
                continue
            texts.append(r"\midrule")
            if line[0]:  # the name of a group, across all columns
                texts.append(rf"\multicolumn{{{len(head)}}}{{l}}{{\textit{{{line[0]}}}}} \\")
        texts += [r"\bottomrule", r"\end{tabular}"]
        texts += [f"% {_one_line(note)}" for note in self.notes]
        return "\n".join(texts) + "\n"

    def json(self) -> Tree:
        """Returns title, columns, rows and notes with unrounded numbers; a row has no empty cells."""
        rows: list[Tree] = []
        for row in self.rows:
            entry: Tree = {"group": row.group, "name": row.name}
            for name, cell in row.cells.items():
                if isinstance(cell, Cell):
                    entry[name] = {"mean": cell.mean, "error": cell.error}
                elif cell:
                    entry[name] = cell
            rows.append(entry)
        names = [column.name for column in self.columns]
        return {"title": self.title, "columns": names, "rows": rows, "notes": list(self.notes)}

    def terminal(self, width: int = 80) -> Group:
        """Returns the table in rich's form."""
        lines: list[Sequence[str]] = []
        for line in self.lines():
            if any(line):
                missing_cells = len(self.columns) + 1 - len(line)
                lines.append(line + [""] * missing_cells)
        notes = [Text(note) for note in self.notes]
        head = [Text(self.headline, style="bold"), Text()] if self.headline else []
        return Group(*head, Text(self.title, style="bold"), terminal_table(lines, width), *notes)


def _is_best(cell: Cell, column: Column, rows: Sequence[TableRow]) -> bool:
    """Returns whether a cell of a ranked column has the largest mean of several rows."""
    if not column.is_ranked:
        return False
    means: list[float] = []
    for row in rows:
        competitor = row.cells.get(column.name)
        if isinstance(competitor, Cell):
            means.append(competitor.mean)
    return len(means) > 1 and cell.mean == max(means)


def terminal_table(lines: Sequence[Sequence[str]], width: int) -> Table:
    """Returns a table, given with its head as first line; if it is wider than `width` and has few rows, they are columns."""
    table = _rich_table(lines)
    is_too_wide = Console(width=_UNBOUNDED).measure(table).maximum > width
    if is_too_wide and len(lines) < len(lines[0]):
        return _rich_table(list(zip(*lines, strict=True)))
    return table


def _rich_table(lines: Sequence[Sequence[str]]) -> Table:
    head, *rows = lines
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column(Text(head[0]), no_wrap=True)
    for name in head[1:]:
        table.add_column(Text(name), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    return table


def write_table(table: ScoreTable, path: Path) -> None:
    """Writes the table in the format of the file's extension: .md, .tex or .json."""
    if path.suffix == ".json":
        text = json.dumps(table.json(), indent=2, ensure_ascii=False) + "\n"
    else:
        text = table.markdown() if path.suffix == ".md" else table.latex()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _one_line(text: str) -> str:
    """Replaces control characters, among them ends of lines, which would end a comment or a row."""
    return "".join(character if character.isprintable() else " " for character in text)


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_<>`\[\]&])", r"\\\1", _one_line(text))
