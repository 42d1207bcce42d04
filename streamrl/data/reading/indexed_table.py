"""Random access to the rows of a data file without loading the file into memory.

A text file gets an index of row offsets; columnar data is memory-mapped. Formats without random
access (parquet, .gz) are unpacked once into a cache folder beside the caches of Hugging Face
datasets, under the hash of their content.
"""

import contextlib
import mmap
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from streamrl.data.reading.formats import (
    DATASET_FILES,
    GZIP_SUFFIX,
    TextLayout,
    check_no_split,
    check_split,
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
from streamrl.errors import ConfigError, DataError
from streamrl.files.atomic_write import sync_and_rename
from streamrl.files.bounded_read import (
    MAX_LINE_BYTES,
    MIB,
    open_regular_file,
    read_lines,
    read_small_json,
    wrap_file_errors,
)
from streamrl.files.typed_settings import describe_read_error

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_SPLITS_FILE, _INFO_FILE = DATASET_FILES
"""Files with the splits of a dataset, and with its features."""
_STATE_FILE = "state.json"
"""File with the data files of a dataset or split."""


class _StateDataFile(msgspec.Struct):
    filename: str


class _DatasetState(msgspec.Struct):
    data_files: Annotated[list[_StateDataFile], msgspec.Meta(min_length=1)] = msgspec.field(
        name="_data_files"
    )


class _DatasetSplits(msgspec.Struct):
    splits: list[str]


def open_saved_dataset(path: str, split: str) -> "Dataset":
    """Open a dataset written by `save_to_disk`, memory-mapped. Raises ConfigError with the path."""
    from datasets import Dataset

    folder = Path(path)
    with _wrap_dataset_errors(path):
        if (folder / _SPLITS_FILE).is_file() and not (folder / _STATE_FILE).is_file():
            check_split(
                path, split, _read_dataset_file(folder / _SPLITS_FILE, _DatasetSplits).splits
            )
            folder = _resolve_sibling(folder / _SPLITS_FILE, split)
        else:
            check_no_split(path, split)
        for file in _read_dataset_file(folder / _STATE_FILE, _DatasetState).data_files:
            data = _resolve_sibling(folder / _STATE_FILE, file.filename)
            with wrap_file_errors(data):
                open_regular_file(data).close()
        _read_dataset_file(folder / _INFO_FILE, dict)
        return Dataset.load_from_disk(str(folder))


@contextmanager
def _wrap_dataset_errors(path: str) -> Iterator[None]:
    """Convert errors of reading a saved dataset, except OSError, to ConfigError with the path."""
    try:
        yield
    except (ConfigError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f"{path}: cannot be read as a dataset: {format_error(error)}") from error


def _read_dataset_file(file: Path, kind: Any) -> Any:
    """Parse a JSON metadata file to type `kind`. Raises ValueError with the file's name."""
    try:
        return msgspec.convert(read_small_json(file, most_bytes=MAX_LINE_BYTES), kind)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"{file.parent.name}/{file.name}: {describe_read_error(error)}") from None


def _resolve_sibling(file: Path, name: str) -> Path:
    """Return the path of a file that a metadata file names; ValueError outside its folder."""
    if name in ("", "..") or Path(name).name != name:
        location = f"{file.parent.name}/{file.name}"
        raise ValueError(f"{location}: {name!r:.80} must be a file in the same folder")
    return file.with_name(name)


IndexedRecords = list[tuple[str, int, Any]]
"""(location, index from 0, record) of rows; an unreadable record is its ConfigError."""
READ_BATCH_ROWS = 512
"""Rows per batch of a sequential read."""
MAX_IN_MEMORY_BYTES = 32 * MIB
"""Limit of parquet columns kept in memory; larger files are unpacked into the cache."""
_CHUNK_BYTES = 4 * MIB


