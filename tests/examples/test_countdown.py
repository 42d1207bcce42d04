"""The countdown task: its problems have solutions, and its reward accepts nothing else."""

import random
from itertools import permutations, product

import pytest

from examples.countdown import training
from examples.countdown.problems import make_rows
from examples.countdown.reward import compute_score
from examples.toy_models.rows import get_question

TRUTH = {"numbers": [2, 7, 9], "target": 25}


def reachable(numbers: list[int]) -> set[int]:
    """Compute all results of two or three numbers with + - *, independently of the example."""
    signs = (int.__add__, int.__sub__, int.__mul__)
    results = set()
    for a, b, c in permutations(numbers):
        for first, second in product(signs, repeat=2):
            results |= {first(a, b), second(first(a, b), c), second(a, first(b, c))}
    return results


def test_every_target_can_be_reached_and_every_training_answer_reaches_it():
    rng = random.Random(0)
    for part in make_rows(seed=0).values():
        for row in part:
            truth = row["reward_model"]["ground_truth"]
            assert truth["target"] in reachable(truth["numbers"])
            assert training.is_right(row, training.sample_solution(row, rng, 0.0))
            text = ",".join(map(str, truth["numbers"])) + f":{truth['target']}"
            assert get_question(row) == text


@pytest.mark.parametrize("answer", ["7+2*9", "2*9+7", "9*2+7", " 7 + (9 * 2) ", "(7+9*2)"])
def test_each_way_to_the_target_is_right(answer: str):
    assert compute_score("countdown", answer, TRUTH) == 1.0


def test_a_division_is_exact_and_not_every_number_must_be_used():
    truth = {"numbers": [3, 6, 8], "target": 4}
    assert compute_score("countdown", "8/(6/3)", truth) == 1.0
    assert compute_score("countdown", "8*3/6", truth) == 1.0
    assert compute_score("countdown", "8-3", {"numbers": [3, 6, 8], "target": 5}) == 1.0
    assert compute_score("countdown", "8/3", {"numbers": [3, 6, 8], "target": 2}) == 0.0


WRONG = [
    "7+9",  # another result
    *("9+9+7", "5*5", "25", "79-2", "7+2*9+0"),  # a number twice, or others than given
    *("", " ", "(7+2*9", "7+2*9)", "7 2", "2(9)+7", "+7+2*9", "7--9", "7+2*9=25", "007+2*9"),
    *("9/(7-7)", "7+2*9\n7+2*9", "9**9**9", "9//2", "1e999", "0x19", "25.0", "True", "target"),
    *("\u0662\u0665", "7+2*9\0", "__import__('os').abort()", "(lambda:25)()"),
    *("(" * 29 + "9" + ")" * 29, "(" * 100_000, "-" * 60, "9*" * 100_000 + "9", "9" * 60),
]


@pytest.mark.parametrize("answer", WRONG, ids=lambda answer: repr(answer)[:20])
def test_other_answers_score_0_and_raise_nothing(answer: str):
    assert compute_score("countdown", answer, TRUTH) == 0.0
