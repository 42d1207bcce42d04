"""Peaks of memory by phase, of the test's own process."""

import numpy as np

from streamrl.engines.peak_memory import PeakMemory

MB = 1 << 20


def test_a_peak_belongs_to_the_phase_it_was_reached_in() -> None:
    memory = PeakMemory()
    memory.ends("before")
    held = np.ones(100 * MB // 8)
    del held
    memory.ends("large")
    memory.ends("small")
    peaks = memory.drain()
    assert 90 < peaks["large"] - peaks["small"] < 110
    assert memory.drain() == {}


def test_of_two_stretches_of_a_phase_the_larger_counts() -> None:
    memory = PeakMemory()
    for num_mb in (60, 0):
        memory.ends("between")
        held = np.ones(num_mb * MB // 8)
        del held
        memory.ends("train")
    peaks = memory.drain()
    assert peaks["train"] >= peaks["between"] + 50
