"""The countdown task: its problems have solutions, its reward believes nothing it cannot check."""

import random
from functools import partial
from itertools import permutations, product
from pathlib import Path

import pytest

from examples.countdown import make, training
from examples.countdown.problems import make_rows
from examples.countdown.reward import compute_score
from examples.toy_models.building import Build
from examples.toy_models.lessons import Recipe
from examples.toy_models.rows import get_question
from streamrl.data.reading.rows import load_rows

TRUTH = {"numbers": [2, 7, 9], "target": 25}


def reachable(numbers: list[int]) -> set[int]:
    """What two or three of the numbers come to with + - *, by other means than the example's."""
    signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}.values()
    found = set()
    for a, b, c in permutations(numbers):
        for first, second in product(signs, repeat=2):
            found |= {first(a, b), second(first(a, b), c), second(a, first(b, c))}
    return found


def test_every_target_can_be_reached_and_every_way_taught_reaches_it() -> None:
    rng = random.Random(0)
    for part in make_rows(seed=0).values():
        for row in part:
            truth = row["reward_model"]["ground_truth"]
            assert truth["target"] in reachable(truth["numbers"])
            assert training.is_right(row, training.sample_solution(row, rng, 0.0))
            text = ",".join(map(str, truth["numbers"])) + f":{truth['target']}"
            assert get_question(row) == text


def test_a_slip_is_a_sum_that_comes_near() -> None:
    rng, rows = random.Random(0), make_rows(seed=0)["train"]
    right = [training.is_right(row, training.sample_solution(row, rng, 1.0)) for row in rows]
    assert sum(right) < 0.05 * len(rows), "few targets have no other near them"


def test_held_out_problems_are_not_trained_on() -> None:
    rows = make_rows(seed=0)
    train, held_out = ({get_question(row) for row in rows[name]} for name in ("train", "eval"))
    assert len(train) == len(rows["train"]) > 2000
    assert len(held_out) == len(rows["eval"]) == 256
    assert not train & held_out
    assert rows == make_rows(seed=0) != make_rows(seed=1)


@pytest.mark.parametrize("answer", ["7+2*9", "2*9+7", "9*2+7", " 7 + (9 * 2) ", "(7+9*2)"])
def test_each_way_to_the_target_is_right(answer: str) -> None:
    assert compute_score("countdown", answer, TRUTH) == 1.0


def test_a_division_is_exact_and_not_every_number_must_be_used() -> None:
    truth = {"numbers": [3, 6, 8], "target": 4}
    assert compute_score("countdown", "8/(6/3)", truth) == 1.0
    assert compute_score("countdown", "8*3/6", truth) == 1.0
    assert compute_score("countdown", "8-3", {"numbers": [3, 6, 8], "target": 5}) == 1.0
    assert compute_score("countdown", "8/3", {"numbers": [3, 6, 8], "target": 2}) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "7+9",  # another number comes out
        "9+9+7",  # a number twice
        "5*5",  # numbers that were not given
        "25",
        "7+2*9=25",
        "7+2*9+0",
        "79-2",
        "",
        " ",
        "(7+2*9",
        "7+2*9)",
        "7 2",
        "2(9)+7",
        "+7+2*9",
        "7--9",
        "9/(7-7)",
        "7+2*9\n7+2*9",
        "9**9**9",
        "9//2",
        "1e999",
        "0x19",
        "25.0",
        "True",
        "target",
        "\u0662\u0665",
        "7+2*9\0",
        "__import__('os').abort()",
        "(lambda:25)()",
        "(" * 29 + "9" + ")" * 29,
        "(" * 100_000,
        "-" * 60,
        "9*" * 100_000 + "9",
        "9" * 60,
        "007+2*9",
    ],
)
def test_anything_else_is_wrong_and_nothing_raises(answer: str) -> None:
    assert compute_score("countdown", answer, TRUTH) == 0.0


def test_a_build_is_whole_and_its_rows_load(tmp_path: Path) -> None:
    recipe = Recipe(num_clean_steps=2, num_slip_steps=2, rows_per_step=4, num_measured=4)
    out = tmp_path / "build"
    Build("countdown", out, format=1, fill=partial(make.fill, recipe=recipe)).make(out, seed=0)
    for name, part in make_rows(seed=0).items():
        for suffix in ("parquet", "jsonl"):
            loaded = list(load_rows(str(out / f"{name}.{suffix}")))
            assert [row.ground_truth for row in loaded] == [
                row["reward_model"]["ground_truth"] for row in part
            ]
    assert (out / "base_model" / "model.safetensors").is_file()
