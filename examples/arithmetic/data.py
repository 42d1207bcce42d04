"""Problems of two or three one-digit numbers, as rows in verl's format."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "arithmetic"
NUM_EVAL = 256

Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A question such as `7+5-3` and its answer, 9."""

    question: str
    answer: int


def problems() -> Iterator[Problem]:
    """Every `a+b`, `a-b`, `a+b+c`, ... of one-digit numbers: 200 of two numbers, 4000 of three."""
    for num_terms in (2, 3):
        for first, *rest in product(range(10), repeat=num_terms):
            for signs in product((1, -1), repeat=num_terms - 1):
                terms = [sign * digit for sign, digit in zip(signs, rest, strict=True)]
                tail = "".join(
                    f"{'+' if sign > 0 else '-'}{digit}"
                    for sign, digit in zip(signs, rest, strict=True)
                )
                yield Problem(f"{first}{tail}", first + sum(terms))


def split(*, seed: int, num_eval: int = NUM_EVAL) -> tuple[list[Problem], list[Problem]]:
    """All problems in random order, cut into (train, eval): no question is in both."""
    shuffled = list(problems())
    random.Random(seed).shuffle(shuffled)
    return shuffled[num_eval:], shuffled[:num_eval]


def as_row(problem: Problem, *, split_name: str, index: int) -> Row:
    """One verl row: chat messages, and the answer as text for an exact-match reward."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split_name, "index": index},
    }


def make_rows(*, seed: int) -> dict[str, list[Row]]:
    """The rows of both splits, by split name."""
    train, held_out = split(seed=seed)
    return {
        name: [as_row(problem, split_name=name, index=i) for i, problem in enumerate(part)]
        for name, part in (("train", train), ("eval", held_out))
    }


def write_rows(rows: list[Row], stem: Path) -> None:
    """Write the same rows to `<stem>.parquet` and `<stem>.jsonl`."""
    pq.write_table(pa.Table.from_pylist(rows), stem.with_suffix(".parquet"))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    stem.with_suffix(".jsonl").write_text(lines, encoding="ascii")
