"""Segments of the shared memory transport: a file each, whose header and lock guard a bucket.

A segment's bytes follow the header in the file, or are a tensor on a device that other processes
open. While a reader holds the lock, the publisher does not write.
"""

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from streamrl.distributed.devices import (
    GPU,
    get_gpu_uuid,
    get_local_device,
    pin_host_memory,
    synchronize_stream,
    unpin_host_memory,
)
from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.bucket_memory import has_device_room, lend_tensor
from streamrl.weights.manifest import BucketMemory

HEADER_BYTES = mmap.PAGESIZE
_HEADER_STRUCT = struct.Struct("<qq")  # version, bucket
UNCOMMITTED_HEADER = (-1, -1)
_TENSORS_IN_USE: list[Tensor] = []
"""Tensors of closed publishers that readers still used: they live as long as the process."""
DEVICE_ARGUMENT = 6
"""Argument of torch's `rebuild_cuda_tensor` that is the index of the GPU."""


@dataclass(frozen=True)
class SharedTensor:
    """Tensor uint8 [n] that other processes of the machine open. Picklable.

    rebuild, arguments: function that opens it, and its arguments. gpu: UUID of its GPU; empty on a
    CPU, where it lies in a file.
    """

    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    gpu: str = ""

    def open(self) -> Tensor:
        """Open the tensor, once per process: torch counts each opening.

        Raises WeightsError if this process computes on another GPU.
        """
        if not self.gpu:
            return self.rebuild(*self.arguments)
        if self.gpu != get_gpu_uuid():
            raise WeightsError(
                f"weights.on_device=true: the publisher uses GPU {self.gpu}, this process"
                f" {get_gpu_uuid()}: shared memory on a device needs processes that share a GPU"
            )
        # Processes may number the GPU differently.
        arguments = list(self.arguments)
        arguments[DEVICE_ARGUMENT] = get_local_device().index
        return self.rebuild(*arguments)


@dataclass(frozen=True)
class SegmentHandle:
    """File that guards a bucket; valid while the file's header has this version and bucket index.

    tensor: memory of the bucket on a device; None if the file holds it.
    """

    path: str
    version: int
    bucket: int
    tensor: SharedTensor | None = None


class SharedMemorySegment:
    """Publisher's file in /dev/shm and its memory mapping: a header page, then `capacity_bytes`.

    The publisher holds the file's lock while writing. The file is sparse and only `reserved_bytes`
    are backed by memory: writing beyond them may kill the process with SIGBUS.
    """

    tensor: SharedTensor | None = None

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity_bytes = capacity
        self.reserved_bytes = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.ftruncate(self._fd, HEADER_BYTES + capacity)
        self._mapping: mmap.mmap | None = None
        self._pinned_address: int | None = None

    def reserve_memory(self, num_bytes: int) -> None:
        """Reserve memory for the header and `num_bytes`, map the file, and pin what is reserved.

        Raises OSError if memory is short.
        """
        if self._mapping is None:
            self._mapping = mmap.mmap(self._fd, HEADER_BYTES + self.capacity_bytes)
        if num_bytes > self.reserved_bytes or not self.reserved_bytes:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + num_bytes)
            self.reserved_bytes = num_bytes
            self._unpin()
            pinned_bytes = HEADER_BYTES + min(num_bytes, self.capacity_bytes)
            address = np.frombuffer(self._mapping, np.uint8).ctypes.data
            self._pinned_address = address if pin_host_memory(address, pinned_bytes) else None

    def view_bytes(self, num_bytes: int) -> BucketMemory:
        """Return the first `num_bytes` of the bucket's memory as a writable uint8 view."""
        assert self._mapping is not None
        return np.frombuffer(self._mapping, np.uint8, num_bytes, HEADER_BYTES)

    def write_header(self, version: int, bucket: int) -> None:
        assert self._mapping is not None
        _HEADER_STRUCT.pack_into(self._mapping, 0, version, bucket)

    def try_lock(self) -> bool:
        """Lock the segment and return True if it has no readers, else return False.

        Readers cannot map the segment until `unlock`.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let readers map the segment."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def unlink_file(self) -> None:
        """Unlink the file; current readers keep their mappings."""
        self.path.unlink(missing_ok=True)
        # Closing releases the lock, so unlink first. The mapping lives as long as its arrays.
        os.close(self._fd)
        self._unpin()
        self._mapping = None

    def _unpin(self) -> None:
        if self._pinned_address is not None:
            unpin_host_memory(self._pinned_address)
            self._pinned_address = None


class DeviceSegment(SharedMemorySegment):
    """Segment whose bytes are a tensor on a device. Its `reserved_bytes` are those of the tensor.

    On a GPU the file has no more than the header. On a CPU the tensor is the rest of the file.
    """

    def __init__(self, path: Path, capacity: int, device: torch.device) -> None:
        super().__init__(path, capacity)
        self._device = device
        self._memory: Tensor | None = None

    def reserve_memory(self, num_bytes: int) -> None:
        """Allocate the tensor. Raises OSError or OutOfMemoryError if memory is short."""
        is_on_gpu = self._device.type == GPU
        super().reserve_memory(0 if is_on_gpu else num_bytes)
        if self._memory is not None:
            return
        if is_on_gpu:
            if not has_device_room(num_bytes):
                raise OSError(errno.ENOMEM, "the GPU has no room for another bucket")
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            rebuild, arguments = reduce_tensor(self._memory)
            self.tensor = SharedTensor(rebuild, arguments, get_gpu_uuid())
        else:
            self.tensor = SharedTensor(map_file_tensor, (str(self.path), self.capacity_bytes))
            self._memory = self.tensor.open()
        self.reserved_bytes = num_bytes

    def view_bytes(self, num_bytes: int) -> Tensor:
        assert self._memory is not None
        return self._memory[:num_bytes]

    def unlock(self) -> None:
        """Wait until the bucket has been written, and let readers open the segment."""
        synchronize_stream()
        super().unlock()

    def unlink_file(self) -> None:
        """Unlink the file and free the tensor, unless a reader still uses it."""
        if self._memory is not None and not self.try_lock():
            _TENSORS_IN_USE.append(self._memory)
        super().unlink_file()
        self._memory = None


def map_file_tensor(path: str, num_bytes: int) -> Tensor:
    """Return the bytes of a segment's file as a tensor on the CPU, uint8 [num_bytes]."""
    size = HEADER_BYTES + num_bytes
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)[HEADER_BYTES:]


