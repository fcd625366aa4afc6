"""The rows of data sources as their files have them: nothing is inferred, and no image is decoded.

JSON and CSV are rows of text, Parquet and Arrow have their columns' own types. `datasets` keeps the rows of each file in an
Arrow file of the user's cache, found by the file's content, and maps it into memory.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol, overload

import numpy
import pyarrow as untyped_pyarrow  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.ipc  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]  # importing these makes them attributes of it
import pyarrow.parquet  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]

from cepo.config.paths import split_source
from cepo.data.json_text import read_object, read_value
from cepo.data.row_parser import root_column
from cepo.data.sources import PARQUET, TEXT_FORMATS, LocalSource, format_of, local_source
from cepo.data.text_rows import text_rows
from cepo.errors import CepoError, ConfigError, DataError, ForeignFileError, unusable_place
from cepo.files.own_cache import cached, digest_of
from cepo.files.safe_files import LFS_POINTER, open_regular
from cepo.files.trees import Tree, is_dict, is_list
from cepo.terminal.progress import phase

pyarrow: Any = untyped_pyarrow  # it has no type annotations

_FORM = "3"
"""Part of the key of copies; another one is needed when copies are written otherwise."""
_BATCH_ROWS = 100
_PANDAS_INDEX = "__index_level_"


def read_source(source: str) -> Rows:
    """Opens the rows of `source`: a file, a folder of such files, or a hub name, each optionally with `@split`.

    The split defaults to `train` and may be a slice such as `train[:100]`; `local_source` has the rules for folders.
    Raises `ConfigError` if the file or split does not exist, its format is unknown, it has no readable row, or the hub
    cannot be reached.
    """
    local = local_source(source)
    rows = _hub_rows(source) if local is None else _local_rows(source, local)
    if not len(rows):
        raise ConfigError(f"data files '{source}' have no rows; accepted: at least one problem")
    return rows


def rows_of(rows: Any) -> Rows:
    """Returns `rows`, which a program has, as `Rows`: a list of mappings, or a data set of the `datasets` library."""
    if isinstance(rows, Rows):
        return rows
    part = _TypedPart(rows) if hasattr(rows, "with_format") else _GivenPart(rows)
    return Rows([part])


class _Part(Protocol):
    """Rows that are read in one way. A row may lack columns."""

    names: Sequence[str]

    def __len__(self) -> int: ...

    def row(self, number: int, names: Sequence[str] | None) -> Tree:
        """Returns a row, or only the columns `names` of it; raises `DataError` for a bad row."""
        ...


class Rows(Sequence[Tree]):
    """The rows of one or several files in order, from `begin` to `end`; only the columns `names` if they are given.

    A row has all of `column_names`, None for a column that its file lacks. Numbers of JSON files may be `WrittenFloat`.
    A row that cannot be read raises `DataError` when it is asked for. `identity` changes with the content of the files;
    None for rows that a program made.
    """

    def __init__(
        self,
        parts: Sequence[_Part],
        *,
        begin: int = 0,
        end: int | None = None,
        names: Sequence[str] | None = None,
        identity: str | None = None,
    ) -> None:
        self._parts = parts
        self._names = names
        self._ends = list(accumulate(len(part) for part in parts))
        if end is None:
            end = self._ends[-1] if self._ends else 0
        self.begin = begin
        self._size = end - begin
        self.identity = identity
        all_names: dict[str, None] = {}  # in the order in which they occur
        for part in parts:
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


class _GivenPart:
    """Rows that a program made."""

    def __init__(self, rows: Sequence[Tree]) -> None:
        self._rows = rows
        names: dict[str, None] = {}  # in the order in which they occur
        for row in rows:
            names.update(dict.fromkeys(row))
        self.names: Sequence[str] = list(names)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int, names: Sequence[str] | None) -> Tree:
        row = self._rows[number]
        return dict(row) if names is None else {name: row.get(name) for name in names}


class _MappedFiles:
    """The files of a data set that are mapped into memory. To follow one that was cut would end the process by a signal."""

    def __init__(self, dataset: Any) -> None:
        self._states = {entry["filename"]: self._state(entry["filename"]) for entry in dataset.cache_files}

    @staticmethod
    def _state(file: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(file)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def require_unchanged(self) -> None:
        """Raises `ConfigError` if a file was written after it had been mapped. One that was removed or replaced stays mapped."""
        for file, noted in self._states.items():
            state = self._state(file)
            is_same_file = state is not None and noted is not None and state[0] == noted[0]
            if is_same_file and state != noted:
                raise ConfigError(f"{file} was changed while the run was using it; start again")


class _TextPart:
    """Rows of JSON or CSV files, which `text_rows` made."""

    def __init__(self, dataset: Any, files: Sequence[Path]) -> None:
        self._rows = dataset.with_format("arrow")
        self._mapped = _MappedFiles(dataset)
        self._files = files
        new_names = dataset.data.column("new_names").combine_chunks()
        self.names: Sequence[str] = new_names.flatten().to_pylist()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int, names: Sequence[str] | None) -> Tree:
        self._mapped.require_unchanged()
        entry = self._rows[number : number + 1]
        fault: str | None = entry.column("fault")[0].as_py()
        try:
            if fault is not None:
                raise DataError(fault)
            row = read_object(entry.column("text")[0].as_py())
        except DataError as error:
            number_of_file: int = entry.column("file")[0].as_py()
            line: int = entry.column("line")[0].as_py()
            raise DataError(f"the row, line {line:,} of {self._files[number_of_file].name}, {error}") from error
        return row if names is None else {name: row.get(name) for name in names}


class _TypedPart:
    """Rows of a Parquet or Arrow file, or of a data set of the `datasets` library, with the columns' own types."""

    def __init__(self, dataset: Any) -> None:
        self._rows = dataset.with_format("arrow")
        self._mapped = _MappedFiles(dataset)
        self._features = dataset.features
        self._types = {field.name: field.type for field in dataset.features.arrow_schema}
        # Without the unnamed row numbers that pandas writes.
        self.names: Sequence[str] = [name for name in dataset.column_names if not name.startswith(_PANDAS_INDEX)]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int, names: Sequence[str] | None) -> Tree:
        self._mapped.require_unchanged()
        entry = self._rows[number : number + 1]
        row: Tree = {}
        for name in self.names if names is None else names:
            row[name] = None
            if name not in self._types:
                continue
            try:
                value = entry.column(name)[0].as_py()
                row[name] = _plain(value, self._types[name], self._features[name])
            except Exception as error:  # its converters raise many types, for texts that are not UTF-8 for example
                reason = str(error).partition("\n")[0][:200]
                raise DataError(f"column '{name}' cannot be read ({type(error).__name__}: {reason})") from error
        return row


