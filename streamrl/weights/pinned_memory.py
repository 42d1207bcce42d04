"""Pinned host memory, which a GPU reads and writes several times as fast as other memory.

Without a GPU it is ordinary memory.
"""

import mmap
import os
import weakref
from typing import Any

import numpy as np
import torch

from streamrl.distributed.devices import has_local_gpu, pin_host_memory, unpin_host_memory
from streamrl.messages import Array


def allocate_pinned(num_bytes: int) -> Array:
    """Return uint8 [num_bytes] of any contents; pinned if the process has a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_local_gpu()).numpy()


class PinnedFile:
    """Pinned mapping of the first bytes of a file; unpinned when the last view is gone."""

    def __init__(self, path: str, num_bytes: int) -> None:
        with open(path, "r+b") as file:
            # Writable, although only read: CUDA pins other mappings on some systems only.
            mapping = mmap.mmap(file.fileno(), num_bytes)
        self.memory = np.frombuffer(mapping, np.uint8)
        address = self.memory.ctypes.data
        if pin_host_memory(address, num_bytes):
            weakref.finalize(self, unpin_host_memory, address)


class PinnedFiles:
    """Pinned mappings of files by path, kept because pinning takes as long as a copy."""

    def __init__(self) -> None:
        self._files: dict[str, PinnedFile] = {}

    def view_range(self, path: str, start: int, num_bytes: int, lock: Array) -> Array:
        """Return bytes of a file from `start` on: uint8 [num_bytes], read-only and pinned.

        The array keeps its memory pinned, and keeps the array `lock` alive.
        """
        file = self._files.get(path)
        if file is None or file.memory.nbytes < start + num_bytes:
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
