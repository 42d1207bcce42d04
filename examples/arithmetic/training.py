"""What the base model learns to write: a sum worked out one operation at a time, with slips."""

import random
import re

from examples.toy_models.lessons import Lessons, Recipe
from examples.toy_models.rows import Row, question_of

# A problem of three numbers has two operations that may be wrong.
RECIPE = Recipe(num_clean_steps=300, num_slip_steps=80, slip_rate=0.33)
SLIPS = (-1, 1)
# The last of the equal parts, and only if it is one number: "12-3=9" answers 9.
ANSWER = re.compile(r"(?:\A|=)(-?\d+)\Z")


def worked_solution(row: Row, rng: random.Random, slip_rate: float) -> str:
    """What the model learns to write behind `7+5-3=`: one operation at a time, `12-3=9`.

    `slip_rate` is the share of wrong operations. After a slip it goes on from the wrong number, as
    a person would.
    """
    first, *later = re.findall(r"[+-]?\d", question_of(row))
    total, parts = int(first), []
    for i, term in enumerate(later):
        total += int(term)
        if rng.random() < slip_rate:
            total += rng.choice(SLIPS)
        parts.append(f"{total}" + "".join(later[i + 1 :]))
    return "=".join(parts)


def answer_of(completion: str) -> int | None:
    """The number a completion ends on; None where it ends on something else."""
    found = ANSWER.search(completion)
    return int(found[1]) if found else None


def is_right(row: Row, completion: str) -> bool:
    """Whether a completion ends on the row's answer."""
    return answer_of(completion) == int(row["reward_model"]["ground_truth"])


LESSONS = Lessons(write=worked_solution, is_right=is_right, max_new_tokens=12)
