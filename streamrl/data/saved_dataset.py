"""What `save_to_disk` of Hugging Face datasets wrote, checked before that library opens it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from streamrl.data.reading.formats import SAVED, check_split, one_line, refuse_split
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import MOST_LINE_BYTES, file_errors, open_regular, read_small_json
from streamrl.files.typed_settings import unreadable

if TYPE_CHECKING:
    from datasets import Dataset

_SPLITS, _INFO = SAVED
"""Says which splits a dataset has; says what a dataset, or one split of it, is."""
_STATE = "state.json"
"""Names the files of a dataset, or of one split of it."""


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    """What state.json of a dataset on disk says of its files."""

    data_files: Annotated[list[_DataFile], msgspec.Meta(min_length=1)] = msgspec.field(
        name="_data_files"
    )


class _Splits(msgspec.Struct):
    """What dataset_dict.json says."""

    splits: list[str]


def open_dataset(path: str, split: str) -> "Dataset":
    """Open what `save_to_disk` of Hugging Face datasets wrote; its columns are memory-mapped.

    Raises ConfigError naming it.
    """
    from datasets import Dataset

    folder = Path(path)
    with _dataset_errors(path):
        if (folder / _SPLITS).is_file() and not (folder / _STATE).is_file():
            check_split(path, split, _read_saved(folder / _SPLITS, _Splits).splits)
            folder = _beside(folder / _SPLITS, split)
        else:
            refuse_split(path, split)
        for file in _read_saved(folder / _STATE, _State).data_files:
            data = _beside(folder / _STATE, file.filename)
            with file_errors(data):
                open_regular(data).close()
        _read_saved(folder / _INFO, dict)
        return Dataset.load_from_disk(str(folder))


@contextmanager
def _dataset_errors(path: str) -> Iterator[None]:
    """Raise what is wrong with a dataset on disk as ConfigError naming it."""
    try:
        yield
    except (ConfigError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f"{path}: cannot be read as a dataset: {one_line(error)}") from error


def _read_saved(file: Path, kind: Any) -> Any:
    """Read a file that says what a dataset on disk is. Raises ValueError naming it."""
    try:
        return msgspec.convert(read_small_json(file, most_bytes=MOST_LINE_BYTES), kind)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"{file.parent.name}/{file.name}: {unreadable(error)}") from None


def _beside(file: Path, name: str) -> Path:
    """Return what a file says lies beside it. Raises ValueError for what lies elsewhere."""
    if name in ("", "..") or Path(name).name != name:
        said = f"{file.parent.name}/{file.name}"
        raise ValueError(f"{said}: {name!r:.80} must lie in the same folder")
    return file.with_name(name)