@dataclass
class TextTable:
    """Text file with an index of its rows.

    path: file that the user named. unpacked_path: the same file, uncompressed. row_offsets,
    row_sizes: first byte and length of each row. row_indices: number of each row in the file, None
    if numbers equal positions. digest: hash of the content. file_stamp: size and modification time.
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
        """Return the number of each row in the file; blank lines of JSONL count."""
        return np.arange(len(self)) if self.row_indices is None else self.row_indices

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords:
        """Read and parse the rows at these positions. Raises DataError if the file has changed."""
        file = self._open_file()
        records = []
        for row in rows:
            start, size = int(self.row_offsets[row]), int(self.row_sizes[row])
            index = row if self.row_indices is None else int(self.row_indices[row])
            location = f"{self.path} {self.layout.unit} {index + 1}"
            raw = os.pread(file.fileno(), size, start)
            records.append((location, index, parse_text_row(self.layout, raw, location)))
        return records

    def get_prompt_sizes(self, prompt_key: str) -> NDArray[np.int32]:
        """Return the bytes of each whole row, an upper bound of the bytes of its prompt."""
        return self.row_sizes

    def _open_file(self) -> BinaryIO:
        with wrap_data_errors(self.path):
            if self._file is None:
                self._file = open_regular_file(self.unpacked_path)
            if _get_file_stamp(self._file) != self.file_stamp:
                raise DataError(f"{self.path}: the file has changed since the run first read it")
            return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}


def _get_file_stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


class ColumnTable:
    """Rows of parquet files or of a Hugging Face dataset, with random access.

    load: opens the columns in any process. digest: hash of the content.
    """

    def __init__(self, path: str, load: Callable[[], Any], digest: str) -> None:
        self.path = path
        self.digest = digest
        self._column_loader = load
        self._columns: Any = None

    def __len__(self) -> int:
        return len(self._load_columns())

    def get_indices(self) -> NDArray[np.int64]:
        return np.arange(len(self))

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords:
        """Read the rows at these positions as records. Raises DataError on failure."""
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
        records: IndexedRecords = []
        for run, piece in zip(runs, pieces, strict=True):
            locations = [f"{self.path} row {row + 1}" for row in run]
            records += zip(
                locations, map(int, run), to_plain_records(piece, locations), strict=True
            )
            if isinstance(self._column_loader, _MappedColumns):
                self._column_loader.release_pages()
        return records

    def get_prompt_sizes(self, prompt_key: str) -> NDArray[np.int64] | None:
        """Return the bytes of each row's prompt, or None if the columns do not show them."""
        import pyarrow as pa

        columns = self._load_columns()
        if isinstance(columns, pa.Table):
            return _compute_text_sizes(columns, prompt_key)
        # A dataset with selected or reordered rows keeps the columns of all its original rows.
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


class RandomAccessRows(Protocol):
    """Rows that can be read in any order."""

    def __len__(self) -> int: ...

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords: ...


