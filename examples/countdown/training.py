"""What the base model learns to write: one of the ways to reach the target, picked at random."""

import random

from examples.countdown.problems import ways
from examples.countdown.reward import compute_score
from examples.toy_models.lessons import Lessons, Recipe
from examples.toy_models.rows import Row

# No slips: so short a time at so hard a task, it gets more than half wrong by itself.
RECIPE = Recipe(num_clean_steps=500, num_slip_steps=0, clean_lr=3e-3)


def a_way(row: Row, rng: random.Random, _: float) -> str:
    """Such as `7+2*9` for `9,2,7:25`."""
    truth = row["reward_model"]["ground_truth"]
    return rng.choice(ways(tuple(sorted(truth["numbers"])))[truth["target"]])


def is_right(row: Row, completion: str) -> bool:
    """Whether the task's reward is 1."""
    return compute_score("", completion, row["reward_model"]["ground_truth"]) == 1


LESSONS = Lessons(write=a_way, is_right=is_right, max_new_tokens=10)
