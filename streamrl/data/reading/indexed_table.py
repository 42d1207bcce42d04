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
    GZIP_SUFFIX,
    TextLayout,
    check_no_split,
    detect_layout,
    format_error,
    is_parquet,
    list_parquet_files,
    open_gzip,
    parse_extension,
    parse_text_row,
    read_parquet_batches,
    read_parquet_schema,
    to_plain_records,
    wrap_read_errors,
    wrap_text_errors,
)
from streamrl.data.saved_dataset import open_saved_dataset
from streamrl.errors import ConfigError, DataError
from streamrl.files.atomic_write import sync_and_rename
from streamrl.files.bounded_read import MIB, open_regular_file, read_lines

if TYPE_CHECKING:
    import pyarrow as pa

IndexedRecords = list[tuple[str, int, Any]]
"""(place, index from 0, record) of rows; the record of one that cannot be read is the ConfigError.
"""
READ_BATCH_ROWS = 512
"""Rows that are read together where all are read."""
MAX_IN_MEMORY_BYTES = 32 * MIB
"""Of columns of parquet that are held in memory rather than unpacked into a file."""
_CHUNK_BYTES = 4 * MIB


@dataclass
class TextTable:
    """The rows of a text file. `path` is what the user named, `unpacked_path` the same, unpacked.

    starts, sizes: byte at which each row begins, and its bytes. numbers: the index of each row,
    None where nothing lies between them.
    """

    path: str
    unpacked_path: str
    layout: TextLayout
    row_offsets: NDArray[np.int64]
    row_sizes: NDArray[np.int32]
    row_indices: NDArray[np.int64] | None
    digest: str
    file_stamp: tuple[int, int]

    def __post_init__(self) -> None:
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return len(self.row_offsets)

    def get_indices(self) -> NDArray[np.int64]:
        """Return the index of each row: for JSONL blank lines count."""
        return np.arange(len(self)) if self.row_indices is None else self.row_indices

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords:
        """Read rows by their place among all. Raises DataError if the file is not as it was."""
        file = self._open_file()
        found = []
        for row in rows:
            start, size = int(self.row_offsets[row]), int(self.row_sizes[row])
            index = row if self.row_indices is None else int(self.row_indices[row])
            place = f"{self.path} {self.layout.unit} {index + 1}"
            raw = os.pread(file.fileno(), size, start)
            found.append((place, index, parse_text_row(self.layout, raw, place)))
        return found

    def get_prompt_sizes(self, prompt_key: str) -> NDArray[np.int32]:
        """Return how long each row is, in bytes."""
        return self.row_sizes

    def _open_file(self) -> BinaryIO:
        """The file, which one process opens once: another of its name does not matter."""
        with wrap_data_errors(self.path):
            if self._file is None:
                self._file = open_regular_file(self.unpacked_path)
            if _get_file_stamp(self._file) != self.file_stamp:
                raise DataError(f"{self.path}: has changed since the run read it first")
            return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}


def _get_file_stamp(file: BinaryIO) -> tuple[int, int]:
    """Size and time of the last change: other ones are those of another content."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


class ColumnTable:
    """The rows of parquet files or a dataset. `load` gives their columns, in any process."""

    def __init__(self, path: str, load: Callable[[], Any], digest: str) -> None:
        self.path = path
        self.digest = digest
        self._column_loader = load
        self._columns: Any = None

    def __len__(self) -> int:
        return len(self._load_columns())

    def get_indices(self) -> NDArray[np.int64]:
        """Return the index of each row."""
        return np.arange(len(self))

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords:
        """Read rows by their place among all. Raises DataError if they cannot be read."""
        import pyarrow as pa

        runs: Sequence[Sequence[int]] = [rows]
        with wrap_data_errors(self.path):
            columns = self._load_columns()
            if isinstance(columns, pa.Table):
                if not isinstance(rows, range):
                    runs = [range(row, row + 1) for row in rows]
                pieces = [columns.slice(run[0], len(run)) for run in runs]
            else:
                pieces = [columns.with_format("arrow")[list(rows)]]
        found: IndexedRecords = []
        for run, piece in zip(runs, pieces, strict=True):
            places = [f"{self.path} row {row + 1}" for row in run]
            found += zip(places, map(int, run), to_plain_records(piece, places), strict=True)
            if isinstance(self._column_loader, _MappedColumns):
                self._column_loader.release_pages()
        return found

    def get_prompt_sizes(self, prompt_key: str) -> NDArray[np.int64] | None:
        """Return the bytes of each row's prompt; None where that cannot be told at a glance."""
        import pyarrow as pa

        columns = self._load_columns()
        if isinstance(columns, pa.Table):
            return _compute_text_sizes(columns, prompt_key)
        # Of a dataset whose rows were chosen or reordered, the columns are those of all rows.
        return (
            None
            if columns._indices is not None
            else _compute_text_sizes(columns.data.table, prompt_key)
        )

    def _load_columns(self) -> Any:
        if self._columns is None:
            self._columns = self._column_loader()
        return self._columns

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_columns": None}


