"""What a run directory holds, as the page reads it: also while the run writes it."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ConfigError
from streamrl.telemetry.page.run_record import JsonlTail, RunReader
from tests.telemetry.page.recorded_run import START_S, STEP_S, write_run

ROWS = st.lists(st.dictionaries(st.sampled_from("abc"), st.integers()), max_size=8)


@pytest.mark.parametrize(
    ("seconds", "step"), [(0.0, 0.0), (0.5, 0.25), (1.0, 0.5), (2.5, 1.25), (9.0, 3.0)]
)
def test_times_become_steps(tmp_path: Path, seconds: float, step: float) -> None:
    run = RunReader(write_run(tmp_path / "run", num_steps=3)).read()
    assert run.find_step_at(START_S + seconds) == pytest.approx(step)
    assert STEP_S == 2.0


def test_later_steps_are_read_from_where_the_last_read_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2, is_closed=False)
    reader = RunReader(folder)
    assert reader.read().steps.tolist() == [1, 2]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 5.0, "reward/mean": 0.5}\n{"step": 4, "ti')
    assert reader.read().steps.tolist() == [1, 2, 3]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('me": 6.0}\n')
    assert reader.read().steps.tolist() == [1, 2, 3, 4]


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=4, is_closed=False)
    reader = RunReader(folder)
    assert reader.read().get_column("reward/mean")[-1] == pytest.approx(0.4)
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:2]
    lines.append(json.dumps({"step": 3, "time": 9.0, "reward/mean": 0.9}))
    replaced = folder / "replaced"
    replaced.write_text("\n".join(lines) + "\n")
    replaced.replace(folder / "metrics.jsonl")
    run = reader.read()
    assert run.steps.tolist() == [1, 2, 3]
    assert run.get_column("reward/mean")[-1] == pytest.approx(0.9)


def write_steps(folder: Path, num_steps: int) -> Path:
    """Write rows of a run whose staleness is 5 at step 2."""
    folder.mkdir()
    (folder / "config.yaml").touch()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            row: dict[str, Any] = {
                "step": step,
                "time": float(step),
                "time/step_s": 1.0,
                "reward/mean": step % 2,
            }
            row |= {"staleness/max": 5 * (step == 2), "ledger/trained": 4 * step}
            row["staleness/histogram"] = {"edges": [0, 1], "counts": [3]}
            file.write(json.dumps(row) + "\n")
    return folder


def test_a_long_run_is_shown_by_means_extremes_and_latest_rows(tmp_path: Path) -> None:
    run = RunReader(write_steps(tmp_path / "run", 10_000)).read()
    steps = run.steps
    assert (steps[0], steps[-1]) == (1, 10_000) and (np.diff(steps) > 0).all()
    assert np.diff(steps)[-99:].tolist() == [1] * 99, "the latest steps are whole"
    rewards = run.get_column("reward/mean")
    assert rewards[1:-150] == pytest.approx(0.5), "each bin has even and odd steps"
    assert run.get_column("staleness/max").max() == 5
    assert run.get_column("ledger/trained") == pytest.approx(4 * steps)
    assert run.get_staleness_counts().sum() == 30_000
    assert run.total_s == 10_000


def test_the_memory_for_a_run_does_not_grow_with_its_steps(tmp_path: Path) -> None:
    peaks = []
    for num_steps in (2000, 6000):
        reader = RunReader(write_steps(tmp_path / str(num_steps), num_steps))
        tracemalloc.start()
        try:
            reader.read()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@given(ROWS, st.data())
def test_a_growing_file_is_read_once_in_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, int]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tail") / "rows.jsonl"
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    tail, start = JsonlTail(path), 0
    read: list[dict[str, Any]] = []
    while start < len(content):
        end = data.draw(st.integers(start + 1, len(content)))
        with path.open("ab") as file:
            file.write(content[start:end])
        start = end
        read += tail.read(lambda: pytest.fail("nothing was replaced"))
    assert read == rows


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff", b'{"a": 1, "a": 2}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    folder = write_run(tmp_path / "run", num_steps=1)
    with (folder / "metrics.jsonl").open("ab") as file:
        start = file.tell()
        file.write(line + b"\n")
    with pytest.raises(ConfigError, match=rf"metrics\.jsonl, line at byte {start}: ") as raised:
        RunReader(folder).read()
    assert "\n" not in str(raised.value)
