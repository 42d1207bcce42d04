"""Pinned host memory, which a GPU reads and writes several times as fast as other memory.

Without a GPU it is ordinary memory. torch's allocator of pinned memory is not used: it rounds each
block up to a power of two, so that the copy of a model takes up to twice its size.
"""

import mmap
import os
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.distributed.devices import has_local_gpu, pin_host_memory, unpin_host_memory
from streamrl.messages import Array

FREE_BLOCKS: defaultdict[tuple[int, bool, int], list[mmap.mmap]] = defaultdict(list)
"""Pinned memory whose arrays are gone, by size in bytes, whether it is shared, and rank. It is
kept, because pinning takes as long as a copy, and versions of a model need the same sizes again."""


def allocate_pinned(num_bytes: int, *, is_shared: bool = False, rank: int = 0) -> Array:
    """Return uint8 [num_bytes] of any contents; pinned if the process has a GPU and can pin it.

    Takes the exact size, and a free block of this size first. is_shared: other processes can map
    the memory (`share_tensors`). rank: takes the blocks of this rank, whose process alone has to
    pin them, too. Raises RuntimeError, as torch does, if memory is short.
    """
    if not (is_shared or has_local_gpu()):
        return torch.empty(num_bytes, dtype=torch.uint8).numpy()
    free_blocks = FREE_BLOCKS[num_bytes, is_shared, rank]
    try:
        block = free_blocks.pop()
    except IndexError:
        block = _map_block(num_bytes, is_shared=is_shared)
        if not pin_host_memory(_get_address(block), len(block)):
            return np.frombuffer(block, np.uint8, num_bytes)
    memory = np.frombuffer(block, np.uint8, num_bytes)
    weakref.finalize(memory, free_blocks.append, block).atexit = False
    return memory


def copy_to_pinned(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor in the memory of `allocate_pinned`."""
    memory = torch.from_numpy(allocate_pinned(tensor.nbytes))
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _get_address(block: mmap.mmap) -> int:
    return int(np.frombuffer(block, np.uint8).ctypes.data)


def _map_block(num_bytes: int, *, is_shared: bool) -> mmap.mmap:
    """Map memory that a GPU may use, of an anonymous file if it is shared."""
    try:
        if is_shared:
            with os.fdopen(os.memfd_create("buffer"), "r+b") as file:
                file.truncate(max(num_bytes, 1))
                return mmap.mmap(file.fileno(), max(num_bytes, 1))  # which keeps the file open
        block = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise RuntimeError(f"{num_bytes} bytes of host memory: {error.strerror}") from error
    # A fork would let the process write to a copy of a page while the GPU uses the first.
    block.madvise(mmap.MADV_DONTFORK)
    return block


class PinnedFile:
    """Pinned mapping of the first bytes of a file; unpinned when the last view is gone."""

    def __init__(self, path: str, num_bytes: int) -> None:
        with open(path, "r+b") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            # Writable, although only read: CUDA pins other mappings on some systems only.
            mapping = mmap.mmap(file.fileno(), num_bytes)
        self.memory = np.frombuffer(mapping, np.uint8)
        address = self.memory.ctypes.data
        if pin_host_memory(address, num_bytes):
            weakref.finalize(self, unpin_host_memory, address).atexit = False


class PinnedFiles:
    """Pinned mappings of files by path, kept because pinning takes as long as a copy."""

    def __init__(self) -> None:
        self._files: dict[str, PinnedFile] = {}

    def view_range(self, path: str, start: int, num_bytes: int, lock: Array) -> Array:
        """Return bytes of a file from `start` on: uint8 [num_bytes], read-only and pinned.

        The array keeps its memory pinned, and keeps the array `lock` alive.
        """
        file = self._files.get(path)
        is_known = file is not None and file.inode == os.stat(path).st_ino
        if file is None or not is_known or file.memory.nbytes < start + num_bytes:
            file = self._files[path] = PinnedFile(path, start + num_bytes)
        return np.asarray(_OwnedView(file.memory[start : start + num_bytes], (file, lock)))

    def drop_removed(self) -> None:
        """Drop files that no longer exist, once no array views them."""
        for path in [path for path in self._files if not os.path.exists(path)]:
            del self._files[path]

    def close(self) -> None:
        """Drop all files, once no array views them."""
        self._files.clear()


class _OwnedView:
    """Read-only memory for numpy, whose arrays keep `owners` alive."""

    def __init__(self, view: Array, owners: tuple[Any, ...]) -> None:
        self.owners = owners
        interface = dict(view.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], True)}
