"""Formats of a data file: JSONL, parquet, a directory of parquet shards, a Hugging Face dataset.

Every format gives the same plain Python records, one at a time, each with its place in the file.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

Records = Iterator[tuple[str, int, Any]]
"""(place, index from 0, record); the record of a line that is not JSON is the ConfigError of it."""

_BATCH = 1024
_SHARD = re.compile(r"(.+)-\d+-of-\d+")


def read_records(path: str, split: str = "") -> Records:
    """What a data file holds, one record at a time; of a dataset that has several splits, `split`.

    Raises ConfigError naming the file if it cannot be read, has no such split, or needs one.
    """
    try:
        if not Path(path).is_dir():
            yield from _read_file(path, split)
        elif (Path(path) / "dataset_dict.json").is_file():
            yield from _read_dataset(path, split)
        elif (Path(path) / "dataset_info.json").is_file():
            _refuse_split(path, split)
            yield from _read_dataset(path, "")
        else:
            yield from _read_shards(path, split)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _read_file(path: str, split: str) -> Records:
    reader = _READERS.get(Path(path).suffix)
    if reader is None:
        raise ConfigError(
            f"{path}: unknown extension, must be one of {', '.join(_READERS)}, or a directory"
        )
    _refuse_split(path, split)
    yield from reader(path)


def _refuse_split(path: str, split: str) -> None:
    if split:
        raise ConfigError(f"{path}: split={split}: it has no splits")


def _read_jsonl(path: str) -> Records:
    with open(path, "rb") as file:
        for index, line in enumerate(file):
            if not line.strip():
                continue
            place = f"{path} line {index + 1}"
            text = line.removeprefix(codecs.BOM_UTF8) if index == 0 else line
            record: Any
            try:
                record = json.loads(text.decode())
            except (ValueError, RecursionError) as error:
                record = ConfigError(f"{place}: not JSON: {one_line(error)}")
            yield place, index, record


def _read_parquet(path: str) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                for record in batch.to_pylist(maps_as_pydicts="strict"):
                    yield f"{path} row {index + 1}", index, record
                    index += 1
    except (pa.ArrowException, ValueError, KeyError) as error:
        where = f"after row {index}" if index else "as parquet"
        raise ConfigError(f"{path}: cannot be read {where}: {one_line(error)}") from error


_READERS: Mapping[str, Callable[[str], Records]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
}


def _read_shards(path: str, split: str) -> Records:
    """The .parquet files of a directory one after the other, by name."""
    shards = sorted(Path(path).glob("*.parquet"))
    if not shards:
        raise ConfigError(
            f"{path}: cannot be read: a directory with neither a Hugging Face dataset on disk nor"
            " .parquet files"
        )
    names = [_SHARD.fullmatch(shard.stem) for shard in shards]
    splits = {name[1] if name else "" for name in names}
    if len(splits) > 1 or split:
        _check_split(path, split, splits - {""})
        shards = [s for s, name in zip(shards, names, strict=True) if name and name[1] == split]
    index = 0
    for shard in shards:
        for _, _, record in _read_parquet(str(shard)):
            yield f"{path} row {index + 1}", index, record
            index += 1


def _read_dataset(path: str, split: str) -> Records:
    """What `save_to_disk` of Hugging Face datasets wrote."""
    import pyarrow as pa
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(path)
        if isinstance(found, DatasetDict):
            _check_split(path, split, found)
            found = found[split]
        for index, record in enumerate(_records(found)):
            yield f"{path} row {index + 1}", index, record
    except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be read as a dataset: {one_line(error)}") from error


def _records(dataset: "Dataset") -> Iterator[Any]:
    for table in dataset.with_format("arrow").iter(_BATCH):
        yield from table.to_pylist(maps_as_pydicts="strict")


def _check_split(path: str, split: str, splits: Any) -> None:
    if split not in splits:
        known = ", ".join(sorted(splits)) or "none"
        said = f"split={split}: there is no such split" if split else "split: missing"
        raise ConfigError(f"{path}: {said}; the splits are {known}")
