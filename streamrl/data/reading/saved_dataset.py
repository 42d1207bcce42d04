"""Hugging Face datasets written by `save_to_disk`, checked before `datasets` opens them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from streamrl.data.reading.formats import DATASET_FILES, check_no_split, check_split, format_error
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import (
    MAX_LINE_BYTES,
    open_regular_file,
    read_small_json,
    wrap_file_errors,
)
from streamrl.files.typed_settings import describe_read_error

if TYPE_CHECKING:
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
