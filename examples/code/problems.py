"""Problems: write a small function of numbers, a list or a text from its description."""

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
class CodeProblem:
    """Function f to write: a description of its return value, and equivalent expressions.

    family: type of the test arguments; a key of ARGUMENTS.
    """

    family: str
    description: str
    expressions: tuple[str, ...]

    @property
    def signature(self) -> str:
        return "f(x,y)" if self.family == "pair" else "f(x)"

    @property
    def question(self) -> str:
        """The prompt."""
        return f"{self.signature}: {self.description}"

    @property
    def programs(self) -> list[str]:
        """Correct programs, one per expression."""
        return [f"def {self.signature}:\n return {text}" for text in self.expressions]

    def compute_expected(self, arguments: Arguments) -> Any:
        """Return the expected value of f(*arguments)."""
        return eval(self.expressions[0], dict(zip("xy", arguments, strict=False)))


def list_problems() -> Iterator[CodeProblem]:
    yield from _iter_number_problems()
    yield from _iter_pair_problems()
    yield from _iter_list_problems()
    yield from _iter_text_problems()


def _iter_number_problems() -> Iterator[CodeProblem]:
    for a, b in product(FACTORS, TERMS):
        for description, expressions in (
            (f"{a} times x plus {b}", (f"{a}*x+{b}", f"x*{a}+{b}")),
            (f"{a} times x minus {b}", (f"{a}*x-{b}", f"x*{a}-{b}")),
            (f"x plus {b}, times {a}", (f"(x+{b})*{a}", f"{a}*(x+{b})")),
        ):
            yield CodeProblem("number", description, expressions)


def _iter_pair_problems() -> Iterator[CodeProblem]:
    for a, b in product(FACTORS, TERMS):
        for word, name in (("larger", "max"), ("smaller", "min")):
            yield CodeProblem(
                "pair",
                f"the {word} of x plus {b} and {a} times y",
                (f"{name}(x+{b},{a}*y)", f"{name}({a}*y,x+{b})"),
            )


def _iter_list_problems() -> Iterator[CodeProblem]:
    slices = [("x", "x")]
    for n in COUNTS:
        slices += [
            (f"the first {n} of x", f"x[:{n}]"),
            (f"the last {n} of x", f"x[-{n}:]"),
            (f"x without its first {n}", f"x[{n}:]"),
            (f"x without its last {n}", f"x[:-{n}]"),
            (f"x in steps of {n}", f"x[::{n}]"),
        ]
    names = (("sum", "sum"), ("largest", "max"), ("smallest", "min"), ("length", "len"))
    for (word, name), (label, code) in product(names, slices):
        description, call = f"the {word} of {label}", f"{name}({code})"
        yield CodeProblem("list", description, (call,))
        for a in FACTORS:
            yield CodeProblem("list", f"{description}, times {a}", (f"{call}*{a}", f"{a}*{call}"))
        for b in TERMS:
            yield CodeProblem("list", f"{description}, plus {b}", (f"{call}+{b}", f"{b}+{call}"))


def _iter_text_problems() -> Iterator[CodeProblem]:
    slices = [("x", "x")]
    for n in COUNTS:
        slices += [
            (f"the first {n} letters of x", f"x[:{n}]"),
            (f"the last {n} letters of x", f"x[-{n}:]"),
        ]
    for label, code in slices:
        yield CodeProblem("text", f"{label} backwards", (f"{code}[::-1]",))
        for a in FACTORS:
            yield CodeProblem("text", f"{label}, {a} times", (f"{code}*{a}", f"{a}*{code}"))


def _sample_numbers(rng: random.Random) -> list[Arguments]:
    return [(number,) for number in rng.sample(range(-50, 50), 4)]


def _sample_pairs(rng: random.Random) -> list[Arguments]:
    """Return pairs in which x or y dominates for every problem."""
    sizes = ((90, 1), (-90, 1), (1, 90), (1, -90))
    return [(x + rng.randrange(5), y + rng.randrange(5)) for x, y in sizes]


def _sample_lists(rng: random.Random) -> list[Arguments]:
    """Return lists, one ascending and one descending, on which different slices differ."""
    rising, falling, *rest = (rng.sample(range(1, 100), length) for length in LIST_LENGTHS)
    return [(sorted(rising),), (sorted(falling, reverse=True),), *((items,) for items in rest)]


def _sample_texts(rng: random.Random) -> list[Arguments]:
    return [("".join(rng.sample(LETTERS, length)),) for length in (9, 10, 11)]


ARGUMENTS = {
    "number": _sample_numbers,
    "pair": _sample_pairs,
    "list": _sample_lists,
    "text": _sample_texts,
}