@contextlib.contextmanager
def wrap_data_errors(path: str) -> Iterator[None]:
    """Convert any error of reading rows during a run to DataError with the path."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: can no longer be read: {format_error(error)}") from error


def open_table(path: str, split: str = "") -> IndexedTable:
    """Open data for random access to its rows. Raises ConfigError for unreadable or empty data."""
    with wrap_read_errors(path):
        if is_parquet(path):
            table: IndexedTable = _open_parquet_table(path, split)
        elif Path(path).is_dir():
            load = partial(open_saved_dataset, path, split)
            load()  # refuse a folder that is not a dataset before hashing all of its files
            digest = _hash_files(sorted(file for file in Path(path).rglob("*") if file.is_file()))
            table = ColumnTable(path, load, f"{digest}:{split}")
        else:
            table = _open_text_table(path, split)
    if not len(table):
        raise ConfigError(f"{path}: contains no rows")
    return table


def read_records(path: str, split: str = "") -> Iterator[tuple[str, int, Any]]:
    """Yield (location, index, record) of each row of a data file in order.

    The record of an unreadable row is its ConfigError. Raises ConfigError for unreadable or empty
    data.
    """
    yield from iterate_records(open_table(path, split))


def iterate_records(table: "RandomAccessRows") -> Iterator[tuple[str, int, Any]]:
    """Yield (location, index, record) of each row of a table in order."""
    for start in range(0, len(table), READ_BATCH_ROWS):
        yield from table.read_rows(range(start, min(start + READ_BATCH_ROWS, len(table))))


def _open_text_table(path: str, split: str) -> TextTable:
    extension = parse_extension(path)
    check_no_split(path, split)
    unpacked = path
    if extension.endswith(GZIP_SUFFIX):
        name = _hash_files([path]) + extension.removesuffix(GZIP_SUFFIX)
        with wrap_text_errors(path):
            unpacked = str(_unpack_into_cache(path, name, _unpack_text))
    starts, sizes, numbers = array("q"), array("i"), array("q")
    with open_regular_file(unpacked) as file, wrap_text_errors(path):
        stamp = _get_file_stamp(file)
        layout = detect_layout(file, extension)
        for index, start, row in layout.iter_rows(file):
            numbers.append(index)
            starts.append(start)
            sizes.append(len(row))
    has_gaps = bool(numbers) and numbers[-1] != len(numbers) - 1
    return TextTable(
        path,
        unpacked,
        layout,
        np.array(starts, np.int64),
        np.array(sizes, np.int32),
        np.array(numbers, np.int64) if has_gaps else None,
        # Hash the unpacked content: another compression level does not change the rows.
        _hash_files([unpacked]),
        stamp,
    )


def _open_parquet_table(path: str, split: str) -> ColumnTable:
    files = list_parquet_files(path, split)
    digest = _hash_files(files)
    in_memory = _read_into_memory(path, files)
    if in_memory is not None:
        return ColumnTable(path, partial(_get_columns, in_memory), digest)
    unpacked = _unpack_into_cache(
        path, f"{digest}.arrow", lambda _, out: _unpack_parquet(path, files, out)
    )
    return ColumnTable(path, _MappedColumns(str(unpacked)), digest)


def _get_columns(columns: "pa.Table") -> "pa.Table":
    return columns


class _MappedColumns:
    """Loader of Arrow columns in a memory-mapped file; the OS reads only accessed pages."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pages: mmap.mmap | None = None

    def __call__(self) -> "pa.Table":
        import pyarrow as pa

        with open_regular_file(self._path) as file:
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return pa.ipc.open_file(pa.py_buffer(self._pages)).read_all()

    def release_pages(self) -> None:
        """Release the pages read so far; readahead keeps far more than the rows in memory."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pages": None}


def _read_unified_batches(path: str, files: Sequence[str]) -> "Iterator[pa.RecordBatch]":
    """Yield the rows of all parquet files with the union of their columns, null where lacking."""
    import pyarrow as pa

    empty = pa.Table.from_batches([], _unify_schemas(path, files))
    for file in files:
        for batch in read_parquet_batches(file):
            tables = [empty, pa.Table.from_batches([batch])]
            try:
                rows = pa.concat_tables(tables, promote_options="permissive")
            except pa.ArrowException as error:
                raise ConfigError(f"{file}: cannot be read: {format_error(error)}") from error
            yield from rows.to_batches()


def _unify_schemas(path: str, files: Sequence[str]) -> "pa.Schema":
    import pyarrow as pa

    types: dict[str, dict[pa.DataType, str]] = {}
    for file in files:
        columns = read_parquet_schema(file)
        for name in columns.names:
            if columns.names.count(name) > 1:
                raise ConfigError(f"{file}: column {name!r}: must occur only once")
            types.setdefault(name, {}).setdefault(columns.field(name).type, Path(file).name)
    return pa.schema([(name, _unify_types(path, name, seen)) for name, seen in types.items()])


def _unify_types(path: str, name: str, types: "dict[pa.DataType, str]") -> "pa.DataType":
    """Return an Arrow type for the values of column `name`. types: first file of each type."""
    import pyarrow as pa

    try:
        fields = [pa.schema([(name, type_)]) for type_ in types]
        unified = pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except pa.ArrowException:
        unified = None
    if unified is None or not all(_is_lossless_cast(type_, unified) for type_ in types):
        listing = ", ".join(f"{type_} in {file}" for type_, file in types.items())
        raise ConfigError(
            f"{path}: column {name!r} has different types in its files: {listing}; write all files"
            " with the same type, or list each file as a separate entry"
        )
    return unified


def _is_lossless_cast(source: "pa.DataType", target: "pa.DataType") -> bool:
    """Return whether two Arrow types are of one kind (integer, text, ...), whatever the width."""
    from pyarrow import types as t

    if source == target or t.is_null(source):
        return True
    if t.is_struct(source) and t.is_struct(target):
        return all(_is_lossless_cast(field.type, target.field(field.name).type) for field in source)
    if t.is_map(source) and t.is_map(target):
        pairs = ((source.key_type, target.key_type), (source.item_type, target.item_type))
        return all(_is_lossless_cast(*pair) for pair in pairs)
    kinds: list[Callable[[Any], bool]] = [t.is_integer, t.is_floating]
    kinds.append(lambda type_: t.is_string(type_) or t.is_large_string(type_))
    kinds.append(lambda type_: t.is_binary(type_) or t.is_large_binary(type_))
    if any(is_kind(source) and is_kind(target) for is_kind in kinds):
        return True
    is_list = all(t.is_list(type_) or t.is_large_list(type_) for type_ in (source, target))
    return is_list and _is_lossless_cast(source.value_type, target.value_type)


def _read_into_memory(path: str, files: Sequence[str]) -> "pa.Table | None":
    """Read the rows of all parquet files, or return None above MAX_IN_MEMORY_BYTES.

    The file size is no guide: dictionary encoding may store a value once for all rows.
    """
    import pyarrow as pa

    batches, size = [], 0
    for batch in _read_unified_batches(path, files):
        batches.append(batch)
        size += batch.nbytes
        if size > MAX_IN_MEMORY_BYTES:
            return None
    if not batches:
        raise ConfigError(f"{path}: contains no rows")
    return pa.Table.from_batches(batches).combine_chunks()


def _unpack_parquet(path: str, files: Sequence[str], out: BinaryIO) -> None:
    import pyarrow as pa

    batches = _read_unified_batches(path, files)
    first = next(batches, None)
    if first is None:
        raise ConfigError(f"{path}: contains no rows")
    with pa.ipc.new_file(out, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _unpack_text(path: str, out: BinaryIO) -> None:
    with open_gzip(path) as file:
        for line in read_lines(file):
            out.write(line)


def get_cache_dir() -> Path:
    """Return the folder of unpacked data files, beside the caches of Hugging Face datasets."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    datasets = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    return Path(datasets).expanduser() / "streamrl"


