"""The peaks of this process's memory, by phase: of its GPU where there is one, else main memory.

Whoever holds a handle of an actor loads its class, and this with it: torch is not for all of them.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

MB = 1 << 20
PROC_STATUS, PROC_CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK_COMMAND = "5"
"""What has the kernel begin a new peak of resident memory."""
MMAP_THRESHOLD = -3
"""The C library's M_MMAP_THRESHOLD: blocks from this size on are mapped apart."""
LARGE_BLOCK_BYTES = 1 << 20


def release_large_blocks_eagerly() -> None:
    """From now on give the system what is large as soon as it is freed.

    Otherwise the allocator learns to keep tensors of up to 32 MB for the next ones: of gradients
    that are freed before an update most would still count while it is made. Memory that is new
    each time costs time.
    """
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def release_freed_memory() -> None:
    """Give the system what was freed; the allocator keeps what is smaller than it maps apart.

    On a GPU torch's allocator keeps all of it, and vLLM's would find none for keys and values.
    """
    import torch

    ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class PeakMemoryTracker:
    """What was held at most, MB, in each of the phases that follow each other.

    On a CPU that is all the process has in memory, libraries and shared memory too. Where the
    kernel begins no new peaks, a phase's is that of the process so far.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}
        _read_and_reset_peak()

    def record_phase(self, phase: str) -> None:
        """What was held since the last call was held in this phase."""
        self._peaks[phase] = max(self._peaks.get(phase, 0.0), _read_and_reset_peak() / MB)

    def drain_peaks(self) -> dict[str, float]:
        """The peaks since the last call, by phase."""
        found, self._peaks = self._peaks, {}
        return found


def _read_and_reset_peak() -> int:
    """Largest memory since the last call, bytes."""
    import torch

    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    lines = PROC_STATUS.read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10
    with suppress(OSError):
        PROC_CLEAR_REFS.write_text(RESET_PEAK_COMMAND)
    return peak
