"""Random access to the rows of a data file without loading the file into memory.

Two tables hold all formats: JSONL with an index of its lines, and Arrow files, memory-mapped. Other
formats (a JSON array, CSV, .gz, parquet) are unpacked once into one of these, into a cache folder
beside the caches of Hugging Face datasets, under the hash of their content.
"""

import codecs
import csv
import gzip
import json
import mmap
import os
import re
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from streamrl.data.rows import IndexedRecords, format_error, wrap_data_errors
from streamrl.errors import ConfigError, DataError
from streamrl.files.atomic_write import sync_and_rename
from streamrl.files.bounded_read import (
    MAX_LINE_BYTES,
    MIB,
    open_regular_file,
    parse_json,
    read_lines,
    read_small_json,
)

JSONL_EXTENSIONS = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TEXT_EXTENSIONS = (*JSONL_EXTENSIONS, ".json", *DELIMITERS)
GZIP_SUFFIX = ".gz"
EXTENSIONS = (".parquet", *TEXT_EXTENSIONS, *(name + GZIP_SUFFIX for name in TEXT_EXTENSIONS))
DATASET_FILES = ("dataset_dict.json", "dataset_info.json")
"""Files that mark a folder as a saved dataset instead of a folder of parquet shards."""
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
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        LookupError,
        TypeError,
        pa.ArrowException,
    ) as error:
        reason = error.strerror if isinstance(error, OSError) else ""
        raise ConfigError(f"{path}: cannot be read: {reason or format_error(error)}") from error


def open_table(path: str, split: str = "") -> "IndexedTable":
    """Open data for random access to its rows. Raises ConfigError for unreadable or empty data."""
    with _wrap_open_errors(path):
        if not Path(path).is_dir() and not _has_parquet_name(Path(path)):
            _check_no_split(path, split)
            table: IndexedTable = _open_text_table(path)
        elif any((Path(path) / name).is_file() for name in DATASET_FILES):
            files = _list_dataset_files(Path(path), split)
            table = ColumnTable(path, files, f"{hash_files(files)}:{split}")
        else:
            files = _list_parquet_files(path, split)
            unpacked = [_unpack_into_cache(file, ".arrows", _unpack_parquet) for file in files]
            table = ColumnTable(path, unpacked, hash_files(files))
        is_empty = not len(table)
    if is_empty:
        raise ConfigError(f"{path}: contains no rows")
    return table


# Text: JSONL, and formats that are unpacked into it.


@dataclass
class TextTable:
    """JSONL file with an index of its rows.

    path: file that the user named. unpacked_path: the JSONL. unit: "line" of that file, or "row" of
    a format unpacked into it. row_offsets, row_sizes: first byte and length of each row.
    row_indices: number of each row in the file, None if numbers equal positions. digest: hash of
    the content. file_stamp: size and modification time.
    """

    path: str
    unpacked_path: str
    unit: str
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
            index = row if self.row_indices is None else int(self.row_indices[row])
            location = f"{self.path} {self.unit} {index + 1}"
            raw = os.pread(file.fileno(), int(self.row_sizes[row]), int(self.row_offsets[row]))
            records.append((location, index, parse_json_row(raw, location)))
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
        return ConfigError(f"{location}: not JSON: {format_error(error)}")


def _open_text_table(path: str) -> TextTable:
    extension = next((name for name in EXTENSIONS if path.lower().endswith(name)), None)
    if extension is None:
        names = ", ".join(EXTENSIONS)
        raise ConfigError(f"{path}: unknown extension, must be one of {names}, or a directory")
    unpacked, kind = path, extension.removesuffix(GZIP_SUFFIX)
    if extension != kind:
        unpacked = _unpack_into_cache(path, kind, _unpack_gzip)
    unit = "line"
    if kind in DELIMITERS:
        unit = "row"
        unpacked = _unpack_into_cache(
            unpacked, f"{kind}.jsonl", _unpack_csv, DELIMITERS[kind], name=path
        )
    elif kind == ".json" and _holds_array(unpacked):
        unit = "row"
        unpacked = _unpack_into_cache(unpacked, ".jsonl", _unpack_array, name=path)
    starts, sizes, numbers = array("q"), array("i"), array("q")
    with open_regular_file(unpacked) as file:
        stamp = _get_file_stamp(file)
        for index, start, row in iter_json_lines(file):
            numbers.append(index)
            starts.append(start)
            sizes.append(len(row))
    has_gaps = bool(numbers) and numbers[-1] != len(numbers) - 1
    return TextTable(
        path,
        unpacked,
        unit,
        np.array(starts, np.int64),
        np.array(sizes, np.int32),
        np.array(numbers, np.int64) if has_gaps else None,
        # Hash the unpacked content: another compression level does not change the rows.
        hash_files([unpacked]),
        stamp,
    )


