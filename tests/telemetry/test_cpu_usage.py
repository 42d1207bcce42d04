"""Cores that are busy: counted from what processes say they have taken of them."""

import math
import time

import pytest

from streamrl.telemetry.cpu_usage import CoreMeter, read_machine_time, read_process_time


def test_cores_are_seconds_taken_over_seconds_passed():
    meter = CoreMeter()
    assert math.isnan(meter.measure_cores({"a": 5.0, "b": 1.0}, now=10.0))
    assert meter.measure_cores({"a": 6.0, "b": 1.5}, now=12.0) == pytest.approx(0.75)
    assert meter.measure_cores({"a": 6.0, "b": 1.5}, now=14.0) == 0.0


def test_who_comes_or_begins_anew_counts_from_then_on():
    meter = CoreMeter()
    meter.measure_cores({"a": 50.0}, now=0.0)
    assert meter.measure_cores({"a": 2.0, "b": 7.0}, now=1.0) == 0.0
    assert meter.measure_cores({"a": 2.5, "b": 8.0}, now=2.0) == pytest.approx(1.5)
    assert meter.measure_cores({"b": 8.5}, now=3.0) == pytest.approx(0.5)


def test_no_time_is_no_measurement():
    meter = CoreMeter()
    meter.measure_cores({"a": 1.0}, now=1.0)
    assert math.isnan(meter.measure_cores({"a": 2.0}, now=1.0))


def test_work_of_this_process_is_in_its_own_time_and_in_that_of_the_machine():
    (own,), (whole,) = read_process_time().values(), read_machine_time().values()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    (then,), (whole_then,) = read_process_time().values(), read_machine_time().values()
    assert then - own >= 0.2
    assert whole_then - whole >= 0.15
    assert read_process_time().keys() != read_machine_time().keys()
