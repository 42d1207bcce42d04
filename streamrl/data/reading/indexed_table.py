"""A data file whose rows are read in any order, without ever being in memory.

Of a text file it is known where each row begins; columns are memory-mapped. What cannot be read in
any order as it lies there (parquet, .gz) is unpacked once, into a folder beside the caches of
Hugging Face datasets, under the hash of what it holds.
"""

import contextlib
import mmap
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from streamrl.data.reading.formats import (
    PACKED,
    Layout,
    extension,
    is_parquet,
    layout_of,
    one_line,
    open_packed,
    parquet_columns,
    parquet_files,
    parse_row,
    plain_records,
    read_batches,
    reading,
    refuse_split,
    text_errors,
)
from streamrl.data.saved_dataset import open_dataset
from streamrl.errors import ConfigError, DataError
from streamrl.files.atomic_write import move_whole
from streamrl.files.bounded_read import MIB, open_regular, read_lines

if TYPE_CHECKING:
    import pyarrow as pa

Records = list[tuple[str, int, Any]]
"""(place, index from 0, record) of rows; the record of one that cannot be read is the ConfigError.
"""
BATCH = 512
"""Rows that are read together where all are read."""
MOST_HELD_BYTES = 32 * MIB
"""Of columns of parquet that are held in memory rather than unpacked into a file."""
_CHUNK_BYTES = 4 * MIB


@dataclass
class TextTable:
    """The rows of a text file. `path` is what the user named, `plain` the same, unpacked.

    starts, sizes: byte at which each row begins, and its bytes. numbers: the index of each row,
    None where nothing lies between them.
    """

    path: str
    plain: str
    layout: Layout
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]
    numbers: NDArray[np.int64] | None
    digest: str
    seal: tuple[int, int]

    def __post_init__(self) -> None:
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def indices(self) -> NDArray[np.int64]:
        """Return the index of each row: for JSONL blank lines count."""
        return np.arange(len(self)) if self.numbers is None else self.numbers

    def records(self, rows: Sequence[int]) -> Records:
        """Read rows by their place among all. Raises DataError if the file is not as it was."""
        file = self._opened()
        found = []
        for row in rows:
            start, size = int(self.starts[row]), int(self.sizes[row])
            index = row if self.numbers is None else int(self.numbers[row])
            place = f"{self.path} {self.layout.unit} {index + 1}"
            raw = os.pread(file.fileno(), size, start)
            found.append((place, index, parse_row(self.layout, raw, place)))
        return found

    def prompt_sizes(self, prompt_key: str) -> NDArray[np.int32]:
        """Return how long each row is, in bytes."""
        return self.sizes

    def _opened(self) -> BinaryIO:
        """The file, which one process opens once: another of its name does not matter."""
        with data_errors(self.path):
            if self._file is None:
                self._file = open_regular(self.plain)
            if _seal(self._file) != self.seal:
                raise DataError(f"{self.path}: has changed since the run read it first")
            return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}


def _seal(file: BinaryIO) -> tuple[int, int]:
    """Size and time of the last change: other ones are those of another content."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


class ColumnTable:
    """The rows of parquet files or a dataset. `load` gives their columns, in any process."""

    def __init__(self, path: str, load: Callable[[], Any], digest: str) -> None:
        self.path = path
        self.digest = digest
        self._load = load
        self._columns: Any = None

    def __len__(self) -> int:
        return len(self._loaded())

    def indices(self) -> NDArray[np.int64]:
        """Return the index of each row."""
        return np.arange(len(self))

    def records(self, rows: Sequence[int]) -> Records:
        """Read rows by their place among all. Raises DataError if they cannot be read."""
        import pyarrow as pa

        runs: Sequence[Sequence[int]] = [rows]
        with data_errors(self.path):
            columns = self._loaded()
            if isinstance(columns, pa.Table):
                if not isinstance(rows, range):
                    runs = [range(row, row + 1) for row in rows]
                pieces = [columns.slice(run[0], len(run)) for run in runs]
            else:
                pieces = [columns.with_format("arrow")[list(rows)]]
        found: Records = []
        for run, piece in zip(runs, pieces, strict=True):
            places = [f"{self.path} row {row + 1}" for row in run]
            found += zip(places, map(int, run), plain_records(piece, places), strict=True)
            if isinstance(self._load, _Mapped):
                self._load.release()
        return found

    def prompt_sizes(self, prompt_key: str) -> NDArray[np.int64] | None:
        """Return the bytes of each row's prompt; None where that cannot be told at a glance."""
        import pyarrow as pa

        columns = self._loaded()
        if isinstance(columns, pa.Table):
            return _text_sizes(columns, prompt_key)
        # Of a dataset whose rows were chosen or reordered, the columns are those of all rows.
        return None if columns._indices is not None else _text_sizes(columns.data.table, prompt_key)

    def _loaded(self) -> Any:
        if self._columns is None:
            self._columns = self._load()
        return self._columns

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_columns": None}


