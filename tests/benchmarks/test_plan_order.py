"""The planner's order against measured runs: devices that are shares of a core, and two orders."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.core_shares import CoreShares, DeviceClock
from benchmarks.plan_order import compare_orders

CPU_S = 0.01


def compute() -> float:
    """Compute for CPU_S on this thread; return how long it did."""
    start_s = time.thread_time()
    while time.thread_time() < start_s + CPU_S:
        pass
    return time.thread_time() - start_s


def test_calls_of_a_device_take_turns_and_the_time_of_its_share(tmp_path: Path):
    engines = CoreShares(0.5, tmp_path / "devices")
    engines.make_devices(1)
    clock = DeviceClock(tmp_path / "devices" / "0", engines.share)
    start_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        cpu_s = list(pool.map(lambda _: clock.run(compute), range(4)))
    assert time.monotonic() - start_s >= sum(cpu_s) / engines.share
    _, busy_s, _ = DeviceClock.FORMAT.unpack(clock.path.read_bytes())
    assert busy_s >= sum(cpu_s) / engines.share


def test_the_loss_is_that_of_the_planners_first_and_overlapping_runs_are_ties():
    simulated: dict[str, Any] = {
        name: {"step_s": seconds, "idle": {"train": 0.5}}
        for name, seconds in {"a": 1.0, "b": 2.0, "c": 3.0}.items()
    }
    steps = {"a": (2.4, 2.6), "b": (1.9, 2.1), "c": (2.0, 2.2)}
    runs = {
        name: [{"step_s": s, "idle": {"train": 0.25}, "late": 0.0} for s in seconds]
        for name, seconds in steps.items()
    }
    result = compare_orders(simulated, runs)
    assert result["orders"] == {"planner": ["a", "b", "c"], "measured": ["b", "c", "a"]}
    assert result["loss"] == pytest.approx(2.5 / 2.0 - 1)
    assert result["spearman"] == pytest.approx(-0.5)
    assert result["kendall"] == pytest.approx(-1 / 3)
    assert result["ties"] == [["b", "c"]]
    assert result["inverted"] == [["b", "a"], ["c", "a"]]
    assert result["placements"]["a"]["spread"] == pytest.approx(0.2 / 2.5)
