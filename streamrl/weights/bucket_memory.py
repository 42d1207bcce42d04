"""Memory of buckets, a numpy array on the host or a torch tensor on a device, and its checksums.

XXH3 hashes host memory only. Bytes of a device have a polynomial checksum, which the device
computes and the host can repeat: the sum of the bucket's 32-bit words, each times its own power of
k, modulo 2^64. As k = 5 modulo 8, a changed word always changes the sum, and so do two swapped
words that differ, in buckets of up to 4 GB.
"""

import contextlib
import weakref

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from streamrl.distributed.devices import (
    count_cache_releases,
    measure_gpu_memory,
    synchronize_device,
)
from streamrl.messages import Array
from streamrl.weights.manifest import BucketMemory, compute_checksum
from streamrl.weights.pinned_memory import allocate_pinned

DEVICE_CHECKSUM_PREFIX = "poly-"
"""Beginning of checksums that a device has computed."""
CHECKSUM_BASE = 0xD1342543DE82EF95
"""k of the polynomial; 5 modulo 8. Source: Steele and Vigna, arXiv 2001.05304."""
CHECKSUM_CHUNK_WORDS = 1 << 21
"""Words per step, whose temporaries take 16 bytes per word."""
WORD_BYTES = 4
RESERVED_SHARE = 0.05
"""Share of a GPU's memory that versions of the weights leave free, for whatever grows meanwhile."""


class StagingDevice:
    """Device for the buffers of one version at a time, used for versions that it has room for.

    The buffers of a version must be freed before the next one: their memory, which torch caches,
    counts as free until torch returns its cache. Without a `device` all versions are on the host.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._cached_bytes = self._num_releases = 0

    def choose_device(self, num_bytes: int) -> torch.device | None:
        """Return the device for the buffers of a version of `num_bytes`; None if it has no room."""
        if self._device is None:
            return None
        if (num_releases := count_cache_releases()) != self._num_releases:
            # Others have the memory of the earlier versions now.
            self._cached_bytes, self._num_releases = 0, num_releases
        if not has_device_room(num_bytes - self._cached_bytes):
            return None
        self._cached_bytes = max(self._cached_bytes, num_bytes)
        return self._device


def has_device_room(num_bytes: int) -> bool:
    """Return whether the GPU keeps its reserve with `num_bytes` more; always True without a GPU."""
    memory = measure_gpu_memory()
    return memory is None or memory[0] - num_bytes >= RESERVED_SHARE * memory[1]


def allocate_staging(num_bytes: int, device: torch.device | None) -> BucketMemory:
    """Return uint8 [num_bytes] of any contents: on the device if it has memory, else pinned."""
    if device is not None:
        with contextlib.suppress(torch.OutOfMemoryError):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return allocate_pinned(num_bytes)


def as_tensor(memory: BucketMemory) -> Tensor:
    """Return the memory as a tensor, without a copy; an array may be read-only.

    Uses DLPack because torch.from_numpy warns about read-only arrays.
    """
    return memory if isinstance(memory, Tensor) else torch.from_dlpack(memory)


def copy_to_host(memory: BucketMemory) -> Array:
    """Return the memory as an array; copies what is on a device."""
    return memory.cpu().numpy() if isinstance(memory, Tensor) else memory


def lend_tensor(tensor: Tensor, *owners: object) -> Tensor:
    """Return a view of `tensor` that, like all views of it, keeps the tensor and `owners` alive.

    They are released once the GPU has finished the work queued by then, which may still read them.
    """
    # DLPack makes another storage for the same memory, which all views of the result share.
    lent = torch.from_dlpack(tensor)
    release = weakref.finalize(lent.untyped_storage(), _wait_for_device, tensor, owners)
    release.atexit = False
    return lent


def _wait_for_device(tensor: Tensor, owners: tuple[object, ...]) -> None:
    synchronize_device()


def compute_checksum_like(checksum: str, data: BucketMemory) -> str:
    """Return the checksum of `data`, of the kind of `checksum`."""
    if checksum.startswith(DEVICE_CHECKSUM_PREFIX):
        return compute_device_checksum(as_tensor(data))
    return compute_checksum(copy_to_host(data))


def compute_device_checksum(data: Tensor) -> str:
    """Return the polynomial checksum of `data`, uint8 [n], with its prefix.

    One number is copied to the host, which waits for what the device was writing to `data`.
    """
    powers = torch.full(
        (min(CHECKSUM_CHUNK_WORDS, -(-data.numel() // WORD_BYTES)),),
        _to_int64(CHECKSUM_BASE),
        dtype=torch.int64,
        device=data.device,
    ).cumprod(0)
    chunk_power = _to_int64(pow(CHECKSUM_BASE, CHECKSUM_CHUNK_WORDS, 1 << 64))
    total = powers.new_zeros(())
    for piece in data.split(CHECKSUM_CHUNK_WORDS * WORD_BYTES):
        missing = -piece.numel() % WORD_BYTES
        words = (functional.pad(piece, (0, missing)) if missing else piece).view(torch.int32)
        total = total * chunk_power + (words * powers[: len(words)]).sum()
    return f"{DEVICE_CHECKSUM_PREFIX}{(int(total) + data.numel()) % (1 << 64):016x}"


def _to_int64(number: int) -> int:
    """Return the signed 64-bit integer with the bits of an unsigned one."""
    return int(np.uint64(number).astype(np.int64))
