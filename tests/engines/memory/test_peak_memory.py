"""Peak memory by phase, of the test's own process."""

import subprocess
import sys

import numpy as np
import pytest

from streamrl.engines.memory.peak_memory import PeakMemoryTracker

MB = 1 << 20


def test_a_peak_is_attributed_to_its_phase():
    memory = PeakMemoryTracker()
    memory.record_phase("before")
    block = np.ones(100 * MB // 8)
    del block
    memory.record_phase("large")
    memory.record_phase("small")
    peaks = memory.drain_peaks()
    assert 90 < peaks["large"] - peaks["small"] < 110
    assert memory.drain_peaks() == {}


def test_a_repeated_phase_reports_its_larger_peak():
    memory = PeakMemoryTracker()
    for num_mb in (60, 0):
        memory.record_phase("between")
        block = np.ones(num_mb * MB // 8)
        del block
        memory.record_phase("train")
    peaks = memory.drain_peaks()
    assert peaks["train"] >= peaks["between"] + 50


FREED = """
import contextlib
import sys
import torch
from streamrl.engines.memory.peak_memory import (
    PROC_STATUS, keep_heap_compact, release_large_blocks_eagerly
)

def allocate():
    global last
    for _ in range(2):
        # The second time the allocator has learned of the first.
        held = [torch.ones(8 << 18) for _ in range(20)]
        last = [torch.ones(1 << 10) for _ in range(2000)]
        del held

if "eager" in sys.argv[1]:
    release_large_blocks_eagerly()
with keep_heap_compact() if "compact" in sys.argv[1] else contextlib.nullcontext():
    if "after" not in sys.argv[1]:
        allocate()
if "after" in sys.argv[1]:
    allocate()
status = PROC_STATUS.read_text().splitlines()
print(next(line for line in status if line.startswith("VmRSS")).split()[1])
"""


@pytest.mark.slow
def test_large_blocks_are_returned_when_freed():
    def measure_resident_mb(how: str) -> int:
        words = [sys.executable, "-c", FREED, how]
        return int(subprocess.run(words, capture_output=True, check=True).stdout) // 1024

    default = measure_resident_mb("default")
    for how in ("eager", "compact", "after eager compact"):
        assert default - measure_resident_mb(how) > 100
    assert measure_resident_mb("after compact") > default - 50
