"""Published figures of other systems against the planner's predictions, and fits to them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import nemo, nemo_fit, verl, verl_fit
from benchmarks.published.__main__ import SOURCES, format_markdown
from benchmarks.published.points import REAL_PFLOPS
from benchmarks.published.rows import Row, summarize_rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planner_published.md"
SEARCHES = ("real",)
"""Sources whose points take too long for a test."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "hybridflow"))
        for name in SOURCES
        if name not in SEARCHES
    ],
)
def test_page_holds_the_tables_of_the_benchmark(name: str):
    printed = format_markdown(name, list(SOURCES[name]()))
    assert printed in PAGE.read_text(), (
        "python -m benchmarks.published --into docs/planner_published.md"
    )


def test_page_has_a_row_for_every_search():
    page = PAGE.read_text()
    for (scale, length), pairs in REAL_PFLOPS.items():
        lines = [line for line in page.splitlines() if f"| {scale} of llama-" in line]
        rows = [line for line in lines if f", {length} tokens," in line and "gain" in line]
        assert len(rows) == len(pairs)


def test_at_least_94_of_the_published_points_are_hit():
    line = r"^Decisions: (\d+) of (\d+)\. Figures within 15 %: (\d+) of (\d+)\."
    sources = [list(map(int, row)) for row in re.findall(line, PAGE.read_text(), re.MULTILINE)]
    assert sum(row[0] + row[2] for row in sources) >= 94
    assert sum(row[1] + row[3] for row in sources) == 135


def test_row_hits_within_15_percent_or_with_the_same_decision():
    rows = [
        Row("a", "", "", "", 100.0, 114.0),
        Row("a", "", "", "", 100.0, 84.0),
        Row("a", "", "", "", "pays", "pays"),
        Row("a", "", "", "", "pays", "loses"),
        Row("a", "", "", "", 1.0, 9.0, fitted=True),
    ]
    assert [row.hit for row in rows] == [True, False, True, False, False]
    assert summarize_rows(rows)["a"] == {
        "decisions": 2,
        "decisions_hit": 1,
        "figures": 2,
        "figures_within_15_percent": 1,
        "mean_absolute_error": 0.15,
        "fitted": 1,
    }


VERL_NAMES = ("fsdp2", "megatron", "entropy", "handoff_token_s", "update_s", "decode_layer_s")


@pytest.mark.parametrize(
    ("iter_log_errors", "fitted", "name"),
    [
        *((verl_fit.iter_log_errors, verl.DEFAULT_CALIBRATION, name) for name in VERL_NAMES),
        *((nemo_fit.iter_log_errors, nemo.CONSTANTS, name) for name in nemo_fit.NAMES),
    ],
)
def test_fitted_constants_are_a_local_minimum(
    iter_log_errors: Callable[[Any], Iterator[float]], fitted: Any, name: str
):
    less, best, more = (
        sum(e**2 for e in iter_log_errors(replace(fitted, **{name: factor * vars(fitted)[name]})))
        for factor in (0.9, 1.0, 1.1)
    )
    assert best < min(less, more)
