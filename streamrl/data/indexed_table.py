"""Random access to the rows of a data file without loading the file into memory.

JSONL is read where it is, with an index of its lines. Parquet is unpacked once into Arrow files,
which are memory-mapped; they lie in a cache folder beside the caches of Hugging Face datasets,
under the hash of their content.
"""

import codecs
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from streamrl.data.rows import IndexedRecords, wrap_data_errors
from streamrl.errors import ConfigError, DataError, get_message
from streamrl.files.atomic_write import sync_and_rename
from streamrl.files.bounded_read import MIB, open_regular_file, parse_json, read_lines
from streamrl.files.typed_settings import describe_read_error

JSONL_EXTENSIONS = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
_BATCH_ROWS = 1024
_CHUNK_BYTES = 4 * MIB
_SPLIT_PATTERN = re.compile(
    r"(.+)-\d+-of-\d+|(?i:(?:.+[-_.])?(train|test|validation|valid|val|dev|eval)(?:[-_.]?\d+)?)"
)
"""Names of parquet shards that contain their split, such as train-00000-of-00004."""


@contextmanager
def _wrap_open_errors(path: str) -> Iterator[None]:
    """Convert errors of opening or unpacking a data file to ConfigError with the path."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read: {describe_read_error(error)}") from error


def open_table(path: str, split: str = "", *, is_text: bool = False) -> "IndexedTable":
    """Open data for random access to its rows. Raises ConfigError for unreadable or empty data.

    is_text: the file is JSONL whatever its extension.
    """
    with _wrap_open_errors(path):
        if is_text or (path.lower().endswith(JSONL_EXTENSIONS) and not split):
            table: IndexedTable = _open_text_table(path)
        else:
            files = _list_parquet_files(path, split)
            unpacked = [_unpack_into_cache(file) for file in files]
            table = ColumnTable(path, unpacked, hash_files(files))
        is_empty = not len(table)
    if is_empty:
        raise ConfigError(f"{path}: contains no rows")
    return table


@dataclass
class TextTable:
    """JSONL file with an index of its rows.

    row_offsets, row_sizes: first byte and length of each row. row_indices: number of each row's
    line in the file; blank lines count. digest: hash of the content. file_stamp: size and
    modification time.
    """

    path: str
    row_offsets: NDArray[np.int64]
    row_sizes: NDArray[np.int32]
    row_indices: NDArray[np.int64]
    digest: str
    file_stamp: tuple[int, int]

    def __post_init__(self) -> None:
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return len(self.row_offsets)

    def get_indices(self) -> NDArray[np.int64]:
        return self.row_indices

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords:
        """Read and parse the rows at these positions. Raises DataError if the file has changed."""
        file = self._open_file()
        records = []
        for row in rows:
            index = int(self.row_indices[row])
            location = f"{self.path} line {index + 1}"
            raw = os.pread(file.fileno(), int(self.row_sizes[row]), int(self.row_offsets[row]))
            records.append((location, index, parse_json_row(raw, location)))
        return records

    def get_prompt_sizes(self, prompt_key: str) -> NDArray[np.int32]:
        """Return the bytes of each whole row, an upper bound of the bytes of its prompt."""
        return self.row_sizes

    def _open_file(self) -> BinaryIO:
        with wrap_data_errors(self.path):
            if self._file is None:
                self._file = open_regular_file(self.path)
            if _get_file_stamp(self._file) != self.file_stamp:
                raise DataError(f"{self.path}: the file has changed since the run first read it")
            return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}


def _get_file_stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def iter_json_lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line index, byte offset, bytes) of each line of JSONL that is not blank.

    Raises ValueError for a huge line.
    """
    offset = 0
    for index, line in enumerate(read_lines(file)):
        row = line.removeprefix(codecs.BOM_UTF8) if index == 0 else line
        if row.strip():
            yield index, offset + len(line) - len(row), row
        offset += len(line)


