"""The arithmetic task: its problems, its model's tokenizer, and its build."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from examples.arithmetic import make, training
from examples.arithmetic.problems import make_rows
from examples.toy_models.building import Build
from examples.toy_models.rows import Row, get_question
from tests.examples.builds import SHORT_RECIPE, check_split


def value(question: str) -> int:
    """Compute the answer independently of the example."""
    assert set(question) <= set("0123456789+-")
    return int(eval(question, {"__builtins__": {}}))


def rows() -> dict[str, list[Row]]:
    return make_rows(seed=0)


def test_every_ground_truth_is_right_and_in_verls_format():
    for name, part in rows().items():
        for row in part:
            (message,) = row["prompt"]
            assert message["role"] == "user"
            truth = row["reward_model"]["ground_truth"]
            assert truth == str(value(message["content"]))
            assert row["extra_info"]["split"] == name
            assert row["data_source"] == "arithmetic"


def test_held_out_problems_are_not_trained_on():
    check_split(make_rows, num_train=3000, num_eval=256)


def test_worked_solutions_end_on_the_answer_unless_there_is_a_slip():
    rng = random.Random(0)
    for row in rows()["eval"]:
        right = training.write_solution(row, rng, 0.0)
        assert training.parse_answer(right) == value(get_question(row))
        assert training.is_right(row, right)
        assert training.parse_answer(training.write_solution(row, rng, 1.0)) is not None
    row = {"prompt": [{"role": "user", "content": "7+5-3"}]}
    assert training.write_solution(row, rng, 0.0) == "12-3=9"
    assert training.parse_answer("12-3=9") == 9
    assert training.parse_answer("12-3") is None


def test_a_build_is_complete_and_is_not_made_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "build"
    build = Build(
        "arithmetic", out, format=2, fill=partial(make.write_contents, recipe=SHORT_RECIPE)
    )
    build.make(out, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["build"], "no partial build is left"
    assert build.is_made(out, seed=0)
    first = json.loads((out / "train.jsonl").read_text().splitlines()[0])
    assert first == rows()["train"][0]
    text = json.loads((out / "pretrain.jsonl").read_text().splitlines()[0])["text"]
    assert text.startswith("<bos>" + get_question(first) + "=")
    assert AutoModelForCausalLM.from_pretrained(out / "base_model").config.model_type == "qwen2"
    with pytest.raises(SystemExit, match="no build of format 2 with seed 1"):
        build.is_made(out, seed=1)
    assert "arithmetic" in capsys.readouterr().out