IndexedTable = TextTable | ColumnTable


@contextlib.contextmanager
def wrap_data_errors(path: str) -> Iterator[None]:
    """Raise what happens to a data file in the middle of a run as DataError naming it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: cannot be read any more: {format_error(error)}") from error


def open_table(path: str, split: str = "") -> IndexedTable:
    """Open a data file. Raises ConfigError naming it if it cannot be read, or holds no rows."""
    with wrap_read_errors(path):
        if is_parquet(path):
            table: IndexedTable = _open_parquet_table(path, split)
        elif Path(path).is_dir():
            load = _DatasetColumns(path, split)
            load()  # what is no dataset is refused before all of it is hashed
            digest = _hash_files(sorted(file for file in Path(path).rglob("*") if file.is_file()))
            table = ColumnTable(path, load, f"{digest}:{split}")
        else:
            table = _open_text_table(path, split)
    if not len(table):
        raise ConfigError(f"{path}: holds no rows")
    return table


def read_records(path: str, split: str = "") -> Iterator[tuple[str, int, Any]]:
    """Read the records of a data file one at a time, in its order; see Records.

    Raises ConfigError as `open_table` does.
    """
    table = open_table(path, split)
    for start in range(0, len(table), READ_BATCH_ROWS):
        yield from table.read_rows(range(start, min(start + READ_BATCH_ROWS, len(table))))


def _open_text_table(path: str, split: str) -> TextTable:
    kind = parse_extension(path)
    check_no_split(path, split)
    plain = path
    if kind.endswith(GZIP_SUFFIX):
        name = _hash_files([path]) + kind.removesuffix(GZIP_SUFFIX)
        with wrap_text_errors(path):
            plain = str(_unpack_into_cache(path, name, _unpack_text))
    starts, sizes, numbers = array("q"), array("i"), array("q")
    with open_regular_file(plain) as file, wrap_text_errors(path):
        seal = _get_file_stamp(file)
        layout = detect_layout(file, kind)
        for index, start, row in layout.iter_rows(file):
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
        _hash_files([plain]),
        seal,
    )


def _open_parquet_table(path: str, split: str) -> ColumnTable:
    files = list_parquet_files(path, split)
    digest = _hash_files(files)
    held = _read_into_memory(path, files)
    if held is not None:
        return ColumnTable(path, _MemoryColumns(held), digest)
    plain = _unpack_into_cache(
        path, f"{digest}.arrow", lambda _, out: _unpack_parquet(path, files, out)
    )
    return ColumnTable(path, _MappedColumns(str(plain)), digest)


@dataclass(frozen=True)
class _MemoryColumns:
    """Columns in memory, which travel with the table."""

    columns: "pa.Table"

    def __call__(self) -> "pa.Table":
        return self.columns


class _MappedColumns:
    """Columns in an Arrow file, of which the system reads what is asked for."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pages: mmap.mmap | None = None

    def __call__(self) -> "pa.Table":
        import pyarrow as pa

        with open_regular_file(self._path) as file:
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return pa.ipc.open_file(pa.py_buffer(self._pages)).read_all()

    def release_pages(self) -> None:
        """Give back the memory of what has been read: the system holds more around each row."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pages": None}


@dataclass(frozen=True)
class _DatasetColumns:
    path: str
    split: str

    def __call__(self) -> Any:
        return open_saved_dataset(self.path, self.split)


def _read_unified_batches(path: str, files: Sequence[str]) -> "Iterator[pa.RecordBatch]":
    """The rows of all files, in the columns of all; one that a file lacks is null in its rows."""
    import pyarrow as pa

    none = pa.Table.from_batches([], _unify_schemas(path, files))
    for file in files:
        for batch in read_parquet_batches(file):
            tables = [none, pa.Table.from_batches([batch])]
            try:
                rows = pa.concat_tables(tables, promote_options="permissive")
            except pa.ArrowException as error:
                raise ConfigError(f"{file}: cannot be read: {format_error(error)}") from error
            yield from rows.to_batches()


def _unify_schemas(path: str, files: Sequence[str]) -> "pa.Schema":
    """The columns of all files. Raises ConfigError for one of types that have other values."""
    import pyarrow as pa

    types: dict[str, dict[pa.DataType, str]] = {}
    for file in files:
        columns = read_parquet_schema(file)
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
    if unified is None or not all(_is_lossless_cast(one, unified) for one in types):
        found = ", ".join(f"{one} in {file}" for one, file in types.items())
        raise ConfigError(
            f"{path}: column {name!r} has other types in its files: {found}; write all with the"
            " same type, or name each file as an entry of its own"
        )
    return unified


def _is_lossless_cast(one: "pa.DataType", other: "pa.DataType") -> bool:
    """Whether values of a type are the same in a wider one: text and integers of any width are."""
    from pyarrow import types as t

    if one == other or t.is_null(one):
        return True
    if t.is_struct(one) and t.is_struct(other):
        return all(_is_lossless_cast(each.type, other.field(each.name).type) for each in one)
    if t.is_map(one) and t.is_map(other):
        pairs = ((one.key_type, other.key_type), (one.item_type, other.item_type))
        return all(_is_lossless_cast(*pair) for pair in pairs)
    kinds: list[Callable[[Any], bool]] = [t.is_integer, t.is_floating]
    kinds.append(lambda type_: t.is_string(type_) or t.is_large_string(type_))
    kinds.append(lambda type_: t.is_binary(type_) or t.is_large_binary(type_))
    if any(is_kind(one) and is_kind(other) for is_kind in kinds):
        return True
    is_list = all(t.is_list(each) or t.is_large_list(each) for each in (one, other))
    return is_list and _is_lossless_cast(one.value_type, other.value_type)


def _read_into_memory(path: str, files: Sequence[str]) -> "pa.Table | None":
    """The rows of all files; None if they take more than MOST_HELD_BYTES.

    A value that a file has once may be that of all its rows: only unpacked it is known what they
    take.
    """
    import pyarrow as pa

    batches, size = [], 0
    for batch in _read_unified_batches(path, files):
        batches.append(batch)
        size += batch.nbytes
        if size > MAX_IN_MEMORY_BYTES:
            return None
    if not batches:
        raise ConfigError(f"{path}: holds no rows")
    return pa.Table.from_batches(batches).combine_chunks()


def _unpack_parquet(path: str, files: Sequence[str], out: BinaryIO) -> None:
    import pyarrow as pa

    batches = _read_unified_batches(path, files)
    first = next(batches, None)
    if first is None:
        raise ConfigError(f"{path}: holds no rows")
    with pa.ipc.new_file(out, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _unpack_text(path: str, out: BinaryIO) -> None:
    with open_gzip(path) as file:
        for line in read_lines(file):
            out.write(line)


def get_cache_dir() -> Path:
    """Return the folder that unpacked files lie in."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    datasets = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    return Path(datasets).expanduser() / "streamrl"


