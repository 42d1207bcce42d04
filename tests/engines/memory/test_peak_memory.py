"""Peak memory by phase, of the test's own process."""

import json
import subprocess
import sys

import pytest

PHASES = """
import json
import numpy as np
from streamrl.engines.memory.peak_memory import PeakMemoryTracker

def allocate(num_mb):
    np.ones(num_mb << 17)

memory = PeakMemoryTracker()
memory.record_phase("before")
allocate(100)
memory.record_phase("large")
memory.record_phase("small")
peaks = [memory.drain_peaks(), memory.drain_peaks()]
for num_mb in (60, 0):
    memory.record_phase("between")
    allocate(num_mb)
    memory.record_phase("train")
print(json.dumps([*peaks, memory.drain_peaks()]))
"""


def test_a_peak_is_attributed_to_its_phase_and_the_larger_one_kept():
    # The heap of pytest's process may have room for the blocks.
    done = subprocess.run(
        [sys.executable, "-c", PHASES], capture_output=True, text=True, timeout=120, check=True
    )
    first, drained, repeated = json.loads(done.stdout)
    assert 90 < first["large"] - first["small"] < 110 and drained == {}
    assert repeated["train"] >= repeated["between"] + 50


FREED = """
import contextlib, sys
import psutil, torch
from streamrl.engines.memory.peak_memory import keep_heap_compact, release_large_blocks_eagerly

def allocate():
    global last
    for _ in range(2):
        # The second time the allocator has learned of the first.
        held = [torch.ones(8 << 18) for _ in range(20)]
        last = [torch.ones(1 << 10) for _ in range(2000)]
        del held

if "eager" in sys.argv:
    release_large_blocks_eagerly()
with keep_heap_compact() if "compact" in sys.argv else contextlib.nullcontext():
    if "after" not in sys.argv:
        allocate()
if "after" in sys.argv:
    allocate()
print(psutil.Process().memory_info().rss >> 20)
"""


@pytest.mark.slow
def test_large_blocks_are_returned_when_freed():
    def measure_resident_mb(*how: str) -> int:
        words = [sys.executable, "-c", FREED, *how]
        return int(subprocess.run(words, capture_output=True, check=True).stdout)

    default = measure_resident_mb()
    for how in (["eager"], ["compact"], ["eager", "compact", "after"]):
        assert default - measure_resident_mb(*how) > 100
    assert measure_resident_mb("compact", "after") > default - 50
