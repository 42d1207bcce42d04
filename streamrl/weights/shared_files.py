"""Tensors that other processes of a node map: their place in files, without a copy where possible.

All transports deliver a version in shared memory: segments in /dev/shm, Ray's object store, or the
buffers of a broadcast. Their files may have no name any more; then /proc leads to a descriptor, of
this process or of Ray's object store (raylet). Any other tensor is written to an anonymous file
(memfd) first, which the kernel frees with its last user, even after a kill.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from streamrl.distributed.devices import has_local_gpu
from streamrl.messages import Array
from streamrl.weights.parameters import as_tensor
from streamrl.weights.pinned_memory import PinnedFiles

ALIGNMENT_BYTES = 64
MAPS_FIELDS = 6
"""Fields of a line of /proc/self/maps that names a file."""
OBJECT_STORE_PROCESS = "raylet"
OpenFiles = Mapping[tuple[int, int], tuple[str, bool]]
"""Path of open files by device and inode, and whether the file is this process's own."""


@dataclass(frozen=True)
class TensorFile:
    """Place of a contiguous tensor in a file; `offset` in bytes.

    is_reused: later versions lie in the same memory, so that it pays to pin it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str
    offset: int
    is_reused: bool

    @property
    def end(self) -> int:
        """First byte after the tensor."""
        return self.offset + self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class FileMapping:
    """Shared mapping of a file: addresses, offset in the file, name, device and inode."""

    start: int
    end: int
    offset: int
    name: str
    device: int
    inode: int


@contextmanager
def share_tensors(tensors: Mapping[str, Tensor]) -> Iterator[Sequence[TensorFile]]:
    """Yield the files of tensors, valid within the context; names of one tensor share its bytes."""
    mappings = list(_iter_shared_mappings())
    open_files = cache(_list_open_files)
    copies: dict[int, int] = {}
    with os.fdopen(os.memfd_create("weights"), "wb") as out:
        copy_path, files = f"/proc/{os.getpid()}/fd/{out.fileno()}", []
        for name, tensor in tensors.items():
            address = tensor.data_ptr()
            mapping = _find_mapping(tensor, mappings)
            path, is_reused = _find_path(mapping, open_files) if mapping else (None, False)
            if mapping is not None and path is not None:
                offset = mapping.offset + address - mapping.start
            else:
                if address not in copies:
                    out.seek(-out.tell() % ALIGNMENT_BYTES, os.SEEK_CUR)
                    copies[address] = out.tell()
                    flat = tensor.detach().cpu().contiguous().flatten()
                    out.write(flat.view(torch.uint8).numpy().data)
                path, offset = copy_path, copies[address]
            files.append(
                TensorFile(name, tensor.dtype, tuple(tensor.shape), path, offset, is_reused)
            )
        out.flush()
        yield files


def _find_mapping(tensor: Tensor, mappings: Sequence[FileMapping]) -> FileMapping | None:
    """Return the mapping in which a contiguous tensor lies; `mappings` are sorted."""
    address = tensor.data_ptr()
    index = bisect_right(mappings, address, key=lambda mapping: mapping.start) - 1
    if index < 0 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return mappings[index] if address + tensor.nbytes <= mappings[index].end else None


def _iter_shared_mappings() -> Iterator[FileMapping]:
    """Yield this process's shared mappings of files, by address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(None, MAPS_FIELDS - 1)
            if len(fields) < MAPS_FIELDS or "s" not in fields[1]:
                continue
            start, end = (int(text, 16) for text in fields[0].split("-"))
            device = os.makedev(*(int(text, 16) for text in fields[3].split(":")))
            yield FileMapping(start, end, int(fields[2], 16), fields[5], device, int(fields[4]))


def _find_path(
    mapping: FileMapping, list_open_files: Callable[[], OpenFiles]
) -> tuple[str | None, bool]:
    """Return a path to the file of a mapping, if any, and whether later versions reuse the file.

    The name of a removed file, which ends with " (deleted)", leads nowhere.
    """
    if os.path.exists(mapping.name):
        return mapping.name, True
    return list_open_files().get((mapping.device, mapping.inode), (None, False))


def _list_open_files() -> OpenFiles:
    """Return the files that this process or Ray's object store has open."""
    own, processes = os.getpid(), psutil.process_iter(["name"])
    stores = [p.pid for p in processes if p.info["name"] == OBJECT_STORE_PROCESS]
    files: dict[tuple[int, int], tuple[str, bool]] = {}
    for pid in (own, *stores):
        with suppress(OSError):  # the process has ended, or is another user's
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    status = path.stat()
                    files.setdefault((status.st_dev, status.st_ino), (str(path), pid == own))
    return files


class TensorFileReader:
    """Maps the tensors of `share_tensors` in another process.

    With a GPU, mappings of files that later versions use again are pinned, and stay so.
    """

    def __init__(self) -> None:
        self._pinned_files = PinnedFiles()

    def map_tensors(self, files: Iterable[TensorFile]) -> dict[str, Tensor]:
        """Return the tensors by name, read-only views of the files."""
        by_path: dict[str, list[TensorFile]] = {}
        for file in files:
            by_path.setdefault(file.path, []).append(file)
        self._pinned_files.drop_removed()
        tensors: dict[str, Tensor] = {}
        for path, inside in by_path.items():
            start = min(file.offset for file in inside)
            start -= start % mmap.ALLOCATIONGRANULARITY
            memory = self._map_file(path, start, max(file.end for file in inside), inside[0])
            places: dict[int, Tensor] = {}
            for file in inside:
                data = memory[file.offset - start : file.end - start]
                tensor = as_tensor(data).view(file.dtype).view(file.shape)
                tensors[file.name] = places.setdefault(file.offset, tensor)
        return tensors

    def _map_file(self, path: str, start: int, end: int, file: TensorFile) -> Array:
        """Return the bytes of a file from `start` to `end`."""
        with open(path, "rb") as opened:
            mapping = mmap.mmap(opened.fileno(), end - start, prot=mmap.PROT_READ, offset=start)
        data = np.frombuffer(mapping, np.uint8)
        if not (file.is_reused and has_local_gpu()):
            return data
        return self._pinned_files.view_range(path, start, end - start, data)
