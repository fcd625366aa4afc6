"""Formats tables of means with standard errors as Markdown, LaTeX, CSV, JSON or terminal output."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cepo.files.trees import Tree
from cepo.metrics import wilson_interval
from cepo.run_folder.writing import write_atomically

TABLE_FORMATS = (".md", ".tex", ".csv", ".json")
NOTHING = "–"
_WIDEST = 18
"""Largest width of a column on a terminal, if there are more than fit."""
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
        known = len(values) > 1 and all(map(math.isfinite, values))
        error = statistics.stdev(values) / math.sqrt(len(values)) if known else None
        return cls(mean=statistics.fmean(values), error=error)

    @classmethod
    def of_fraction(cls, fraction: float, count: float | None) -> Cell:
        """Returns a fraction of `count` samples with Wilson's interval of 95 %, and half of that of one standard error."""
        if not (around := wilson_interval(fraction, count)):
            return cls(mean=fraction)
        low, high = wilson_interval(fraction, count, 1.96) or around
        return cls(mean=fraction, error=(around[1] - around[0]) / 2, low=low, high=high)

    def less(self, other: Cell) -> Cell:
        """Returns the difference of independent means, with the error `sqrt(error^2 + other.error^2)` if both are known."""
        errors = [cell.error for cell in (self, other) if cell.error is not None]
        return Cell(mean=self.mean - other.mean, error=math.hypot(*errors) if len(errors) == 2 else None)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A quantity. If `is_ranked`, the largest value of each group is bold."""

    name: str
    digits: int = 2
    signed: bool = False
    is_ranked: bool = False

    def shown(self, cell: Cell, best: str = "{}", error: str = "{} ± {}") -> str:
        """Formats a cell's mean by `best`, and both by `error`."""
        text = best.format(f"{cell.mean:{'+' if self.signed else ''}.{self.digits}f}")
        return text if cell.error is None else error.format(text, f"{cell.error:.{self.digits}f}")


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
                        continue
                    rivals = [one.mean for each in rows if isinstance(one := each.cells.get(column.name), Cell)]
                    is_best = column.is_ranked and len(rivals) > 1 and cell.mean == max(rivals)
                    line.append(column.shown(cell, best if is_best else "{}", error))
                yield line

    def markdown(self) -> str:
        """Returns the table as Markdown; the best cells are bold."""
        head, *lines = self.lines(_markdown, "**{}**")
        rows = [head, ["---", *["---:"] * len(self.columns)]]
        rows += [line if line[1:] else [f"*{line[0]}*", *[""] * len(self.columns)] for line in lines if any(line)]
        texts = [_markdown(self.title), "", *(f"| {' | '.join(row)} |" for row in rows), ""]
        return "\n".join([*texts, *(f"- {_markdown(note)}" for note in self.notes)]).rstrip("\n") + "\n"

    def latex(self) -> str:
        r"""Returns a `tabular` with booktabs rules and errors as subscripts, as in the paper's tables."""
        head, *lines = self.lines(_latex, r"\textbf{{{}}}", r"{}$_{{\pm{}}}$")
        texts = [f"% {_one_line(self.title)}", rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}", r"\toprule"]
        texts.append(" & ".join(["", *(rf"\textbf{{{name}}}" for name in head[1:])]) + r" \\")
        for line in lines:
            texts.append(" & ".join(line) + r" \\" if line[1:] else r"\midrule")
            if len(line) == 1 and line[0]:
                texts.append(rf"\multicolumn{{{len(head)}}}{{l}}{{\textit{{{line[0]}}}}} \\")
        texts += [r"\bottomrule", r"\end{tabular}", *(f"% {_one_line(note)}" for note in self.notes)]
        return "\n".join(texts) + "\n"

    def json(self) -> Tree:
        """Returns title, columns, rows and notes with unrounded numbers; a row has no empty cells."""
        rows: list[Tree] = []
        for row in self.rows:
            known = {name: cell for name, cell in row.cells.items() if cell != ""}
            cells = {n: {"mean": c.mean, "error": c.error} if isinstance(c, Cell) else c for n, c in known.items()}
            rows.append({"group": row.group, "name": row.name} | cells)
        names = [each.name for each in self.columns]
        return {"title": self.title, "columns": names, "rows": rows, "notes": [*self.notes]}

    def terminal(self, width: int = 80) -> Group:
        """Returns the table in rich's form; if it is too wide, rows become columns, in blocks that fit."""
        lines = [line + [""] * (len(self.columns) + 1 - len(line)) for line in self.lines() if any(line)]
        is_wide = len(self.columns) > _columns_beside(lines, width)
        blocks = terminal_blocks([*zip(*lines, strict=True)] if is_wide else lines, width)
        return Group(Text(self.title, style="bold"), *blocks, *map(Text, self.notes))


def terminal_blocks(lines: Sequence[Sequence[str]], width: int) -> Iterator[Table]:
    """Yields a table, given with its head as first line, in blocks of columns that fit into `width` side by side."""
    count = _columns_beside(lines, width)
    for start in range(1, len(lines[0]), count):
        (name, *names), *rows = ([line[0], *line[start : start + count]] for line in lines)
        table = Table(box=SIMPLE, pad_edge=False)
        table.add_column(Text(name), no_wrap=True)
        for each in names:
            table.add_column(Text(each), justify="right", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        yield table


def _columns_beside(lines: Sequence[Sequence[str]], width: int) -> int:
    """Returns how many columns fit beside the first one; longer values are folded."""
    longest = max((cell_len(cell) for line in lines for cell in line[1:]), default=0)
    return max(1, (width - 2 - max(cell_len(line[0]) for line in lines)) // (min(longest, _WIDEST) + 2))


def write_table(table: ScoreTable, path: Path) -> None:
    """Writes the table in the format of the file's extension: .md, .tex, .csv or .json."""
    if path.suffix == ".csv":
        import pandas

        text = pandas.json_normalize(table.json()["rows"], sep=" ").to_csv(index=False, lineterminator="\n")
    elif path.suffix == ".json":
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
