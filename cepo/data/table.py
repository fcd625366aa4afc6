"""Holds the opened rows of a source: each is read when it is asked for, from files that are mapped into memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, overload

from cepo.data.json_text import read_object
from cepo.data.row_parser import root_column
from cepo.data.typed_cells import Refine, column_names, features_of, refiner
from cepo.errors import DataError
from cepo.files.trees import Tree


class Part(Protocol):
    """The rows of one file. A row may lack columns."""

    names: Sequence[str]
    files: Sequence[Path]  # none for rows that a program made

    def __len__(self) -> int: ...

    def row(self, number: int, names: Sequence[str] | None) -> Tree:
        """Returns a row, or only the columns `names` of it; raises `DataError` for a bad row."""
        ...


class TextPart:
    """Rows of JSON or CSV files.

    `table` has each row's `text` in JSON, or its `fault`, the number of its `file` in `files`, and its `line` there.
    """

    def __init__(self, table: Any, names: Sequence[str], files: Sequence[Path]) -> None:
        self.names = names
        self._table = table
        self.files = files

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, number: int, names: Sequence[str] | None) -> Tree:
        entry = self._table.slice(number, 1)
        fault = entry.column("fault")[0].as_py()
        if fault is not None:
            number_of_file: int = entry.column("file")[0].as_py()
            file = self.files[number_of_file]
            line = entry.column("line")[0].as_py()
            raise DataError(f"the row, line {line:,} of {file.name}, {fault}")
        row = read_object(entry.column("text")[0].as_py())
        return row if names is None else {name: row.get(name) for name in names}


class TypedPart:
    """Rows of a Parquet or Arrow file, or of a data set of the `datasets` library."""

    def __init__(self, table: Any, files: Sequence[Path]) -> None:
        self.files = files
        self._table = table
        features = features_of(table.schema)
        try:
            self.names: Sequence[str] = column_names(table.schema)
            self._refiners: dict[str, Refine] = {}
            for name in self.names:
                refine = refiner(table.schema.field(name).type, features.get(name))
                if refine is not None:
                    self._refiners[name] = refine
        except DataError as error:
            name = f"data file {files[0]}" if files else "the data set"
            raise DataError(f"{name}: {error}") from error

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, number: int, names: Sequence[str] | None) -> Tree:
        entry = self._table.slice(number, 1)
        row: Tree = {}
        for name in self.names if names is None else names:
            row[name] = None
            if name not in self.names:
                continue
            try:
                value = entry.column(name)[0].as_py(maps_as_pydicts="strict")
                if value is not None and name in self._refiners:
                    value = self._refiners[name](value)
            except Exception as error:  # its converters raise many types, for texts that are not UTF-8 for example
                reason = str(error).partition("\n")[0][:200]
                raise DataError(f"column '{name}' cannot be read ({type(error).__name__}: {reason})") from error
            row[name] = value
        return row


class GivenPart:
    """Rows that a program made."""

    def __init__(self, rows: Sequence[Tree]) -> None:
        self._rows = rows
        self.files: Sequence[Path] = []
        names: dict[str, None] = {}  # in the order in which they occur
        for row in rows:
            names.update(dict.fromkeys(row))
        self.names: Sequence[str] = list(names)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int, names: Sequence[str] | None) -> Tree:
        row = self._rows[number]
        return dict(row) if names is None else {name: row.get(name) for name in names}


class Rows(Sequence[Tree]):
    """The rows of one or several files in order, from `begin` to `end`; only the columns `names` if they are given.

    A row has all of `column_names`, None for a column that its file lacks. Numbers of JSON files may be `WrittenFloat`.
    A row that cannot be read raises `DataError` when it is asked for.
    """

    def __init__(
        self, parts: Sequence[Part], *, begin: int = 0, end: int | None = None, names: Sequence[str] | None = None
    ) -> None:
        self._parts = parts
        self._names = names
        self._ends = list(accumulate(len(part) for part in parts))
        if end is None:
            end = self._ends[-1] if self._ends else 0
        self.begin = begin
        self._size = end - begin
        self.files: list[Path] = []
        all_names: dict[str, None] = {}  # in the order in which they occur
        for part in parts:
            self.files += part.files
            all_names.update(dict.fromkeys(part.names))
        self.column_names: list[str] = list(all_names if names is None else names)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Tree: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tree]: ...
    def __getitem__(self, index: int | slice) -> Tree | list[Tree]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = self.begin + range(len(self))[index]
        position = bisect_right(self._ends, number)
        part = self._parts[position]
        begin_of_part = self._ends[position] - len(part)
        row = part.row(number - begin_of_part, self._names)
        return {name: row.get(name) for name in self.column_names}

    def select_columns(self, names: Sequence[str]) -> Rows:
        """Returns the rows with these columns only, and those that dotted names lead into.

        The others are not read from a file with types.
        """
        roots = [root_column(self.column_names, name) for name in names]
        end = self.begin + self._size
        return Rows(self._parts, begin=self.begin, end=end, names=list(dict.fromkeys(roots)))

    def select(self, numbers: Iterable[int]) -> Iterable[Tree]:
        """Yields the rows of these numbers, one at a time."""
        return (self[number] for number in numbers)


def rows_of(rows: Any) -> Rows:
    """Returns `rows`, which a program has, as `Rows`: a list of mappings, or a data set of the `datasets` library.

    Nothing is decoded: images and other media are as they are stored.
    """
    if isinstance(rows, Rows):
        return rows
    if not hasattr(rows, "with_format"):
        return Rows([GivenPart(rows)])
    features = rows.features.arrow_schema.metadata
    files = [Path(entry["filename"]) for entry in rows.cache_files]
    return Rows([TypedPart(_Formatted(rows.with_format("arrow"), features), files)])


class _Formatted:
    """A data set of the `datasets` library in the form of a table of pyarrow: it has its own order of rows."""

    def __init__(self, rows: Any, metadata: Any) -> None:
        self._rows = rows
        self.num_rows: int = len(rows)
        self.schema: Any = rows.features.arrow_schema.with_metadata(metadata)

    def slice(self, number: int, length: int) -> Any:
        return self._rows[number : number + length]
