"""Problems: sums and differences of two or three one-digit numbers, as rows in verl's format."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from examples.toy_models.rows import Row, make_row

NUM_EVAL = 256


@dataclass(frozen=True)
class ArithmeticProblem:
    """Question such as `7+5-3`, and its answer, 9."""

    question: str
    answer: int


def list_problems() -> Iterator[ArithmeticProblem]:
    """Yield each problem once: 200 with two numbers, 4000 with three."""
    for num_later in (1, 2):
        signed = list(product("+-", range(10)))
        for first, later in product(range(10), product(signed, repeat=num_later)):
            question = f"{first}" + "".join(f"{sign}{digit}" for sign, digit in later)
            answer = first + sum(digit if sign == "+" else -digit for sign, digit in later)
            yield ArithmeticProblem(question, answer)


def split_problems(*, seed: int, num_eval: int = NUM_EVAL) -> dict[str, list[ArithmeticProblem]]:
    """Shuffle all problems and split them into `train` and `eval`, which share no question."""
    shuffled = list(list_problems())
    random.Random(seed).shuffle(shuffled)
    return {"train": shuffled[num_eval:], "eval": shuffled[:num_eval]}


def make_rows(*, seed: int, num_eval: int = NUM_EVAL) -> dict[str, list[Row]]:
    """Return the rows by split, with answers as text."""
    return {
        name: [
            make_row(
                problem.question,
                str(problem.answer),
                data_source="arithmetic",
                ability="math",
                split=name,
                index=i,
            )
            for i, problem in enumerate(part)
        ]
        for name, part in split_problems(seed=seed, num_eval=num_eval).items()
    }
