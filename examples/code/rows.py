"""The code task's rows, in verl's code format: the ground truth is tests of a function."""

import json
import random

from examples.code.problems import ARGUMENTS, Problem, all_problems
from examples.toy_models.rows import Row, as_row

NUM_EVAL = 128


def make_rows(*, seed: int, num_eval: int = NUM_EVAL) -> dict[str, list[Row]]:
    """The rows of each split, by its name: no problem is in both."""
    rng = random.Random(seed)
    problems = list(all_problems())
    rng.shuffle(problems)
    parts = {"train": problems[num_eval:], "eval": problems[:num_eval]}
    return {
        name: [
            as_row(
                problem.question,
                ground_truth(problem, rng),
                data_source="code",
                ability="code",
                split=name,
                index=i,
            )
            for i, problem in enumerate(part)
        ]
        for name, part in parts.items()
    }


def ground_truth(problem: Problem, rng: random.Random) -> str:
    """A JSON object: `fn_name`, `inputs` and `outputs`.

    An input is text with the arguments in their order, one a line and each as JSON; an output is
    the JSON of what the function returns.
    """
    chosen = ARGUMENTS[problem.family](rng)
    return json.dumps(
        {
            "inputs": ["\n".join(map(json.dumps, arguments)) for arguments in chosen],
            "outputs": [json.dumps(problem.expected(arguments)) for arguments in chosen],
            "fn_name": "f",
        }
    )
