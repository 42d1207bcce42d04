"""Countdown: reach a target from three given numbers, as rows in verl's format."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations_with_replacement, permutations

from examples.toy_models.rows import Row, as_row

NUM_EVAL = 256
NUMBERS = range(1, 10)
TARGETS = range(1, 100)


@cache
def expressions(numbers: tuple[int, ...]) -> dict[int, list[str]]:
    """The ways to write two or three of the numbers with + - *, by what comes out."""
    found: dict[int, list[str]] = {}
    for text in sorted(_texts(numbers)):
        value = eval(text, {"__builtins__": {}})  # made below, of digits and operators only
        found.setdefault(value, []).append(text)
    return found


def _texts(numbers: tuple[int, ...]) -> Iterator[str]:
    for count in (2,3):
        for a, *rest in set(permutations(numbers, count)):
            for op in "+-*":
                if len(rest) == 1:
                    yield f"{a}{op}{rest[0]}"
                    continue
                b, c = rest
                for second in "+-*":
                    yield f"{a}{op}{b}{second}{c}"
                    if second == "*" and op != "*":
                        yield f"({a}{op}{b}){second}{c}"
