"""Small functions to write from a description: of numbers, of a list, of a text."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

FACTORS = range(2, 10)
TERMS = range(1, 10)
COUNTS = range(2, 8)
LIST_LENGTHS = (12, 11, 10, 12, 11)
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Problem:
    """What f is to return, as a description and as expressions that are all right.

    family: which arguments it is tested on; a key of ARGUMENTS.
    """

    family: str
    description: str
    expressions: tuple[str, ...]

    @property
    def signature(self) -> str:
        """Such as `f(x)`."""
        return "f(x,y)" if self.family == "pair" else "f(x)"

    @property
    def question(self) -> str:
        """What the user asks for."""
        return f"{self.signature}: {self.description}"

    @property
    def programs(self) -> list[str]:
        """Right answers, one for each expression."""
        return [f"def {self.signature}:\n return {text}" for text in self.expressions]

    def expected(self, arguments: Arguments) -> Any:
        """What f returns."""
        return eval(self.expressions[0], dict(zip("xy", arguments, strict=False)))


def all_problems() -> Iterator[Problem]:
    """Every problem once."""
    yield from _of_a_number()
    yield from _of_a_pair()
    yield from _of_a_list()
    yield from _of_a_text()


def _of_a_number() -> Iterator[Problem]:
    for a, b in product(FACTORS, TERMS):
        for said, written in (
            (f"{a} times x plus {b}", (f"{a}*x+{b}", f"x*{a}+{b}")),
            (f"{a} times x minus {b}", (f"{a}*x-{b}", f"x*{a}-{b}")),
            (f"x plus {b}, times {a}", (f"(x+{b})*{a}", f"{a}*(x+{b})")),
        ):
            yield Problem("number", said, written)


def _of_a_pair() -> Iterator[Problem]:
    for a, b in product(FACTORS, TERMS):
        for word, name in (("larger", "max"), ("smaller", "min")):
            yield Problem(
                "pair",
                f"the {word} of x plus {b} and {a} times y",
                (f"{name}(x+{b},{a}*y)", f"{name}({a}*y,x+{b})"),
            )


def _of_a_list() -> Iterator[Problem]:
    parts = [("x", "x")]
    for n in COUNTS:
        parts += [
            (f"the first {n} of x", f"x[:{n}]"),
            (f"the last {n} of x", f"x[-{n}:]"),
            (f"x without its first {n}", f"x[{n}:]"),
            (f"x without its last {n}", f"x[:-{n}]"),
            (f"x in steps of {n}", f"x[::{n}]"),
        ]
    names = (("sum", "sum"), ("largest", "max"), ("smallest", "min"), ("length", "len"))
    for (word, name), (part, cut) in product(names, parts):
        said, written = f"the {word} of {part}", f"{name}({cut})"
        yield Problem("list", said, (written,))
        for a in FACTORS:
            yield Problem("list", f"{said}, times {a}", (f"{written}*{a}", f"{a}*{written}"))
        for b in TERMS:
            yield Problem("list", f"{said}, plus {b}", (f"{written}+{b}", f"{b}+{written}"))


def _of_a_text() -> Iterator[Problem]:
    parts = [("x", "x")]
    for n in COUNTS:
        parts += [
            (f"the first {n} letters of x", f"x[:{n}]"),
            (f"the last {n} letters of x", f"x[-{n}:]"),
        ]
    for part, cut in parts:
        yield Problem("text", f"{part} backwards", (f"{cut}[::-1]",))
        for a in FACTORS:
            yield Problem("text", f"{part}, {a} times", (f"{cut}*{a}", f"{a}*{cut}"))


def _numbers(rng: random.Random) -> list[Arguments]:
    return [(number,) for number in rng.sample(range(-50, 50), 4)]


def _pairs(rng: random.Random) -> list[Arguments]:
    """Pairs of which now x decides, now y, whatever is done to them."""
    sizes = ((90, 1), (-90, 1), (1, 90), (1, -90))
    return [(x + rng.randrange(5), y + rng.randrange(5)) for x, y in sizes]


def _lists(rng: random.Random) -> list[Arguments]:
    """One rises and one falls: there, each cut has ends of its own."""
    rising, falling, *others = (rng.sample(range(1, 100), length) for length in LIST_LENGTHS)
    return [(sorted(rising),), (sorted(falling, reverse=True),), *((other,) for other in others)]


def _texts(rng: random.Random) -> list[Arguments]:
    return [("".join(rng.sample(LETTERS, length)),) for length in (9, 10, 11)]


ARGUMENTS = {"number": _numbers, "pair": _pairs, "list": _lists, "text": _texts}
