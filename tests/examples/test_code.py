"""The code task: its programs are right, its tests tell them from wrong ones."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from examples.code import make, training
from examples.code.problems import list_problems
from examples.code.rows import ground_truth, make_rows
from examples.toy_models.building import Build
from examples.toy_models.lessons import Recipe
from examples.toy_models.rows import get_question
from examples.toy_models.small_qwen2 import CHARACTERS
from streamrl.data.reading.rows import load_rows


def passes(program: str, ground_truth: str) -> bool:
    """Whether one of the task's own programs passes the tests, each read as verl reads it."""
    found = json.loads(ground_truth)
    defined: dict[str, Any] = {}
    try:
        exec(program, defined)
        for given, expected in zip(found["inputs"], found["outputs"], strict=True):
            arguments = [json.loads(line) for line in given.split("\n")]
            if defined[found["fn_name"]](*arguments) != json.loads(expected):
                return False
    except (SyntaxError, NameError, TypeError, IndexError, ValueError):
        return False
    return True


def test_every_program_taught_passes_the_tests_of_its_problem() -> None:
    rng = random.Random(0)
    for problem in list_problems():
        truth = ground_truth(problem, rng)
        for program in problem.programs:
            assert passes(program, truth), (problem, program)
            assert len(program) < training.LESSONS.max_new_tokens
            assert set(problem.question + program) <= set(CHARACTERS)


def test_what_a_function_returns_is_right_by_hand() -> None:
    problems = {problem.question: problem for problem in list_problems()}

    def returned(question: str, *arguments: Any) -> Any:
        return problems[question].expected(arguments)

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


def test_a_program_with_a_slip_fails_whether_it_parses_or_not() -> None:
    rng = random.Random(0)
    outcomes = {"right": 0, "wrong": 0, "syntax": 0}
    for problem in list_problems():
        for _ in range(3):
            program = training.slip(problem.programs[0], rng)
            try:
                compile(program, "program", "exec")
            except SyntaxError:
                outcomes["syntax"] += 1
                continue
            outcomes["right" if passes(program, ground_truth(problem, rng)) else "wrong"] += 1
    total = sum(outcomes.values())
    assert outcomes["right"] < 0.05 * total, outcomes
    assert outcomes["wrong"] > 0.3 * total, outcomes
    assert outcomes["syntax"] > 0.2 * total, outcomes


def test_held_out_problems_are_not_trained_on() -> None:
    rows = make_rows(seed=0)
    train, held_out = ({get_question(row) for row in rows[name]} for name in ("train", "eval"))
    assert len(train) == len(rows["train"]) > 2000
    assert len(held_out) == len(rows["eval"]) == 128
    assert not train & held_out
    assert rows == make_rows(seed=0) != make_rows(seed=1)


def test_only_a_program_that_was_taught_counts_while_the_base_model_is_made() -> None:
    row = {"prompt": [{"role": "user", "content": "f(x): 3 times x plus 2"}]}
    assert training.is_right(row, "def f(x):\n return 3*x+2")
    assert training.is_right(row, "def f(x):\n return x*3+2")
    assert not training.is_right(row, "def f(x):\n return 3*x+1")


def test_a_build_is_whole_and_its_rows_load(tmp_path: Path) -> None:
    recipe = Recipe(num_clean_steps=2, num_slip_steps=2, rows_per_step=4, num_measured=4)
    out = tmp_path / "build"
    Build("code", out, format=1, fill=partial(make.fill, recipe=recipe)).make(out, seed=0)
    for name, part in make_rows(seed=0).items():
        loaded = list(load_rows(str(out / f"{name}.parquet")))
        assert [row.ground_truth for row in loaded] == [
            row["reward_model"]["ground_truth"] for row in part
        ]
    assert (out / "base_model" / "model.safetensors").is_file()
