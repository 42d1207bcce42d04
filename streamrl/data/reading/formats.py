"""Formats of a data file: where its rows are, and what a row is.

JSONL, JSON, CSV (each also as .gz), parquet, a directory of parquet shards, a Hugging Face dataset.
Every format gives the same plain Python records.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, cast

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import (
    MAX_LINE_BYTES,
    MIB,
    RepeatedKeyError,
    open_regular_file,
    parse_json,
    read_lines,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

TextRows = Iterator[tuple[int, int, bytes]]
"""(index from 0, byte at which it begins, bytes) of each row of a text file."""

GZIP_SUFFIX = ".gz"
_BATCH_ROWS = 1024
_CHUNK_BYTES = 4 * MIB
_SPLIT_PATTERN = re.compile(
    r"(.+)-\d+-of-\d+|(?i:(?:.+[-_.])?(train|test|validation|valid|val|dev|eval)(?:[-_.]?\d+)?)"
)
"""How a parquet file is called that says of which split it is."""
DATASET_FILES = ("dataset_dict.json", "dataset_info.json")
"""Files of which a folder has one that is a dataset, not files of rows."""
_WHITESPACE = re.compile(r"[ \t\r\n]*")


@contextmanager
def wrap_read_errors(path: str) -> Iterator[None]:
    """Raise what goes wrong with a data file as ConfigError naming it."""
    try:
        yield
    except ConfigError:
        raise
    except (EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path}: cannot be read as {GZIP_SUFFIX}: {format_error(error)}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror or format_error(error)}"
        ) from error


def format_error(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


# Text: a layout says where rows begin and end, and what a row is.


@dataclass(frozen=True)
class JsonLines:
    """An object a line."""

    unit: ClassVar[str] = "line"

    def iter_rows(self, file: BinaryIO) -> TextRows:
        """Find the rows. Raises ValueError for a line without an end."""
        offset = 0
        for index, line in enumerate(read_lines(file)):
            mark = len(codecs.BOM_UTF8) if index == 0 and line.startswith(codecs.BOM_UTF8) else 0
            if line[mark:].strip():
                yield index, offset + mark, line[mark:]
            offset += len(line)

    def parse_row(self, row: bytes) -> Any:
        """Read a row. Raises ValueError."""
        return _parse_json_row(row)


@dataclass(frozen=True)
class JsonArray:
    """One array of objects."""

    unit: ClassVar[str] = "row"

    def iter_rows(self, file: BinaryIO) -> TextRows:
        """Find the rows. Raises ValueError where the array breaks off, is none or not all."""
        # Structure is ASCII: as Latin-1 each character is a byte, and its place the byte's.
        decoder, text, base, at, index = json.JSONDecoder(), "", 0, 0, 0
        is_first, after_row, after_comma = True, False, False
        while True:
            at = _WHITESPACE.match(text, at).end()  # type: ignore[union-attr]
            found = text[at : at + 1]
            try:
                if is_first:
                    at += len(codecs.BOM_UTF8) * text.startswith(_BOM, at)
                    at, is_first = _expect_character(text, at, "["), False
                    continue
                if found == "]":
                    _check_array_end(file, text, at + 1, index if after_comma else None)
                    return
                if after_row:
                    at, after_row, after_comma = _expect_character(text, at, ","), False, True
                    continue
                end = decoder.raw_decode(text, at)[1]
                if end == len(text) and text[-1] not in '}]"':  # more digits may come
                    raise _IncompleteInputError
            except RecursionError:
                raise ValueError(f"row {index + 1}: not JSON: nested too deeply") from None
            except (json.JSONDecodeError, _IncompleteInputError) as error:
                if len(text) - at > MAX_LINE_BYTES:
                    raise ValueError(f"row {index + 1}: {_describe_row_error(error)}") from None
                more = file.read(max(_CHUNK_BYTES, len(text) - at))
                if not more:
                    raise ValueError(f"row {index + 1}: {_describe_row_error(error)}") from None
                text, base, at = text[at:] + more.decode("latin-1"), base + at, 0
                continue
            yield index, base + at, text[at:end].encode("latin-1")
            at, after_row, after_comma, index = end, True, False, index + 1

    def parse_row(self, row: bytes) -> Any:
        """Read a row. Raises ValueError."""
        return _parse_json_row(row)


_BOM = codecs.BOM_UTF8.decode("latin-1")


class _IncompleteInputError(Exception):
    """A piece of the file ends before it can be said what comes."""


def _expect_character(text: str, at: int, wanted: str) -> int:
    """Return the place behind `wanted`, which must come at `at`."""
    if at == len(text):
        raise _IncompleteInputError
    if text[at] != wanted:
        raise ValueError(f"byte {text[at]!r} where {wanted!r} must be: not a JSON array of objects")
    return at + 1


def _check_array_end(file: BinaryIO, text: str, at: int, missing: int | None) -> None:
    """Raise ValueError unless only white space comes from `at` on, to the end of the file.

    Also where a comma has announced a row, of the index `missing`.
    """
    if missing is not None:
        raise ValueError(f"row {missing + 1}: a comma stands before the array's end")
    while text:
        at = _WHITESPACE.match(text, at).end()  # type: ignore[union-attr]
        if at < len(text):
            raise ValueError(
                f"byte {text[at]!r} behind the end of the array: must hold one array of objects,"
                " or be named .jsonl with an object a line"
            )
        text, at = file.read(_CHUNK_BYTES).decode("latin-1"), 0


def _describe_row_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg}"
    return "the array breaks off"


def _parse_json_row(row: bytes) -> Any:
    try:
        return parse_json(row.decode())
    except RepeatedKeyError:
        raise
    except ValueError as error:
        raise ValueError(f"not JSON: {format_error(error)}") from None


@dataclass(frozen=True)
class CsvTable:
    """Rows under a header. Every value is text; an empty one is missing."""

    header: tuple[str, ...]
    delimiter: str
    unit: ClassVar[str] = "row"

    @classmethod
    def from_file(cls, file: BinaryIO, delimiter: str) -> "CsvTable":
        """Read the header. Raises ValueError for one that names a column twice, or none."""
        header = next(cls((), delimiter)._iter_all_rows(file), (0, b"", []))[2]
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise ValueError(f"column {twice[0]!r}: must be there once")
        return cls(tuple(header), delimiter)

    def iter_rows(self, file: BinaryIO) -> TextRows:
        """Find the rows. Raises ValueError for what is no CSV."""
        found = self._iter_all_rows(file)
        next(found, None)
        for index, (offset, row, _) in enumerate(found):
            yield index, offset, row

    def parse_row(self, row: bytes) -> Any:
        """Read a row. Raises ValueError."""
        fields = next(self._make_reader(io.StringIO(row.decode(), newline="")))
        if len(fields) != len(self.header):
            raise ValueError(f"has {len(fields)} fields, the header has {len(self.header)}")
        named = zip(self.header, fields, strict=True)
        return {name: value or None for name, value in named}

    def _iter_all_rows(self, file: BinaryIO) -> Iterator[tuple[int, bytes, list[str]]]:
        """Yield the header and every row: where it begins, its bytes and its fields."""
        taken: list[bytes] = []

        def lines() -> Iterator[str]:
            for number, line in enumerate(read_lines(file), start=1):
                mark = codecs.BOM_UTF8 if number == 1 else b""
                taken.append(line)
                try:
                    yield line.removeprefix(mark).decode()
                except UnicodeDecodeError as error:
                    raise ValueError(f"line {number}: {format_error(error)}") from None

        reader, offset = self._make_reader(lines()), 0
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise ValueError(f"line {reader.line_num}: {error}") from None
            row = b"".join(taken)
            taken.clear()
            if any(fields):
                yield offset, row, fields
            offset += len(row)

    def _make_reader(self, lines: Any) -> Any:
        # The module's own bound, of 128 KiB, is that of the process.
        csv.field_size_limit(MAX_LINE_BYTES)
        return csv.reader(lines, delimiter=self.delimiter, strict=True)


TextLayout = JsonLines | JsonArray | CsvTable
JSONL_EXTENSIONS = (".jsonl", ".ndjson")
TEXT_EXTENSIONS = (*JSONL_EXTENSIONS, ".json", ".csv", ".tsv")
EXTENSIONS = (".parquet", *TEXT_EXTENSIONS, *(name + GZIP_SUFFIX for name in TEXT_EXTENSIONS))


def parse_extension(path: str) -> str:
    """Return what the format of a file follows from, in lower case.

    Raises ConfigError for one of none.
    """
    name = Path(path).name.lower()
    for known in EXTENSIONS:
        if name.endswith(known):
            return known
    raise ConfigError(
        f"{path}: unknown extension, must be one of {', '.join(EXTENSIONS)}, or a directory"
    )


def open_gzip(path: str) -> BinaryIO:
    """Open a packed text file, unpacked as it is read. Raises OSError."""
    file = open_regular_file(path)
    packed = gzip.GzipFile(fileobj=file)
    packed.myfileobj = cast(Any, file)  # closed with it
    return cast(BinaryIO, packed)


def detect_layout(file: BinaryIO, kind: str) -> TextLayout:
    """Tell where the rows of a text file are; `kind` is its extension. Raises ValueError."""
    kind = kind.removesuffix(GZIP_SUFFIX)
    if kind in (".csv", ".tsv"):
        layout: TextLayout = CsvTable.from_file(file, "," if kind == ".csv" else "\t")
    elif kind in JSONL_EXTENSIONS:
        layout = JsonLines()
    else:
        head = file.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        layout = JsonArray() if head.startswith(b"[") else JsonLines()
    file.seek(0)
    return layout


@contextmanager
def wrap_text_errors(path: str) -> Iterator[None]:
    """Raise what is wrong with a text file as a whole as ConfigError naming it."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {format_error(error)}") from None


