"""Formats of data files: find the rows, and parse each to a plain Python record.

Supported: JSONL, JSON, CSV (each also as .gz), parquet, a directory of parquet shards, and Hugging
Face datasets on disk.
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
"""Yields (index from 0, byte offset, bytes) of each row of a text file."""

GZIP_SUFFIX = ".gz"
_BATCH_ROWS = 1024
_CHUNK_BYTES = 4 * MIB
_SPLIT_PATTERN = re.compile(
    r"(.+)-\d+-of-\d+|(?i:(?:.+[-_.])?(train|test|validation|valid|val|dev|eval)(?:[-_.]?\d+)?)"
)
"""Names of parquet shards that contain their split, such as train-00000-of-00004."""
DATASET_FILES = ("dataset_dict.json", "dataset_info.json")
"""Files that mark a folder as a saved dataset instead of a folder of parquet shards."""
_WHITESPACE = re.compile(r"[ \t\r\n]*")


@contextmanager
def wrap_read_errors(path: str) -> Iterator[None]:
    """Convert errors of opening or unpacking a data file to ConfigError with the path."""
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
    """Format the message of an exception on one line, or its type without a message."""
    return " ".join(str(error).split()) or type(error).__name__


# Text files: a layout finds the rows and parses a row.


class _JsonLayout:
    def parse_row(self, row: bytes) -> Any:
        try:
            return parse_json(row.decode())
        except RepeatedKeyError:
            raise
        except ValueError as error:
            raise ValueError(f"not JSON: {format_error(error)}") from None


class JsonLines(_JsonLayout):
    """Layout of a JSONL file: each line that is not blank contains a row."""

    unit: ClassVar[str] = "line"

    def iter_rows(self, file: BinaryIO) -> TextRows:
        """Yield (line index, byte offset, bytes) of each row. Raises ValueError for a huge line."""
        offset = 0
        for index, line in enumerate(read_lines(file)):
            has_bom = index == 0 and line.startswith(codecs.BOM_UTF8)
            bom_size = len(codecs.BOM_UTF8) if has_bom else 0
            if line[bom_size:].strip():
                yield index, offset + bom_size, line[bom_size:]
            offset += len(line)


class JsonArray(_JsonLayout):
    """Layout of a JSON file that contains an array of objects, the rows.

    `iter_rows` scans the array incrementally: it decodes an element at a time and reads more of the
    file whenever the text read so far ends inside an element.
    """

    unit: ClassVar[str] = "row"

    def iter_rows(self, file: BinaryIO) -> TextRows:
        """Yield (index, byte offset, bytes) of each element. Raises ValueError if malformed."""
        # Decoded as Latin-1, each byte is one character, so text positions equal byte offsets; the
        # JSON syntax is ASCII and unaffected.
        decoder, text, base, at, index = json.JSONDecoder(), "", 0, 0, 0
        is_first, after_row, after_comma = True, False, False
        while True:
            at = _WHITESPACE.match(text, at).end()  # type: ignore[union-attr]
            character = text[at : at + 1]
            try:
                if is_first:
                    at += len(codecs.BOM_UTF8) * text.startswith(_BOM, at)
                    at, is_first = _expect_character(text, at, "["), False
                    continue
                if character == "]":
                    _check_array_end(file, text, at + 1, index if after_comma else None)
                    return
                if after_row:
                    at, after_row, after_comma = _expect_character(text, at, ","), False, True
                    continue
                end = decoder.raw_decode(text, at)[1]
                if end == len(text) and text[-1] not in '}]"':  # a number may continue
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


_BOM = codecs.BOM_UTF8.decode("latin-1")


class _IncompleteInputError(Exception):
    """End of the text read so far, where the parser needs more of the file to decide."""


def _expect_character(text: str, at: int, expected: str) -> int:
    """Return the position after `expected`, which must stand at `at`, else raise ValueError."""
    if at == len(text):
        raise _IncompleteInputError
    if text[at] != expected:
        raise ValueError(
            f"found byte {text[at]!r} instead of {expected!r}: not a JSON array of objects"
        )
    return at + 1


def _check_array_end(file: BinaryIO, text: str, at: int, missing: int | None) -> None:
    """Raise ValueError unless only whitespace follows the end of a JSON array in the file.

    text: text read so far, in which the array ends before position `at`. missing: index of the row
    that a trailing comma announced, None without a trailing comma.
    """
    if missing is not None:
        raise ValueError(f"row {missing + 1}: a comma precedes the end of the array")
    while text:
        at = _WHITESPACE.match(text, at).end()  # type: ignore[union-attr]
        if at < len(text):
            raise ValueError(
                f"byte {text[at]!r} after the end of the array: the file must contain one array of"
                " objects, or have the extension .jsonl with one object per line"
            )
        text, at = file.read(_CHUNK_BYTES).decode("latin-1"), 0


def _describe_row_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg}"
    return "the array is truncated"


@dataclass(frozen=True)
class CsvTable:
    """Layout of a CSV or TSV file: rows under a header.

    All values are text; an empty value counts as missing.
    """

    header: tuple[str, ...]
    delimiter: str
    unit: ClassVar[str] = "row"

    @classmethod
    def from_file(cls, file: BinaryIO, delimiter: str) -> "CsvTable":
        """Read the header of a CSV file. Raises ValueError for a duplicate or missing column."""
        header = next(cls((), delimiter)._iter_all_rows(file), (0, b"", []))[2]
        duplicates = sorted({name for name in header if header.count(name) > 1})
        if duplicates:
            raise ValueError(f"column {duplicates[0]!r}: must occur only once")
        return cls(tuple(header), delimiter)

    def iter_rows(self, file: BinaryIO) -> TextRows:
        """Yield (index, byte offset, bytes) of each row below the header. Raises ValueError."""
        rows = self._iter_all_rows(file)
        next(rows, None)
        for index, (offset, row, _) in enumerate(rows):
            yield index, offset, row

    def parse_row(self, row: bytes) -> Any:
        fields = next(self._make_reader(io.StringIO(row.decode(), newline="")))
        if len(fields) != len(self.header):
            raise ValueError(f"has {len(fields)} fields, the header has {len(self.header)}")
        pairs = zip(self.header, fields, strict=True)
        return {name: value or None for name, value in pairs}

    def _iter_all_rows(self, file: BinaryIO) -> Iterator[tuple[int, bytes, list[str]]]:
        """Yield (byte offset, bytes, fields) of the header and of every row of a CSV file.

        A quoted field may span lines, so the bytes of a row are the lines that csv consumed for it.
        """
        consumed: list[bytes] = []

        def lines() -> Iterator[str]:
            for number, line in enumerate(read_lines(file), start=1):
                bom = codecs.BOM_UTF8 if number == 1 else b""
                consumed.append(line)
                try:
                    yield line.removeprefix(bom).decode()
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
            row = b"".join(consumed)
            consumed.clear()
            if any(fields):
                yield offset, row, fields
            offset += len(row)

    def _make_reader(self, lines: Any) -> Any:
        # csv's default limit of 128 KiB per field is a process-wide setting.
        csv.field_size_limit(MAX_LINE_BYTES)
        return csv.reader(lines, delimiter=self.delimiter, strict=True)


TextLayout = JsonLines | JsonArray | CsvTable
JSONL_EXTENSIONS = (".jsonl", ".ndjson")
TEXT_EXTENSIONS = (*JSONL_EXTENSIONS, ".json", ".csv", ".tsv")
EXTENSIONS = (".parquet", *TEXT_EXTENSIONS, *(name + GZIP_SUFFIX for name in TEXT_EXTENSIONS))


def parse_extension(path: str) -> str:
    """Return the lower-case extension of a data file, such as .jsonl.gz. Raises ConfigError."""
    name = Path(path).name.lower()
    for extension in EXTENSIONS:
        if name.endswith(extension):
            return extension
    raise ConfigError(
        f"{path}: unknown extension, must be one of {', '.join(EXTENSIONS)}, or a directory"
    )


def open_gzip(path: str) -> BinaryIO:
    """Open a gzip file so that reading decompresses it. Raises OSError."""
    file = open_regular_file(path)
    packed = gzip.GzipFile(fileobj=file)
    packed.myfileobj = cast(Any, file)  # GzipFile closes myfileobj with itself
    return cast(BinaryIO, packed)


def detect_layout(file: BinaryIO, extension: str) -> TextLayout:
    """Choose the layout of a text file by extension and first byte. Raises ValueError."""
    extension = extension.removesuffix(GZIP_SUFFIX)
    if extension in (".csv", ".tsv"):
        layout: TextLayout = CsvTable.from_file(file, "," if extension == ".csv" else "\t")
    elif extension in JSONL_EXTENSIONS:
        layout = JsonLines()
    else:
        head = file.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        layout = JsonArray() if head.startswith(b"[") else JsonLines()
    file.seek(0)
    return layout


@contextmanager
def wrap_text_errors(path: str) -> Iterator[None]:
    """Convert a ValueError about a text file's content to ConfigError with the path."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {format_error(error)}") from None


