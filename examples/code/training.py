"""Pretraining texts of the base model: correct programs, and programs with one mistake."""

import random
from functools import cache

from examples.code.problems import CodeProblem, list_problems
from examples.toy_models.base_model import Lessons
from examples.toy_models.rows import Row, get_question
from examples.toy_models.training import TrainingRecipe

RECIPE = TrainingRecipe(num_steps=250, slip_rate=0.5, bar={"eval_greedy": 0.85})
DELETABLE_SIGNS = "()[]:,"
NAMES = ("sum", "max", "min", "len")


def sample_program(row: Row, rng: random.Random, slip_rate: float) -> str:
    """Return a program for the row; with probability `slip_rate`, it has a mistake."""
    text = rng.choice(find_problem(row).programs)
    return add_slip(text, rng) if rng.random() < slip_rate else text


def add_slip(text: str, rng: random.Random) -> str:
    """Return the program with a single mistake.

    The mistakes: a missing sign (usually a syntax error), a digit off by one or another function
    (wrong results), or an unknown name (a runtime error).
    """
    head, body = text.split("return ")
    changes = [text[:i] + text[i + 1 :] for i, sign in enumerate(text) if sign in DELETABLE_SIGNS]
    for i, sign in enumerate(body):
        if sign.isdigit():
            digit = str(int(sign) + rng.choice((-1, 1)))
            changes.append(f"{head}return {body[:i]}{digit}{body[i + 1 :]}")
    changes += [text.replace(name, rng.choice(NAMES)) for name in NAMES if name in body]
    changes.append(f"{head}return {body.replace('x', 'n')}")
    return rng.choice(changes)


@cache
def _index_by_question() -> dict[str, CodeProblem]:
    return {problem.question: problem for problem in list_problems()}


def find_problem(row: Row) -> CodeProblem:
    return _index_by_question()[get_question(row)]


def is_right(row: Row, completion: str) -> bool:
    """Return True if the completion equals a right program of the training texts.

    Programs of the model are not executed here, so other right programs do not count.
    """
    return completion in find_problem(row).programs


LESSONS = Lessons(write=sample_program, is_right=is_right, max_new_tokens=36, opening="\n")