def parse_text_row(layout: TextLayout, row: bytes, place: str) -> Any:
    """Read a row of a text file: a record, or the ConfigError that says why there is none."""
    try:
        return layout.parse_row(row)
    except (ValueError, csv.Error) as error:
        return ConfigError(f"{place}: {format_error(error)}")


def check_no_split(path: str, split: str) -> None:
    """Raise ConfigError if a split is asked for, of what has none."""
    if split:
        raise ConfigError(f"{path}: split={split}: it has no splits")


# Columns: parquet, and datasets on disk.


def is_parquet(path: str) -> bool:
    """Whether a path is a parquet file, or a directory of them rather than a dataset."""
    if not Path(path).is_dir():
        return _has_parquet_name(Path(path))
    return not any((Path(path) / name).is_file() for name in DATASET_FILES)


def _has_parquet_name(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def list_parquet_files(path: str, split: str) -> list[str]:
    """Name the files of a parquet file or directory, in their order.

    Raises ConfigError if there is none, or the split is missing or none of theirs.
    """
    if not Path(path).is_dir():
        check_no_split(path, split)
        return [path]
    shards = sorted(filter(_has_parquet_name, Path(path).iterdir()))
    if not shards:
        raise ConfigError(
            f"{path}: cannot be read: a directory with neither a Hugging Face dataset on disk nor"
            " .parquet files"
        )
    splits = [_parse_split(shard.stem) for shard in shards]
    if len({*splits}) > 1 or split:
        check_split(path, split, {*splits} - {""})
        shards = [shard for shard, name in zip(shards, splits, strict=True) if name == split]
    return [str(shard) for shard in shards]


def _parse_split(name: str) -> str:
    """Return the split that a file's name says, if it says one."""
    found = _SPLIT_PATTERN.fullmatch(name)
    return (found[1] or found[2].lower()) if found else ""


def read_parquet_batches(path: str) -> "Iterator[pa.RecordBatch]":
    """Read a parquet file some rows at a time. Raises ConfigError naming it, and OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    try:
        # With a buffer a column is read piece by piece, else a whole group of rows at once.
        with (
            open_regular_file(path) as file,
            pq.ParquetFile(file, buffer_size=MIB, pre_buffer=False) as opened,
        ):
            schema = _make_plain_schema(opened)
            for batch in opened.iter_batches(batch_size=_choose_batch_size(opened)):
                yield batch.cast(schema)
                count += batch.num_rows
    except ConfigError:
        raise
    except (pa.ArrowException, ValueError, KeyError) as error:
        where = f"after row {count}" if count else "as parquet"
        raise ConfigError(f"{path}: cannot be read {where}: {format_error(error)}") from error


def _choose_batch_size(file: "pq.ParquetFile") -> int:
    """Return how many rows, if they are as the first are, take some MiB."""
    for head in file.iter_batches(batch_size=16):
        return max(1, min(_BATCH_ROWS, _CHUNK_BYTES * head.num_rows // max(1, head.nbytes)))
    return _BATCH_ROWS


def read_parquet_schema(path: str) -> "pa.Schema":
    """Read which columns a parquet file has. Raises ConfigError naming it, and OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular_file(path) as file, pq.ParquetFile(file) as opened:
            return _make_plain_schema(opened)
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as parquet: {format_error(error)}") from error


def _make_plain_schema(file: "pq.ParquetFile") -> "pa.Schema":
    """Return the columns of a file without what only says how values are packed."""
    import pyarrow as pa

    return pa.schema([(field.name, _to_plain_type(field.type)) for field in file.schema_arrow])


def _to_plain_type(one: "pa.DataType") -> "pa.DataType":
    import pyarrow as pa
    from pyarrow import types as t

    if t.is_dictionary(one) or t.is_run_end_encoded(one):
        return _to_plain_type(one.value_type)
    if t.is_struct(one):
        return pa.struct([(field.name, _to_plain_type(field.type)) for field in one])
    if t.is_list(one) or t.is_large_list(one):
        kind = pa.list_ if t.is_list(one) else pa.large_list
        return kind(one.value_field.with_type(_to_plain_type(one.value_type)))
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return views.get(one, one)


def to_plain_records(rows: "pa.Table", places: Sequence[str]) -> list[Any]:
    """Make plain values of rows; of a row with one that Python cannot have, the ConfigError."""
    try:
        return _to_python(rows)
    except MemoryError:
        raise
    except Exception:
        if len(places) > 1:
            return [to_plain_records(rows.slice(i, 1), [places[i]])[0] for i in range(len(places))]
        for column in rows.schema:
            try:
                _to_python(rows.select([column.name]))
            except Exception as error:  # noqa: BLE001
                # Arrow says of an unknown time zone that what knows them is not installed.
                why = "unknown time zone" if "pytz" in str(error) else format_error(error)
                said = f"column {column.name!r} of {column.type!s:.80}: {why}"
                return [ConfigError(f"{places[0]}: {said}")]
        raise


def _to_python(rows: "pa.Table") -> list[Any]:
    found: list[Any] = rows.to_pylist(maps_as_pydicts="strict")
    return found


def check_split(path: str, split: str, splits: Any) -> None:
    """Raise ConfigError for a split that is none of `splits`, or none where there are some."""
    if split not in splits:
        known = ", ".join(sorted(splits)) or "none"
        said = f"split={split}: there is no such split" if split else "split: missing"
        raise ConfigError(f"{path}: {said}; the splits are {known} (a file can be named by itself)")