def _unpack_into_cache(path: str, name: str, unpack: Callable[[str, BinaryIO], None]) -> Path:
    """The file in the cache that holds what `path` does, made if it is not there."""
    final = get_cache_dir() / name
    if final.is_file():
        return final
    partial = final.with_name(f".{name}.{os.getpid()}.partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        out = partial.open("xb")
    except OSError as error:
        raise ConfigError(_describe_cache_error(path, error)) from error
    try:
        with out:
            unpack(path, out)
        sync_and_rename(partial, final)
    except OSError as error:
        # Of what is packed, or of where it is unpacked to.
        if error.filename is None and error.errno is not None:
            raise ConfigError(_describe_cache_error(path, error)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)
    return final


def _describe_cache_error(path: str, error: OSError) -> str:
    return (
        f"{path}: cannot be unpacked into {get_cache_dir()}: {error.strerror or error}"
        " (HF_DATASETS_CACHE names another folder)"
    )


def _hash_files(files: Sequence[str | Path]) -> str:
    """Hash of what files hold, in their order."""
    digest = xxhash.xxh3_128()
    for path in files:
        with open_regular_file(path) as file:
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
            digest.update(f"/{file.tell()}/".encode())
    return digest.hexdigest()


def _compute_text_sizes(table: "pa.Table", prompt_key: str) -> NDArray[np.int64] | None:
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
