"""Number of busy cores from CPU seconds of processes."""

import math
import time

import pytest

from streamrl.telemetry.cpu_usage import CoreMeter, read_machine_time, read_process_time


def test_cores_are_cpu_seconds_over_elapsed_seconds():
    meter = CoreMeter()
    assert math.isnan(meter.measure_cores({"a": 5.0, "b": 1.0}, now=10.0))
    assert meter.measure_cores({"a": 6.0, "b": 1.5}, now=12.0) == pytest.approx(0.75)
    assert meter.measure_cores({"a": 6.0, "b": 1.5}, now=14.0) == 0.0


def test_new_and_restarted_processes_count_from_the_second_measurement():
    meter = CoreMeter()
    meter.measure_cores({"a": 50.0}, now=0.0)
    assert meter.measure_cores({"a": 2.0, "b": 7.0}, now=1.0) == 0.0
    assert meter.measure_cores({"a": 2.5, "b": 8.0}, now=2.0) == pytest.approx(1.5)
    assert meter.measure_cores({"b": 8.5}, now=3.0) == pytest.approx(0.5)


def test_no_elapsed_time_gives_nan():
    meter = CoreMeter()
    meter.measure_cores({"a": 1.0}, now=1.0)
    assert math.isnan(meter.measure_cores({"a": 2.0}, now=1.0))


def test_cpu_work_counts_for_process_and_machine():
    (process_before,), (machine_before,) = (
        read_process_time().values(),
        read_machine_time().values(),
    )
    deadline = time.process_time() + 0.2
    while time.process_time() < deadline:
        pass
    (process_after,), (machine_after,) = read_process_time().values(), read_machine_time().values()
    assert process_after - process_before >= 0.2
    assert machine_after - machine_before >= 0.15
    assert read_process_time().keys() != read_machine_time().keys()
