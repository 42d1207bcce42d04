"""Staleness bounds of `streamrl plan`: the run's settings allow or exclude each bound."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.main import main
from streamrl.config.run_config import load_config
from tests.cli.test_plan import TINY, refusal, run

PLAN = ["plan", *TINY, "--json"]
PUBLISH_EVERY_3 = "weights.publish_every=3"


def absent(plan: dict[str, list[dict[str, Any]]]) -> dict[int, str]:
    return {bound["max_staleness"]: bound["why"] for bound in plan["absent"]}


def test_an_excluded_bound_is_absent_and_the_written_config_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = tmp_path / "plan.yaml"
    # The config's own bound is 1.
    words = ["--max-staleness", "0,1,2", PUBLISH_EVERY_3, "-o", str(plan)]
    result = json.loads(run(capsys, *PLAN, *words)[1])
    assert [point["max_staleness"] for point in result["front"]] == [2]
    assert {0, 1} == set(absent(result))
    assert all(reason.startswith(PUBLISH_EVERY_3) for reason in absent(result).values())
    written = load_config(plan)
    assert (written.pipeline.max_staleness, written.weights.publish_every) == (2, 3)


def test_excluding_every_bound_is_an_error(capsys: pytest.CaptureFixture[str]):
    error = refusal(capsys, *PLAN, "--max-staleness", "0,1", PUBLISH_EVERY_3)
    assert PUBLISH_EVERY_3 in error and "pipeline.max_staleness=0" in error


def kinds(capsys: pytest.CaptureFixture[str], *words: str) -> set[str]:
    """Return the kinds of placements that fit."""
    candidates = json.loads(run(capsys, *PLAN, *words)[1])["candidates"]
    return {candidate["kind"] for candidate in candidates if "unfit" not in candidate}


def test_the_runs_current_sizes_do_not_prevent_colocation(capsys: pytest.CaptureFixture[str]):
    separate_sizes = ["generator.replicas=3", "trainer.world_size=2"]
    assert "colocated" in kinds(capsys, "--max-staleness", "0", *separate_sizes)


def test_an_error_under_every_bound_is_reported_once(capsys: pytest.CaptureFixture[str]):
    assert main([*PLAN, "trainer.world=2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
