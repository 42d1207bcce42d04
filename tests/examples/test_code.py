"""The code task: its programs pass the tests of their problems, whose results are right."""

import json
import random
from typing import Any

from examples.code import training
from examples.code.problems import list_problems
from examples.code.rows import make_ground_truth
from examples.toy_models.small_qwen2 import CHARACTERS


def passes(program: str, ground_truth: str) -> bool:
    """Return whether a program of the task passes the tests, each parsed as verl does."""
    tests = json.loads(ground_truth)
    names: dict[str, Any] = {}
    try:
        exec(program, names)
        for lines, expected in zip(tests["inputs"], tests["outputs"], strict=True):
            arguments = [json.loads(line) for line in lines.split("\n")]
            if names[tests["fn_name"]](*arguments) != json.loads(expected):
                return False
    except (SyntaxError, NameError, TypeError, IndexError, ValueError):
        return False
    return True


def test_every_training_program_passes_the_tests_of_its_problem():
    rng = random.Random(0)
    for problem in list_problems():
        truth = make_ground_truth(problem, rng)
        for program in problem.programs:
            assert passes(program, truth), (problem, program)
            assert len(program) < training.LESSONS.max_new_tokens
            assert set(problem.question + program) <= set(CHARACTERS)


def test_expected_results_by_hand():
    problems = {problem.question: problem for problem in list_problems()}

    def returned(question: str, *arguments: Any) -> Any:
        return problems[question].compute_expected(arguments)

    assert returned("f(x): 3 times x plus 2", 5) == 17
    assert returned("f(x): x plus 2, times 3", 5) == 21
    assert returned("f(x,y): the smaller of x plus 4 and 2 times y", 1, 3) == 5
    numbers = [5, 1, 4, 9, 7, 2, 8, 3]
    assert returned("f(x): the largest of the first 3 of x, plus 2", numbers) == 7
    assert returned("f(x): the sum of the last 2 of x, times 4", numbers) == 44
    assert returned("f(x): the length of x without its first 3", numbers) == 5
    assert returned("f(x): the smallest of x without its last 7", numbers) == 5
    assert returned("f(x): the sum of x in steps of 4", numbers) == 12
    assert returned("f(x): the first 2 letters of x, 3 times", "abcd") == "ababab"
    assert returned("f(x): the last 3 letters of x backwards", "abcd") == "dcb"