def _plain(value: Any, kind: Any, feature: Any) -> Any:
    """Returns a value of an Arrow type as a row has it.

    NaN becomes None, an empty cell. A number of 16 or 32 bits becomes the one with its shortest digits: 34.6, not
    34.599998474121094. A class becomes its name, and JSON the value that it describes. `feature` is what `datasets`
    knows of the column.
    """
    if value is None:
        return None
    name = type(feature).__name__
    if name == "ClassLabel":
        return None if value == -1 else feature.int2str(value)  # -1 is a missing class
    if name == "Json":
        return read_value(value) if isinstance(value, str) else value
    if isinstance(value, float):
        if math.isnan(value):
            return None
        narrow = {16: numpy.float16, 32: numpy.float32}.get(kind.bit_width)
        return value if narrow is None else float(str(narrow(value)))
    if is_list(value) and hasattr(kind, "value_type"):
        inner = feature[0] if is_list(feature) else getattr(feature, "feature", None)
        return [_plain(entry, kind.value_type, inner) for entry in value]
    if is_dict(value):
        fields = feature if is_dict(feature) else {}
        return {key: _plain(entry, kind.field(key).type, fields.get(key)) for key, entry in value.items()}
    return value


# Copies in the cache


def datasets_library() -> Any:
    """Returns the library `datasets`, of type Any and without its progress bars; importing it takes a second."""
    import datasets  # pyright: ignore[reportMissingTypeStubs]

    library: Any = datasets
    library.disable_progress_bars()
    return library


def _local_rows(source: str, local: LocalSource) -> Rows:
    kind = format_of(local.files[0])
    assert kind is not None, "the files of a source have known endings"
    states = [file.stat() for file in local.files]
    parts: list[_Part] = []
    with phase(f"reading {source}", is_brief=True):
        digests = [_digest(file, local.within) for file in local.files]
        if kind in TEXT_FORMATS:
            parts.append(_text_part(local, kind, digests))
        else:
            for file, digest in zip(local.files, digests, strict=True):
                parts.append(_typed_part(file, local.within, kind, digest))
    for file, status in zip(local.files, states, strict=True):
        now = file.stat()
        if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != (status.st_size, status.st_mtime_ns, status.st_ctime_ns):
            raise ConfigError(f"data file {file} changed while it was read; start again")
    begin, end = local.bounds(sum(len(part) for part in parts))
    return Rows(parts, begin=begin, end=end, identity=f"{kind} {begin} {end} {digests}")


def _digest(file: Path, within: Path | None) -> str:
    """Returns the digest of a data file; raises `ConfigError` if there is nothing in it."""
    with open_regular(file, within=within) as opened:
        head = opened.read(len(LFS_POINTER))
        opened.seek(0)
        if not head:
            raise ConfigError(f"data file {file} is empty (0 bytes); remove it or write it again")
        if head == LFS_POINTER:
            raise ConfigError(
                f"data file {file} is a pointer of Git LFS to a file that is not here; git lfs pull gets it"
            )
        return digest_of(opened)