def parse_text_row(layout: TextLayout, row: bytes, location: str) -> Any:
    """Parse a row of a text file; an unreadable row becomes its ConfigError, with `location`."""
    try:
        return layout.parse_row(row)
    except (ValueError, csv.Error) as error:
        return ConfigError(f"{location}: {format_error(error)}")


def check_no_split(path: str, split: str) -> None:
    if split:
        raise ConfigError(f"{path}: split={split}: the data has no splits; remove the split")


# Columnar files: parquet, and datasets on disk.


def is_parquet(path: str) -> bool:
    """Return whether a path is a parquet file, or a folder that is not a saved dataset."""
    if not Path(path).is_dir():
        return _has_parquet_name(Path(path))
    return not any((Path(path) / name).is_file() for name in DATASET_FILES)


def _has_parquet_name(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def list_parquet_files(path: str, split: str) -> list[str]:
    """Return the sorted parquet files at a path, which names a file or a folder of shards.

    split: restrict the shards to this split. Raises ConfigError for an empty folder, or a missing
    or unknown split.
    """
    if not Path(path).is_dir():
        check_no_split(path, split)
        return [path]
    shards = sorted(filter(_has_parquet_name, Path(path).iterdir()))
    if not shards:
        raise ConfigError(
            f"{path}: cannot be read: the directory contains neither a Hugging Face dataset nor"
            " .parquet files"
        )
    splits = [_parse_split(shard.stem) for shard in shards]
    if len({*splits}) > 1 or split:
        check_split(path, split, {*splits} - {""})
        shards = [shard for shard, name in zip(shards, splits, strict=True) if name == split]
    return [str(shard) for shard in shards]


def _parse_split(name: str) -> str:
    match = _SPLIT_PATTERN.fullmatch(name)
    return (match[1] or match[2].lower()) if match else ""


def read_parquet_batches(path: str) -> "Iterator[pa.RecordBatch]":
    """Yield the rows of a parquet file in batches. Raises ConfigError with path, and OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    try:
        # A buffer makes pyarrow read column chunks piecewise instead of whole row groups.
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
        progress = f"after row {count}" if count else "as parquet"
        raise ConfigError(f"{path}: cannot be read {progress}: {format_error(error)}") from error


def _choose_batch_size(file: "pq.ParquetFile") -> int:
    """Estimate from the first rows of a parquet file how many rows take a few MiB."""
    for head in file.iter_batches(batch_size=16):
        return max(1, min(_BATCH_ROWS, _CHUNK_BYTES * head.num_rows // max(1, head.nbytes)))
    return _BATCH_ROWS


def read_parquet_schema(path: str) -> "pa.Schema":
    """Read the names and types of the columns. Raises ConfigError with the path, and OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular_file(path) as file, pq.ParquetFile(file) as opened:
            return _make_plain_schema(opened)
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as parquet: {format_error(error)}") from error


def _make_plain_schema(file: "pq.ParquetFile") -> "pa.Schema":
    import pyarrow as pa

    return pa.schema([(field.name, _to_plain_type(field.type)) for field in file.schema_arrow])


def _to_plain_type(type_: "pa.DataType") -> "pa.DataType":
    """Return an Arrow type without encodings, also inside structs and lists."""
    import pyarrow as pa
    from pyarrow import types as t

    if t.is_dictionary(type_) or t.is_run_end_encoded(type_):
        return _to_plain_type(type_.value_type)
    if t.is_struct(type_):
        return pa.struct([(field.name, _to_plain_type(field.type)) for field in type_])
    if t.is_list(type_) or t.is_large_list(type_):
        kind = pa.list_ if t.is_list(type_) else pa.large_list
        return kind(type_.value_field.with_type(_to_plain_type(type_.value_type)))
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return views.get(type_, type_)


def to_plain_records(rows: "pa.Table", locations: Sequence[str]) -> list[Any]:
    """Convert Arrow rows to Python values; an unconvertible row becomes its ConfigError."""
    try:
        return _to_python(rows)
    except MemoryError:
        raise
    except Exception:
        if len(locations) > 1:
            return [
                to_plain_records(rows.slice(i, 1), [locations[i]])[0] for i in range(len(locations))
            ]
        for column in rows.schema:
            try:
                _to_python(rows.select([column.name]))
            except Exception as error:  # noqa: BLE001
                # For an unknown time zone Arrow only reports that pytz is missing or, where it is
                # installed, passes its KeyError on.
                is_zone = "pytz" in str(error) or isinstance(error, KeyError)
                reason = "unknown time zone" if is_zone else format_error(error)
                text = f"column {column.name!r} of {column.type!s:.80}: {reason}"
                return [ConfigError(f"{locations[0]}: {text}")]
        raise


def _to_python(rows: "pa.Table") -> list[Any]:
    records: list[Any] = rows.to_pylist(maps_as_pydicts="strict")
    return records


def check_split(path: str, split: str, splits: Any) -> None:
    if split not in splits:
        names = ", ".join(sorted(splits)) or "none"
        problem = f"split={split}: no such split" if split else "split: missing"
        raise ConfigError(
            f"{path}: {problem}; the splits are {names} (a file can also be named directly)"
        )
