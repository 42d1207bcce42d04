"""Rows of a data file, for tests that read what was written."""

from collections.abc import Iterator
from typing import Any

from streamrl.data.config import DataFile
from streamrl.data.prompt_file import load_data_rows
from streamrl.data.rows import DataRow


def load_rows(path: str, prompt_key: str = "prompt", **settings: Any) -> Iterator[DataRow]:
    """Yield the rows of a data file in file order. settings: fields of DataFile."""
    return load_data_rows(DataFile(path, prompt_key=prompt_key, **settings))