def parse_json_row(row: bytes, location: str) -> Any:
    """Parse a row of JSON; an unreadable row becomes its ConfigError, with `location`."""
    try:
        return parse_json(row.decode())
    except ValueError as error:
        return ConfigError(f"{location}: not JSON: {get_message(error)}")


def _open_text_table(path: str) -> TextTable:
    starts, sizes, numbers = array("q"), array("i"), array("q")
    with open_regular_file(path) as file:
        if file.read(MIB).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            raise ConfigError(
                f"{path}: a JSON array; write one object per line: jq -c '.[]' FILE > rows.jsonl"
            )
        file.seek(0)
        stamp = _get_file_stamp(file)
        for index, start, row in iter_json_lines(file):
            numbers.append(index)
            starts.append(start)
            sizes.append(len(row))
    columns = np.array(starts, np.int64), np.array(sizes, np.int32), np.array(numbers, np.int64)
    return TextTable(path, *columns, hash_files([path]), stamp)


class ColumnTable:
    """Rows of parquet files, with random access; each row has the columns and types of its file.

    files: Arrow streams, memory-mapped. digest: hash of the content of the parquet files.
    """

    def __init__(self, path: str, files: Sequence[str], digest: str) -> None:
        self.path = path
        self.digest = digest
        self._files = files

    def __len__(self) -> int:
        return sum(table.num_rows for table in self._tables)

    def get_indices(self) -> NDArray[np.int64]:
        return np.arange(len(self))

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords:
        """Read the rows at these positions as records. Raises DataError on failure."""
        records: IndexedRecords = []
        if not rows:
            return records
        with wrap_data_errors(self.path):
            ends = np.cumsum([table.num_rows for table in self._tables])
            wanted = np.array(rows, np.int64)
            files = np.searchsorted(ends, wanted, side="right")
            # Read consecutive rows of a file at once.
            cuts = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(files) != 0)) + 1
            for run, (file, *_) in zip(np.split(wanted, cuts), np.split(files, cuts), strict=True):
                table = self._tables[file]
                first = int(run[0] - ends[file]) + table.num_rows
                locations = [f"{self.path} row {row + 1}" for row in run]
                read = _to_records(table.slice(first, len(run)), locations)
                records += zip(locations, run.tolist(), read, strict=True)
        return records

    def get_prompt_sizes(self, prompt_key: str) -> NDArray[np.int64] | None:
        """Return the bytes of each row's prompt, or None if the columns do not show them."""
        try:
            sizes = [_compute_text_sizes(table[prompt_key]) for table in self._tables]
        except (pa.ArrowException, KeyError):
            return None
        return np.concatenate(sizes)

    @cached_property
    def _tables(self) -> list[pa.Table]:
        return [pa.ipc.open_stream(pa.memory_map(file)).read_all() for file in self._files]

    def __getstate__(self) -> dict[str, Any]:
        return {name: item for name, item in vars(self).items() if name != "_tables"}


IndexedTable = TextTable | ColumnTable


def _to_records(rows: pa.Table, locations: Sequence[str]) -> list[Any]:
    """Convert Arrow rows to Python values; an unconvertible row becomes its ConfigError."""
    try:
        records: list[Any] = rows.to_pylist(maps_as_pydicts="strict")
    except MemoryError:
        raise
    # Dates beyond Python's, unknown time zones and duplicate keys raise errors of many types.
    except Exception as error:  # noqa: BLE001
        if len(locations) > 1:
            singles = (_to_records(rows.slice(i, 1), [place]) for i, place in enumerate(locations))
            return [record for (record,) in singles]
        if rows.num_columns > 1:
            columns = (_to_records(rows.select([i]), locations) for i in range(rows.num_columns))
            return next(records for records in columns if isinstance(records[0], ConfigError))
        column = f"column {rows.column_names[0]!r}"
        return [ConfigError(f"{locations[0]}: {column}: {get_message(error)}")]
    return records


