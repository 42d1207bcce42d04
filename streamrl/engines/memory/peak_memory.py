"""Peak memory of this process by phase: GPU memory if the process has a GPU, else resident memory.

Does not import torch: processes that only hold an actor's handle import this module as well.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamrl.distributed.devices import drain_peak_gpu_bytes, release_cached_gpu_memory

MB = 1 << 20
PROC_STATUS, PROC_CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK_COMMAND = "5"
"""Value for /proc/self/clear_refs that resets VmHWM; see proc(5)."""
MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD option of mallopt(3): size from which blocks are mapped separately."""
TRIM_THRESHOLD = -1
"""glibc's M_TRIM_THRESHOLD option: free bytes at the heap's end that malloc keeps."""
LARGE_BLOCK_BYTES = 1 << 20
MAX_KEPT_BLOCK_BYTES = 32 << 20
"""Value to which glibc raises its mmap threshold by itself; its trim threshold is twice that."""

_is_always_eager = False


def release_large_blocks_eagerly() -> None:
    """Make malloc return freed blocks of 1 MB and more to the operating system at once.

    By default glibc raises this threshold up to 32 MB, so gradients freed before an update would
    still count as resident memory during the update. The price is page faults on every large
    allocation: a training step of a small model takes 1.5 times as much CPU time.
    """
    global _is_always_eager
    _is_always_eager = True
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


@contextmanager
def keep_heap_compact() -> Iterator[None]:
    """Return large blocks eagerly within the context, where tensors pass through once.

    Otherwise shards that are allocated between whole tensors leave holes as large as the model in
    the heap.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    try:
        yield
    finally:
        if not _is_always_eager:
            libc.mallopt(MMAP_THRESHOLD, MAX_KEPT_BLOCK_BYTES)
            libc.mallopt(TRIM_THRESHOLD, 2 * MAX_KEPT_BLOCK_BYTES)


def release_freed_memory() -> None:
    """Return freed memory from the allocators of C and torch to the operating system or the GPU.

    torch's CUDA allocator caches all freed memory, which vLLM then lacks for the KV cache.
    """
    ctypes.CDLL(None).malloc_trim(0)
    release_cached_gpu_memory()


class PeakMemoryTracker:
    """Records the peak memory of this process, MB, in each of several consecutive phases.

    On a CPU the peak is the process's resident memory, libraries and shared memory included. If the
    kernel cannot reset the peak, a phase reports the peak since the process started.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}
        _read_and_reset_peak()

    def record_phase(self, phase: str) -> None:
        """Record the peak memory since the last call (or the start) as that of `phase`.

        If a phase occurs several times, its highest peak counts.
        """
        self._peaks[phase] = max(self._peaks.get(phase, 0.0), _read_and_reset_peak() / MB)

    def drain_peaks(self) -> dict[str, float]:
        """Return the recorded peaks, MB by phase, and forget them."""
        peaks, self._peaks = self._peaks, {}
        return peaks


def _read_and_reset_peak() -> int:
    gpu_peak = drain_peak_gpu_bytes()
    if gpu_peak is not None:
        return gpu_peak
    lines = PROC_STATUS.read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10
    with suppress(OSError):
        PROC_CLEAR_REFS.write_text(RESET_PEAK_COMMAND)
    return peak
