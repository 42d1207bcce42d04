"""The example tasks: problems that are not trained on, and builds whose rows load."""

import json
from functools import partial

import pytest

from examples.arithmetic import make as arithmetic
from examples.arithmetic import problems as arithmetic_rows
from examples.calculator import make as calculator
from examples.calculator import problems as calculator_rows
from examples.code import make as code
from examples.code import rows as code_rows
from examples.countdown import make as countdown
from examples.countdown import problems as countdown_rows
from examples.guess import make as guess
from examples.toy_models.building import RECORD, Build
from examples.toy_models.rows import get_question
from examples.toy_models.training import TrainingRecipe
from tests.data_rows import load_rows

# Without a step, and so without a run of `streamrl train`.
UNTRAINED = TrainingRecipe(num_steps=0, num_measured=4)


@pytest.mark.parametrize(
    ("task", "num_train", "num_eval"),
    [
        (arithmetic_rows, 3000, 256),
        (calculator_rows, 8000, 256),
        (code_rows, 2000, 128),
        (countdown_rows, 2000, 256),
    ],
)
def test_held_out_problems_are_unique_follow_from_the_seed_and_are_not_trained_on(
    task, num_train, num_eval
):
    rows = task.make_rows(seed=0)
    train, held_out = ({get_question(row) for row in rows[name]} for name in ("train", "eval"))
    assert len(train) == len(rows["train"]) > num_train
    assert len(held_out) == len(rows["eval"]) == num_eval
    assert not train & held_out
    assert rows == task.make_rows(seed=0) != task.make_rows(seed=1)


@pytest.mark.parametrize("task", [arithmetic, code, countdown, calculator, guess])
def test_a_build_is_complete_and_its_rows_load_from_every_format(tmp_path, task):
    out = tmp_path / "build"
    build = Build("task", out, format=1, fill=partial(task.write_contents, recipe=UNTRAINED))
    build.make(out, seed=0)
    for part in ("train", "eval"):
        first, second = (list(load_rows(str(path))) for path in sorted(out.glob(f"{part}.*")))
        truths = [row.ground_truth for row in first]
        assert truths and truths == [row.ground_truth for row in second]
    assert (out / "base_model" / "model.safetensors").is_file()
    assert json.loads((out / RECORD).read_text())["measured"]
    if task is arithmetic:
        text = json.loads((out / "pretrain.jsonl").read_text().splitlines()[0])["text"]
        (question,) = json.loads((out / "train.jsonl").read_text().splitlines()[0])["prompt"]
        assert text.startswith(f"<bos>{question['content']}=")
