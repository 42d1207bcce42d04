"""Rows of a data file, for tests that read what was written."""

from collections.abc import Iterator

from streamrl.data.reading.indexed_table import iterate_records, open_table
from streamrl.data.reading.rows import DataRow, parse_records


def load_rows(
    path: str, prompt_key: str = "prompt", *, label_key: str = "", split: str = ""
) -> Iterator[DataRow]:
    """Yield the rows of a data file in file order."""
    records = iterate_records(open_table(path, split))
    return parse_records(records, prompt_key=prompt_key, label_key=label_key)