def map_segment(handle: SegmentHandle, num_bytes: int, name: str) -> Array:
    """Map the bucket of a handle: uint8 [num_bytes], read-only, locked while the array lives.

    `name` names the model in errors. Raises WeightsError if the segment is gone or reused.
    """
    mapping = _lock_segment(handle, num_bytes, name)
    return np.frombuffer(mapping, np.uint8, num_bytes, HEADER_BYTES)


def open_segment(
    handle: SegmentHandle, opened: dict[str, Tensor], num_bytes: int, name: str
) -> Tensor:
    """Return the bucket of a handle with a tensor, locked while the result or a view of it lives.

    The result is uint8 [num_bytes] on the tensor's device. opened: tensors by the segment's path,
    to which a tensor that was not open yet is added. Raises WeightsError as `map_segment` does, or
    if the tensor cannot be opened.
    """
    mapping = _lock_segment(handle, 0, name)
    assert handle.tensor is not None
    try:
        if handle.path not in opened:
            opened[handle.path] = handle.tensor.open()
    except RuntimeError as error:
        raise WeightsError(f"{_locate(handle, name)}: cannot be opened: {error}") from error
    return lend_tensor(opened[handle.path][:num_bytes], mapping)


def _lock_segment(handle: SegmentHandle, num_bytes: int, name: str) -> mmap.mmap:
    """Map header and bucket of a segment; the mapping holds the lock. Raises as `map_segment`."""
    location = _locate(handle, name)
    try:
        fd = os.open(handle.path, os.O_RDONLY)
    except OSError as error:
        raise WeightsError(f"{location}: gone, {handle.path}: {error.strerror}") from error
    try:
        # mmap duplicates the descriptor, which keeps the lock for the mapping's lifetime.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mapping = mmap.mmap(fd, HEADER_BYTES + num_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{location}: gone, {handle.path} is being overwritten") from error
    finally:
        os.close(fd)
    header = _HEADER_STRUCT.unpack_from(mapping)
    if header != (handle.version, handle.bucket):
        raise WeightsError(
            f"{location}: gone, {handle.path} holds version {header[0]}, bucket {header[1]}"
        )
    return mapping


def _locate(handle: SegmentHandle, name: str) -> str:
    return f"weights of {name} version {handle.version}, bucket {handle.bucket}"
