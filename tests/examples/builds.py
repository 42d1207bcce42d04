"""Checks that the example tasks share: their split and their build."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.toy_models.building import Build
from examples.toy_models.lessons import PretrainingRecipe
from examples.toy_models.rows import Row, get_question
from tests.data_rows import load_rows

SHORT_RECIPE = PretrainingRecipe(
    num_clean_steps=2, num_slip_steps=2, rows_per_step=4, num_measured=4
)
Rows = Mapping[str, Sequence[Row]]


def check_split(make_rows: Callable[..., Rows], *, num_train: int, num_eval: int) -> None:
    """Assert that problems are unique and follow from the seed, and training has no eval ones."""
    rows = make_rows(seed=0)
    train, held_out = ({get_question(row) for row in rows[name]} for name in ("train", "eval"))
    assert len(train) == len(rows["train"]) > num_train
    assert len(held_out) == len(rows["eval"]) == num_eval
    assert not train & held_out
    assert rows == make_rows(seed=0) != make_rows(seed=1)


def check_build(name: str, fill: Callable[..., Any], rows: Rows, folder: Path) -> None:
    """Build a task, and assert that its model exists and its rows load from every format."""
    out = folder / "build"
    Build(name, out, format=1, fill=fill).make(out, seed=0)
    for part in rows:
        truths = [row["reward_model"]["ground_truth"] for row in rows[part]]
        for path in out.glob(f"{part}.*"):
            assert [row.ground_truth for row in load_rows(str(path))] == truths
        assert (out / f"{part}.parquet").is_file()
    assert (out / "base_model" / "model.safetensors").is_file()