def _holds_array(path: str) -> bool:
    with open_regular_file(path) as file:
        return file.read(MIB).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _unpack_gzip(path: str, out: BinaryIO) -> None:
    with open_regular_file(path) as file, gzip.GzipFile(fileobj=file) as packed:
        shutil.copyfileobj(packed, out, _CHUNK_BYTES)


def _unpack_csv(path: str, out: BinaryIO, delimiter: str) -> None:
    """Write the rows under the header as objects of text; an empty value counts as missing."""
    # csv's default limit of 128 KiB per field is a process-wide setting.
    csv.field_size_limit(MAX_LINE_BYTES)
    with open_regular_file(path) as file:
        lines = (line.decode("utf-8-sig") for line in read_lines(file))
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(filter(any, reader), [])
            _check_unique_columns(header)
            for number, fields in enumerate(filter(any, reader), start=1):
                if len(fields) != len(header):
                    sizes = f"has {len(fields)} fields, the header has {len(header)}"
                    raise ValueError(f"row {number}: {sizes}")
                pairs = zip(header, fields, strict=True)
                record = {name: value or None for name, value in pairs}
                out.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"after line {reader.line_num}: {format_error(error)}") from None


def _unpack_array(path: str, out: BinaryIO) -> None:
    """Write the elements of a JSON array as lines."""
    with open_regular_file(path) as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    bom_size = len(codecs.BOM_UTF8) if pages[:3] == codecs.BOM_UTF8 else 0
    try:
        rows = msgspec.json.decode(memoryview(pages)[bom_size:], type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a JSON array of objects: {format_error(error)}") from None
    for row in rows:
        # JSON has line breaks between its values alone.
        out.write(bytes(row).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")


# Columns: Arrow files of a saved dataset, and parquet, which is unpacked into them.


class ColumnTable:
    """Rows of Arrow files, with random access; each row has the columns and types of its file.

    files: Arrow streams, memory-mapped. digest: hash of the content.
    """

    def __init__(self, path: str, files: Sequence[str], digest: str) -> None:
        self.path = path
        self.digest = digest
        self._files = files
        self._tables: list[pa.Table] = []

    def __len__(self) -> int:
        return sum(table.num_rows for table in self._load_tables())

    def get_indices(self) -> NDArray[np.int64]:
        return np.arange(len(self))

    def read_rows(self, rows: Sequence[int]) -> IndexedRecords:
        """Read the rows at these positions as records. Raises DataError on failure."""
        records: IndexedRecords = []
        if not rows:
            return records
        with wrap_data_errors(self.path):
            ends = np.cumsum([table.num_rows for table in self._load_tables()])
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
            sizes = [_compute_text_sizes(table[prompt_key]) for table in self._load_tables()]
        except (pa.ArrowException, KeyError):
            return None
        return np.concatenate(sizes)

    def _load_tables(self) -> list[pa.Table]:

        if not self._tables:
            self._tables = [
                pa.ipc.open_stream(pa.memory_map(file)).read_all() for file in self._files
            ]
        return self._tables

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tables": []}


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
            singles = (rows.slice(i, 1) for i in range(len(locations)))
            pairs = zip(singles, locations, strict=True)
            return [_to_records(row, [location])[0] for row, location in pairs]
        if len(rows.schema) > 1:
            columns = (_to_records(rows.select([name]), locations)[0] for name in rows.schema.names)
            return [next(filter(lambda value: isinstance(value, ConfigError), columns), error)]
        column = f"column {rows.schema[0].name!r} of {rows.schema[0].type!s:.80}"
        return [ConfigError(f"{locations[0]}: {column}: {format_error(error)}")]
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


def _check_no_split(path: str, split: str) -> None:
    if split:
        raise ConfigError(f"{path}: split={split}: the data has no splits; remove the split")


def _check_split(path: str, split: str, splits: Any) -> None:
    if split not in splits:
        names = ", ".join(sorted(splits)) or "none"
        problem = f"split={split}: no such split" if split else "split: missing"
        raise ConfigError(
            f"{path}: {problem}; the splits are {names} (a file can also be named directly)"
        )


def _list_dataset_files(folder: Path, split: str) -> list[str]:
    """Return the Arrow files of a dataset written by `save_to_disk`."""
    splits_file, state_file = folder / DATASET_FILES[0], "state.json"
    if splits_file.is_file() and not (folder / state_file).is_file():
        splits = read_small_json(splits_file, most_bytes=MAX_LINE_BYTES)["splits"]
        _check_split(str(folder), split, splits)
        folder /= split
    else:
        _check_no_split(str(folder), split)
    state = read_small_json(folder / state_file, most_bytes=MAX_LINE_BYTES)
    names = [str(entry["filename"]) for entry in state["_data_files"]]
    for name in names:
        if name in ("", "..") or Path(name).name != name:
            raise ValueError(f"{state_file}: {name!r:.80} must be a file in the same folder")
    return [str(folder / name) for name in names]


def _has_parquet_name(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _list_parquet_files(path: str, split: str) -> list[str]:
    """Return the sorted parquet files at a path, which names a file or a folder of shards.

    split: restrict the shards to this split. Raises ConfigError for an empty folder, or a missing
    or unknown split.
    """
    if not Path(path).is_dir():
        _check_no_split(path, split)
        return [path]
    shards = sorted(filter(_has_parquet_name, Path(path).iterdir()))
    if not shards:
        raise ConfigError(
            f"{path}: cannot be read: the directory contains neither a Hugging Face dataset nor"
            " .parquet files"
        )
    splits = [_parse_split(shard.stem) for shard in shards]
    if len({*splits}) > 1 or split:
        _check_split(path, split, {*splits} - {""})
        shards = [shard for shard, name in zip(shards, splits, strict=True) if name == split]
    return [str(shard) for shard in shards]


def _parse_split(name: str) -> str:
    match = _SPLIT_PATTERN.fullmatch(name)
    return (match[1] or match[2].lower()) if match else ""


def _unpack_parquet(path: str, out: BinaryIO) -> None:

    # A buffer makes pyarrow read column chunks piecewise instead of whole row groups.
    with (
        open_regular_file(path) as file,
        pq.ParquetFile(file, buffer_size=MIB, pre_buffer=False) as opened,
    ):
        _check_unique_columns(opened.schema_arrow.names)
        with pa.ipc.new_stream(out, opened.schema_arrow) as writer:
            for batch in opened.iter_batches(batch_size=_choose_batch_size(opened)):
                writer.write_batch(batch)


def _choose_batch_size(file: pq.ParquetFile) -> int:
    """Estimate from the first rows of a parquet file how many rows take a few MiB."""
    for head in file.iter_batches(batch_size=16):
        return max(1, min(_BATCH_ROWS, _CHUNK_BYTES * head.num_rows // max(1, head.nbytes)))
    return _BATCH_ROWS


def _check_unique_columns(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"column {name!r}: must occur only once")


# Cache of unpacked files.


def get_cache_dir() -> Path:
    """Return the folder of unpacked data files, beside the caches of Hugging Face datasets."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    datasets = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    return Path(datasets).expanduser() / "streamrl"


def _unpack_into_cache(
    path: str, suffix: str, unpack: Callable[..., None], *arguments: object, name: str = ""
) -> str:
    """Unpack a data file into `get_cache_dir()`, unless that has it, and return the new path.

    The name there is the hash of the content and `suffix`; `unpack` (path, open file, *arguments)
    writes it. name: the user's file, if `path` is an unpacked form of it. Raises ConfigError if the
    cache cannot be written.
    """
    with _wrap_open_errors(name or path):
        final = get_cache_dir() / f"{hash_files([path])}{suffix}"
        if final.is_file():
            return str(final)
        partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("xb") as out:
                unpack(path, out, *arguments)
            sync_and_rename(partial, final)
        except OSError as error:
            if error.errno is None or error.filename == path:  # of the packed file
                raise
            raise ConfigError(
                f"{name or path}: cannot be unpacked into {final.parent}: {error.strerror or error}"
                " (set HF_DATASETS_CACHE to choose another folder)"
            ) from error
        finally:
            with suppress(OSError):
                partial.unlink()
    return str(final)


def hash_files(files: Sequence[str]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        with open_regular_file(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            digest.update(f"/{file.tell()}/".encode())
    return digest.hexdigest()
