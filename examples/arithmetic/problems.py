"""Sums and differences of two or three one-digit numbers, as rows in verl's format."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NUM_EVAL = 256

Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A question such as `7+5-3`, and its answer, 9."""

    question: str
    answer: int


def all_problems() -> Iterator[Problem]:
    """Every problem once: 200 of two numbers, 4000 of three."""
    for num_later in (1, 2):
        signed = list(product("+-", range(10)))
        for first, later in product(range(10), product(signed, repeat=num_later)):
            question = f"{first}" + "".join(f"{sign}{digit}" for sign, digit in later)
            answer = first + sum(digit if sign == "+" else -digit for sign, digit in later)
            yield Problem(question, answer)


def split(*, seed: int, num_eval: int = NUM_EVAL) -> dict[str, list[Problem]]:
    """All problems in random order, cut in two: no question is in both `train` and `eval`."""
    shuffled = list(all_problems())
    random.Random(seed).shuffle(shuffled)
    return {"train": shuffled[num_eval:], "eval": shuffled[:num_eval]}


def as_row(problem: Problem, *, split_name: str, index: int) -> Row:
    """One row as verl has them: chat messages, and the answer as text."""
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split_name, "index": index},
    }


def make_rows(*, seed: int, num_eval: int = NUM_EVAL) -> dict[str, list[Row]]:
    """The rows of each split, by its name."""
    return {
        name: [as_row(problem, split_name=name, index=i) for i, problem in enumerate(part)]
        for name, part in split(seed=seed, num_eval=num_eval).items()
    }


def write_rows(rows: list[Row], stem: Path) -> None:
    """Write the same rows twice: `<stem>.parquet` and `<stem>.jsonl`."""
    pq.write_table(pa.Table.from_pylist(rows), stem.with_suffix(".parquet"))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    stem.with_suffix(".jsonl").write_text(lines, encoding="ascii")
