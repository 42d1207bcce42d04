"""Rows in verl's format, and files of rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def make_row(
    question: str, ground_truth: Any, *, data_source: str, ability: str, split: str, index: int
) -> Row:
    """Build a row: the question as a chat message, and the ground truth of the reward."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index},
    }


def get_question(row: Row) -> str:
    """Return the user's question."""
    return str(row["prompt"][-1]["content"])


def write_rows(rows: list[Row], stem: Path) -> None:
    """Write the same rows twice: `<stem>.parquet` and `<stem>.jsonl`."""
    pq.write_table(pa.Table.from_pylist(rows), stem.with_suffix(".parquet"))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    stem.with_suffix(".jsonl").write_text(lines, encoding="ascii")