def _compute_text_sizes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return the bytes of each row's prompt: of its text, or of the contents of its chat messages.

    Raises ArrowException for a column of other types.
    """
    if column.type.num_fields == 0:
        return np.asarray(pc.fill_null(pc.binary_length(column), 0)).astype(np.int64)
    contents = pc.struct_field(pc.list_flatten(column), "content")
    sizes = np.asarray(pc.fill_null(pc.binary_length(contents), 0))
    parents = np.asarray(pc.list_parent_indices(column))
    return np.bincount(parents, weights=sizes, minlength=len(column)).astype(np.int64)


def _list_parquet_files(path: str, split: str) -> list[str]:
    """Return the sorted parquet files at a path, which names a file or a folder of shards.

    split: restrict the shards to this split. Raises ConfigError for other data, or a missing or
    unknown split.
    """
    if not Path(path).is_dir():
        if split:
            raise ConfigError(f"{path}: split={split}: only a directory has splits; remove it")
        if not path.lower().endswith(PARQUET):
            names = ", ".join((*JSONL_EXTENSIONS, PARQUET))
            raise ConfigError(
                f"{path}: must be one of {names}, or a directory of {PARQUET} files; gunzip a .gz,"
                " convert other data with pandas"
            )
        return [path]
    shards = sorted(file for file in Path(path).iterdir() if file.suffix.lower() == PARQUET)
    if not shards:
        raise ConfigError(
            f"{path}: the directory contains no {PARQUET} files; convert a dataset of save_to_disk"
            " with datasets.load_from_disk(...)[split].to_parquet(...)"
        )
    splits = [_parse_split(shard.stem) for shard in shards]
    if len({*splits}) > 1 or split:
        names = ", ".join(sorted({*splits} - {""})) or "none"
        if split not in {*splits} - {""}:
            problem = f"split={split}: no such split" if split else "split: missing"
            raise ConfigError(
                f"{path}: {problem}; the splits are {names} (a file can also be named directly)"
            )
        shards = [shard for shard, name in zip(shards, splits, strict=True) if name == split]
    return [str(shard) for shard in shards]


def _parse_split(name: str) -> str:
    match = _SPLIT_PATTERN.fullmatch(name)
    return (match[1] or match[2].lower()) if match else ""


def get_cache_dir() -> Path:
    """Return the folder of unpacked data files, beside the caches of Hugging Face datasets."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    datasets = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    return Path(datasets).expanduser() / "streamrl"


def _unpack_into_cache(path: str) -> str:
    """Unpack a parquet file into `get_cache_dir()`, unless that has it; return the new path.

    The name there is the hash of the content. Raises ConfigError if the cache cannot be written.
    """
    final = get_cache_dir() / f"{hash_files([path])}.arrows"
    if final.is_file():
        return str(final)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    # Errors of reading the packed file itself pass: they have no errno, or its name.
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as out:
            _unpack_parquet(path, out)
        sync_and_rename(partial, final)
    except OSError as error:
        if error.errno is None or error.filename == path:
            raise
        raise ConfigError(
            f"{path}: cannot be unpacked into {final.parent}: {error.strerror or error}"
            " (set HF_DATASETS_CACHE to choose another folder)"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return str(final)


def _unpack_parquet(path: str, out: BinaryIO) -> None:
    # A buffer makes pyarrow read column chunks piecewise instead of whole row groups.
    with (
        open_regular_file(path) as file,
        pq.ParquetFile(file, buffer_size=MIB, pre_buffer=False) as opened,
    ):
        names = opened.schema_arrow.names
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"column {name!r}: must occur only once")
        with pa.ipc.new_stream(out, opened.schema_arrow) as writer:
            for batch in opened.iter_batches(batch_size=_choose_batch_size(opened)):
                writer.write_batch(batch)


def _choose_batch_size(file: pq.ParquetFile) -> int:
    """Estimate from the first rows of a parquet file how many rows take a few MiB."""
    for head in file.iter_batches(batch_size=16):
        return max(1, min(_BATCH_ROWS, _CHUNK_BYTES * head.num_rows // max(1, head.nbytes)))
    return _BATCH_ROWS


def hash_files(files: Sequence[str]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        with open_regular_file(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            digest.update(f"/{file.tell()}/".encode())
    return digest.hexdigest()
