"""Countdown: reach a target from three given numbers, as rows in verl's format."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations_with_replacement, permutations

from examples.countdown.reward import value_of
from examples.toy_models.rows import Row, as_row

NUM_EVAL = 256
NUMBERS = range(1, 10)
TARGETS = range(1, 100)


@cache
def ways(numbers: tuple[int, ...]) -> dict[int, list[str]]:
    """The sums of two or three of the numbers with + - *, by what they come to."""
    found: dict[int, list[str]] = {}
    for text in sorted(set(_sums(numbers))):
        value, _ = value_of(text)
        found.setdefault(int(value), []).append(text)
    return found


def _sums(numbers: tuple[int, ...]) -> Iterator[str]:
    for a, b in permutations(numbers, 2):
        yield from (f"{a}{sign}{b}" for sign in "+-*")
    for a, b, c in permutations(numbers, 3):
        for first in "+-*":
            yield from (f"{a}{first}{b}{second}{c}" for second in "+-*")
        yield from (f"({a}{first}{b})*{c}" for first in "+-")


def make_rows(*, seed: int, num_eval: int = NUM_EVAL) -> dict[str, list[Row]]:
    """The rows of each split, by its name: every problem once, its numbers in ascending order.

    No problem is in both.
    """
    problems = [
        (numbers, target)
        for numbers in combinations_with_replacement(NUMBERS, 3)
        for target in ways(numbers)
        if target in TARGETS
    ]
    rng = random.Random(seed)
    rng.shuffle(problems)
    parts = {"train": problems[num_eval:], "eval": problems[:num_eval]}
    return {
        name: [
            _row(list(numbers), target, split=name, index=i)
            for i, (numbers, target) in enumerate(part)
        ]
        for name, part in parts.items()
    }


def _row(numbers: list[int], target: int, *, split: str, index: int) -> Row:
    return as_row(
        f"{','.join(map(str, numbers))}:{target}",
        {"numbers": numbers, "target": target},
        data_source="countdown",
        ability="math",
        split=split,
        index=index,
    )