def _key(kind: str, digests: Sequence[str]) -> str:
    return hashlib.sha256(" ".join([_FORM, kind, *digests]).encode()).hexdigest()[:32]


@contextmanager
def _named_errors(file: Path) -> Generator[None]:
    """Converts the errors of reading a data file to `ConfigError` with its name; those of this package stay as they are."""
    try:
        yield
    except Exception as error:  # `datasets` wraps what happens in it, and damaged files make readers raise many types
        cause = error.__cause__ if isinstance(error.__cause__, CepoError | OSError) else error
        if isinstance(cause, ConfigError | ForeignFileError) or unusable_place(cause) is not None:
            raise cause from error
        reason = str(cause).partition("\n")[0][:300]
        kind = "" if isinstance(cause, DataError) else f"{type(cause).__name__}: "
        raise ConfigError(f"data file {file} cannot be read: {kind}{reason}") from error


def _text_part(local: LocalSource, kind: str, digests: Sequence[str]) -> _TextPart:
    library = datasets_library()
    columns = library.Features(
        {
            "text": library.Value("large_binary"),
            "fault": library.Value("string"),
            "file": library.Value("int32"),
            "line": library.Value("int64"),
            "new_names": library.List(library.Value("string")),
        }
    )
    key = _key(kind, digests)
    arguments = {"files": tuple(local.files), "within": local.within, "kind": kind}  # a list would be split
    with _named_errors(local.files[0]), cached("rows", key) as entry:
        dataset = library.Dataset.from_generator(
            text_rows,
            features=columns,
            cache_dir=str(entry),
            gen_kwargs=arguments,
            fingerprint=key,
            writer_batch_size=_BATCH_ROWS,
        )
    part = _TextPart(dataset, local.files)
    if len(part) and not part.names:
        try:
            part.row(0, None)
        except DataError as error:
            raise ConfigError(
                f"data file {local.files[0]} has no readable row: {error}. Accepted: text in UTF-8 (in Excel: save as CSV "
                "UTF-8), in JSON one object in each line or one array of objects; unpack an archive first"
            ) from error
    return part


def _typed_part(file: Path, within: Path | None, kind: str, digest: str) -> _TypedPart:
    """Returns the rows of a Parquet or Arrow file from its copy in the cache, which is written if there is none.

    pyarrow copies them. `Dataset.from_parquet` takes a path for a pattern, and holds a row group at once: all rows, in
    the files of pandas. A user's own Arrow file is copied too: were it mapped, to write it would change rows of the run.
    """
    with _named_errors(file), cached("rows", _key(kind, [digest])) as entry:
        copy = entry / "rows.arrow"
        if not copy.exists():
            with open_regular(file, within=within) as opened:
                if kind == PARQUET:
                    parquet = pyarrow.parquet.ParquetFile(opened, pre_buffer=False)
                    _write_copy(copy, parquet.iter_batches(batch_size=_BATCH_ROWS))
                else:
                    _write_copy(copy, _arrow_batches(opened))
        return _TypedPart(datasets_library().Dataset.from_file(str(copy)))


def _write_copy(copy: Path, batches: Iterator[Any]) -> None:
    first = next(batches, None)
    if first is None:
        raise DataError("it has no rows; accepted: at least one problem")
    schema = first.schema
    features = datasets_library().Features
    try:
        features.from_arrow_schema(schema)
    except Exception:  # what another version of `datasets` wrote about the columns, or a type that it does not have
        schema = schema.remove_metadata()
        for field in schema:
            try:
                features.from_arrow_schema(pyarrow.schema([field]))
            except Exception as error:
                raise DataError(
                    f"column '{field.name}' has the type {field.type}, which rows cannot have; write it as text, or leave "
                    "it out of the file"
                ) from error
    with pyarrow.OSFile(str(copy), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def _arrow_batches(file: BinaryIO) -> Iterator[Any]:
    """Yields the batches of an Arrow file or stream; a wrong offset in it would end the process when it is followed."""
    if file.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(file)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        file.seek(0)
        batches = iter(pyarrow.ipc.open_stream(file))
    for batch in batches:
        batch.validate(full=True)
        yield batch


def _hub_rows(source: str) -> Rows:
    name, split = split_source(source)
    if Path(name).suffix or name.count("/") != 1:
        raise ConfigError(f"data files '{source}' do not exist; give a file, a folder, or a hub name org/name@split")
    try:
        dataset = datasets_library().load_dataset(name, split=split or "train")
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean the same to the user
        raise ConfigError(f"data files '{source}': neither a local path nor reachable on the hub ({error})") from error
    return Rows([_TypedPart(dataset)], identity=f"{source} {dataset._fingerprint}")