Table = TextTable | ColumnTable


@contextlib.contextmanager
def data_errors(path: str) -> Iterator[None]:
    """Raise what happens to a data file in the middle of a run as DataError naming it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: cannot be read any more: {one_line(error)}") from error


def open_table(path: str, split: str = "") -> Table:
    """Open a data file. Raises ConfigError naming it if it cannot be read, or holds no rows."""
    with reading(path):
        if is_parquet(path):
            table: Table = _parquet_table(path, split)
        elif Path(path).is_dir():
            load = _Dataset(path, split)
            load()  # what is no dataset is refused before all of it is hashed
            digest = _digest(sorted(file for file in Path(path).rglob("*") if file.is_file()))
            table = ColumnTable(path, load, f"{digest}:{split}")
        else:
            table = _text_table(path, split)
    if not len(table):
        raise ConfigError(f"{path}: holds no rows")
    return table


def read_records(path: str, split: str = "") -> Iterator[tuple[str, int, Any]]:
    """Read the records of a data file one at a time, in its order; see Records.

    Raises ConfigError as `open_table` does.
    """
    table = open_table(path, split)
    for start in range(0, len(table), BATCH):
        yield from table.records(range(start, min(start + BATCH, len(table))))


def _text_table(path: str, split: str) -> TextTable:
    kind = extension(path)
    refuse_split(path, split)
    plain = path
    if kind.endswith(PACKED):
        name = _digest([path]) + kind.removesuffix(PACKED)
        with text_errors(path):
            plain = str(_unpacked(path, name, _unpack_text))
    starts, sizes, numbers = array("q"), array("i"), array("q")
    with open_regular(plain) as file, text_errors(path):
        seal = _seal(file)
        layout = layout_of(file, kind)
        for index, start, row in layout.rows(file):
            numbers.append(index)
            starts.append(start)
            sizes.append(len(row))
    has_gaps = bool(numbers) and numbers[-1] != len(numbers) - 1
    return TextTable(
        path,
        plain,
        layout,
        np.array(starts, np.int64),
        np.array(sizes, np.int32),
        np.array(numbers, np.int64) if has_gaps else None,
        # Of what is unpacked: the level of compression makes no other rows.
        _digest([plain]),
        seal,
    )


def _parquet_table(path: str, split: str) -> ColumnTable:
    files = parquet_files(path, split)
    digest = _digest(files)
    held = _in_memory(path, files)
    if held is not None:
        return ColumnTable(path, _Held(held), digest)
    plain = _unpacked(path, f"{digest}.arrow", lambda _, out: _unpack_parquet(path, files, out))
    return ColumnTable(path, _Mapped(str(plain)), digest)


@dataclass(frozen=True)
class _Held:
    """Columns in memory, which travel with the table."""

    columns: "pa.Table"

    def __call__(self) -> "pa.Table":
        return self.columns


class _Mapped:
    """Columns in an Arrow file, of which the system reads what is asked for."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pages: mmap.mmap | None = None

    def __call__(self) -> "pa.Table":
        import pyarrow as pa

        with open_regular(self._path) as file:
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return pa.ipc.open_file(pa.py_buffer(self._pages)).read_all()

    def release(self) -> None:
        """Give back the memory of what has been read: the system holds more around each row."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pages": None}


@dataclass(frozen=True)
class _Dataset:
    path: str
    split: str

    def __call__(self) -> Any:
        return open_dataset(self.path, self.split)


def _batches(path: str, files: Sequence[str]) -> "Iterator[pa.RecordBatch]":
    """The rows of all files, in the columns of all; one that a file lacks is null in its rows."""
    import pyarrow as pa

    none = pa.Table.from_batches([], _unify(path, files))
    for file in files:
        for batch in read_batches(file):
            tables = [none, pa.Table.from_batches([batch])]
            try:
                rows = pa.concat_tables(tables, promote_options="permissive")
            except pa.ArrowException as error:
                raise ConfigError(f"{file}: cannot be read: {one_line(error)}") from error
            yield from rows.to_batches()


def _unify(path: str, files: Sequence[str]) -> "pa.Schema":
    """The columns of all files. Raises ConfigError for one of types that have other values."""
    import pyarrow as pa

    types: dict[str, dict[pa.DataType, str]] = {}
    for file in files:
        columns = parquet_columns(file)
        for name in columns.names:
            if columns.names.count(name) > 1:
                raise ConfigError(f"{file}: column {name!r}: must be there once")
            types.setdefault(name, {}).setdefault(columns.field(name).type, Path(file).name)
    return pa.schema([(name, _unify_types(path, name, found)) for name, found in types.items()])


def _unify_types(path: str, name: str, types: "dict[pa.DataType, str]") -> "pa.DataType":
    """The type that holds a column as all files have it; `types` says where each is first."""
    import pyarrow as pa

    try:
        fields = [pa.schema([(name, one)]) for one in types]
        unified = pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except pa.ArrowException:
        unified = None
    if unified is None or not all(_keeps_values(one, unified) for one in types):
        found = ", ".join(f"{one} in {file}" for one, file in types.items())
        raise ConfigError(
            f"{path}: column {name!r} has other types in its files: {found}; write all with the"
            " same type, or name each file as an entry of its own"
        )
    return unified


def _keeps_values(one: "pa.DataType", other: "pa.DataType") -> bool:
    """Whether values of a type are the same in a wider one: text and integers of any width are."""
    from pyarrow import types as t

    if one == other or t.is_null(one):
        return True
    if t.is_struct(one) and t.is_struct(other):
        return all(_keeps_values(each.type, other.field(each.name).type) for each in one)
    if t.is_map(one) and t.is_map(other):
        pairs = ((one.key_type, other.key_type), (one.item_type, other.item_type))
        return all(_keeps_values(*pair) for pair in pairs)
    kinds: list[Callable[[Any], bool]] = [t.is_integer, t.is_floating]
    kinds.append(lambda type_: t.is_string(type_) or t.is_large_string(type_))
    kinds.append(lambda type_: t.is_binary(type_) or t.is_large_binary(type_))
    if any(is_kind(one) and is_kind(other) for is_kind in kinds):
        return True
    is_list = all(t.is_list(each) or t.is_large_list(each) for each in (one, other))
    return is_list and _keeps_values(one.value_type, other.value_type)


def _in_memory(path: str, files: Sequence[str]) -> "pa.Table | None":
    """The rows of all files; None if they take more than MOST_HELD_BYTES.

    A value that a file has once may be that of all its rows: only unpacked it is known what they
    take.
    """
    import pyarrow as pa

    batches, size = [], 0
    for batch in _batches(path, files):
        batches.append(batch)
        size += batch.nbytes
        if size > MOST_HELD_BYTES:
            return None
    if not batches:
        raise ConfigError(f"{path}: holds no rows")
    return pa.Table.from_batches(batches).combine_chunks()


def _unpack_parquet(path: str, files: Sequence[str], out: BinaryIO) -> None:
    import pyarrow as pa

    batches = _batches(path, files)
    first = next(batches, None)
    if first is None:
        raise ConfigError(f"{path}: holds no rows")
    with pa.ipc.new_file(out, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _unpack_text(path: str, out: BinaryIO) -> None:
    with open_packed(path) as file:
        for line in read_lines(file):
            out.write(line)


def cache_dir() -> Path:
    """Return the folder that unpacked files lie in."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    datasets = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    return Path(datasets).expanduser() / "streamrl"


