"""The arithmetic task: its problems and worked solutions."""

import random

from examples.arithmetic import training
from examples.arithmetic.problems import make_rows
from examples.toy_models.rows import get_question


def value(question: str) -> int:
    """Compute the answer independently of the example."""
    assert set(question) <= set("0123456789+-")
    return int(eval(question, {"__builtins__": {}}))


def test_every_ground_truth_is_right_and_in_verls_format():
    for name, part in make_rows(seed=0).items():
        for row in part:
            (message,) = row["prompt"]
            assert message["role"] == "user"
            truth = row["reward_model"]["ground_truth"]
            assert truth == str(value(message["content"]))
            assert row["extra_info"]["split"] == name
            assert row["data_source"] == "arithmetic"


def test_worked_solutions_end_on_the_answer_unless_there_is_a_slip():
    rng = random.Random(0)
    for row in make_rows(seed=0)["eval"]:
        right = training.write_solution(row, rng, 0.0)
        assert training.parse_answer(right) == value(get_question(row))
        assert training.parse_answer(training.write_solution(row, rng, 1.0)) is not None
    assert training.parse_answer("12-3") is None
