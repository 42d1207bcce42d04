"""Countdown: reach a target from three given numbers, as rows in verl's format."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations_with_replacement, permutations

from examples.countdown.reward import evaluate_sum
from examples.toy_models.rows import Row, make_row

NUM_EVAL = 256
NUMBERS = range(1, 10)
TARGETS = range(1, 100)


@cache
def list_solutions(numbers: tuple[int, ...]) -> dict[int, list[str]]:
    """Return the sums of two or three of the numbers with + - *, by their value."""
    sums_by_value: dict[int, list[str]] = {}
    for text in sorted(set(_iter_sums(numbers))):
        value, _ = evaluate_sum(text)
        sums_by_value.setdefault(int(value), []).append(text)
    return sums_by_value


def _iter_sums(numbers: tuple[int, ...]) -> Iterator[str]:
    for a, b in permutations(numbers, 2):
        yield from (f"{a}{sign}{b}" for sign in "+-*")
    for a, b, c in permutations(numbers, 3):
        for first in "+-*":
            yield from (f"{a}{first}{b}{second}{c}" for second in "+-*")
        yield from (f"({a}{first}{b})*{c}" for first in "+-")


def make_rows(*, seed: int, num_eval: int = NUM_EVAL) -> dict[str, list[Row]]:
    """Return the rows by split: each problem once, with numbers in ascending order."""
    problems = [
        (numbers, target)
        for numbers in combinations_with_replacement(NUMBERS, 3)
        for target in list_solutions(numbers)
        if target in TARGETS
    ]
    rng = random.Random(seed)
    rng.shuffle(problems)
    parts = {"train": problems[num_eval:], "eval": problems[:num_eval]}
    return {
        name: [
            _make_row(list(numbers), target, split=name, index=i)
            for i, (numbers, target) in enumerate(part)
        ]
        for name, part in parts.items()
    }


def _make_row(numbers: list[int], target: int, *, split: str, index: int) -> Row:
    return make_row(
        f"{','.join(map(str, numbers))}:{target}",
        {"numbers": numbers, "target": target},
        data_source="countdown",
        ability="math",
        split=split,
        index=index,
    )