def _unpack_into_cache(path: str, name: str, unpack: Callable[[str, BinaryIO], None]) -> Path:
    """Unpack the data file `path` into file `name` of `get_cache_dir()` unless that exists.

    Returns the path of the unpacked file, which `unpack` (path, open file) writes. Raises
    ConfigError if the cache cannot be written.
    """
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
        # Errors of the cache have no file name here; errors of the packed file name that file.
        if error.filename is None and error.errno is not None:
            raise ConfigError(_describe_cache_error(path, error)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)
    return final


def _describe_cache_error(path: str, error: OSError) -> str:
    return (
        f"{path}: cannot be unpacked into {get_cache_dir()}: {error.strerror or error}"
        " (set HF_DATASETS_CACHE to choose another folder)"
    )


def _hash_files(files: Sequence[str | Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        with open_regular_file(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            digest.update(f"/{file.tell()}/".encode())
    return digest.hexdigest()


def _compute_text_sizes(table: "pa.Table", prompt_key: str) -> NDArray[np.int64] | None:
    """Return the bytes of each row's prompt: of its text, or of the contents of its chat messages.

    Contents are flattened, so the size of row i is the difference of cumulative sizes at the row's
    last and first message.
    """
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
    message_ends = np.cumsum(np.asarray(pc.fill_null(pc.list_value_length(column), 0)))
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return sums[message_ends] - sums[np.concatenate([[0], message_ends[:-1]])]
