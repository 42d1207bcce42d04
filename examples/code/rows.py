"""Rows of the code task in verl's code format: the ground truth is the tests of a function."""

import json
import random

from examples.code.problems import ARGUMENTS, CodeProblem, list_problems
from examples.toy_models.rows import Row, make_row

NUM_EVAL = 128


def make_rows(*, seed: int, num_eval: int = NUM_EVAL) -> dict[str, list[Row]]:
    """Return the rows by split; the splits have no problem in common."""
    rng = random.Random(seed)
    problems = list(list_problems())
    rng.shuffle(problems)
    splits = {"train": problems[num_eval:], "eval": problems[:num_eval]}
    return {
        name: [
            make_row(
                problem.question,
                make_ground_truth(problem, rng),
                data_source="code",
                ability="code",
                split=name,
                index=i,
            )
            for i, problem in enumerate(split)
        ]
        for name, split in splits.items()
    }


def make_ground_truth(problem: CodeProblem, rng: random.Random) -> str:
    """Return a JSON object with `fn_name`, `inputs` and `outputs`.

    An input is text with an argument in JSON per line; an output is the return value in JSON.
    """
    calls = ARGUMENTS[problem.family](rng)
    return json.dumps(
        {
            "inputs": ["\n".join(map(json.dumps, arguments)) for arguments in calls],
            "outputs": [json.dumps(problem.compute_expected(arguments)) for arguments in calls],
            "fn_name": "f",
        }
    )