def _unpacked(path: str, name: str, unpack: Callable[[str, BinaryIO], None]) -> Path:
    """The file in the cache that holds what `path` does, made if it is not there."""
    final = cache_dir() / name
    if final.is_file():
        return final
    partial = final.with_name(f".{name}.{os.getpid()}.partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        out = partial.open("xb")
    except OSError as error:
        raise ConfigError(_no_cache(path, error)) from error
    try:
        with out:
            unpack(path, out)
        move_whole(partial, final)
    except OSError as error:
        # Of what is packed, or of where it is unpacked to.
        if error.filename is None and error.errno is not None:
            raise ConfigError(_no_cache(path, error)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)
    return final


def _no_cache(path: str, error: OSError) -> str:
    return (
        f"{path}: cannot be unpacked into {cache_dir()}: {error.strerror or error}"
        " (HF_DATASETS_CACHE names another folder)"
    )


def _digest(files: Sequence[str | Path]) -> str:
    """Hash of what files hold, in their order."""
    digest = xxhash.xxh3_128()
    for path in files:
        with open_regular(path) as file:
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
            digest.update(f"/{file.tell()}/".encode())
    return digest.hexdigest()


def _text_sizes(table: "pa.Table", prompt_key: str) -> NDArray[np.int64] | None:
    """Bytes of a column of text, or of the contents of chat messages, by row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if prompt_key not in table.column_names:
        return None
    column = table[prompt_key]
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.asarray(pc.fill_null(pc.binary_length(column), 0)).astype(np.int64)
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        return None
    inner = column.type.value_type
    if not pa.types.is_struct(inner) or inner.get_field_index("content") < 0:
        return None
    content = inner.field("content").type
    if not pa.types.is_string(content) and not pa.types.is_large_string(content):
        return None
    contents = pc.struct_field(pc.list_flatten(column), "content")
    sizes = np.asarray(pc.fill_null(pc.binary_length(contents), 0)).astype(np.int64)
    ends = np.cumsum(np.asarray(pc.fill_null(pc.list_value_length(column), 0)))
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return sums[ends] - sums[np.concatenate([[0], ends[:-1]])]
