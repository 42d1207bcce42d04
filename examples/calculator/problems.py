"""Products with five digits of a three-digit and a two-digit number, as rows in verl's format."""

import random
from itertools import product

from examples.toy_models.rows import Row, make_row

NUM_TRAIN = 8192
NUM_EVAL = 256
FIRST = range(100, 1000)
SECOND = range(10, 100)
MIN_PRODUCT = 10_000


def make_rows(*, seed: int, num_eval: int = NUM_EVAL) -> dict[str, list[Row]]:
    """Return the rows by split, which share no product, with answers as text."""
    factors = [(a, b) for a, b in product(FIRST, SECOND) if a * b >= MIN_PRODUCT]
    problems = random.Random(seed).sample(factors, NUM_TRAIN + num_eval)
    parts = {"train": problems[num_eval:], "eval": problems[:num_eval]}
    return {
        name: [
            make_row(
                f"{first}*{second}",
                str(first * second),
                data_source="calculator",
                ability="math",
                split=name,
                index=i,
            )
            for i, (first, second) in enumerate(part)
        ]
        for name, part in parts.items()
    }
