"""Pretraining texts of the base model: sums equal to the target, or close to it."""

import random

from examples.countdown.problems import list_solutions
from examples.countdown.reward import compute_score
from examples.toy_models.base_model import Lessons
from examples.toy_models.rows import Row
from examples.toy_models.training import TrainingRecipe

RECIPE = TrainingRecipe(num_steps=400, slip_rate=0.5, bar={"eval_greedy": 0.2})
MAX_SLIP_DISTANCE = 9


def sample_solution(row: Row, rng: random.Random, slip_rate: float) -> str:
    """Return a sum such as `7+2*9` for `2,7,9:25`; a slip returns a sum close to the target."""
    truth = row["reward_model"]["ground_truth"]
    found, value = list_solutions(tuple(truth["numbers"])), truth["target"]
    if rng.random() < slip_rate:
        value = rng.choice(
            [other for other in found if 0 < abs(other - value) <= MAX_SLIP_DISTANCE] or [value]
        )
    return rng.choice(found[value])


def is_right(row: Row, completion: str) -> bool:
    """Return whether the task's reward is 1."""
    return compute_score("", completion, row["reward_model"]["ground_truth"]) == 1


LESSONS = Lessons(write=sample_solution, is_right=is_right, max_new_tokens=10)
