"""What `save_to_disk` of Hugging Face datasets wrote, checked before that library opens it."""

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
"""Says which splits a dataset has; says what a dataset, or one split of it, is."""
_STATE_FILE = "state.json"
"""Names the files of a dataset, or of one split of it."""


class _StateDataFile(msgspec.Struct):
    filename: str


class _DatasetState(msgspec.Struct):
    """What state.json of a dataset on disk says of its files."""

    data_files: Annotated[list[_StateDataFile], msgspec.Meta(min_length=1)] = msgspec.field(
        name="_data_files"
    )


class _DatasetSplits(msgspec.Struct):
    """What dataset_dict.json says."""

    splits: list[str]


def open_saved_dataset(path: str, split: str) -> "Dataset":
    """Open what `save_to_disk` of Hugging Face datasets wrote; its columns are memory-mapped.

    Raises ConfigError naming it.
    """
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
    """Raise what is wrong with a dataset on disk as ConfigError naming it."""
    try:
        yield
    except (ConfigError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f"{path}: cannot be read as a dataset: {format_error(error)}") from error


def _read_dataset_file(file: Path, kind: Any) -> Any:
    """Read a file that says what a dataset on disk is. Raises ValueError naming it."""
    try:
        return msgspec.convert(read_small_json(file, most_bytes=MAX_LINE_BYTES), kind)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"{file.parent.name}/{file.name}: {describe_read_error(error)}") from None


def _resolve_sibling(file: Path, name: str) -> Path:
    """Return what a file says lies beside it. Raises ValueError for what lies elsewhere."""
    if name in ("", "..") or Path(name).name != name:
        said = f"{file.parent.name}/{file.name}"
        raise ValueError(f"{said}: {name!r:.80} must lie in the same folder")
    return file.with_name(name)
