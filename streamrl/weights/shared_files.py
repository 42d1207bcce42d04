"""Tensors that other processes of a node map: their place in files, without a copy where possible.

A tensor that lies in a shared mapping of a file, as do the buckets of the shared memory transport,
is described by its path and offset. Any other tensor is written to an anonymous file (memfd) first,
which the kernel frees with its last user, even after a kill.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamrl.distributed.devices import has_local_gpu
from streamrl.messages import Array
from streamrl.weights.parameters import as_tensor
from streamrl.weights.pinned_memory import PinnedFiles

ALIGNMENT_BYTES = 64
COPY_FOLDER = "/proc/"
MAPS_FIELDS = 6
"""Fields of a line of /proc/self/maps that names a file."""
#: Mapping of a file: first and last address, offset in the file, path.
FileMapping = tuple[int, int, int, str]


@dataclass(frozen=True)
class TensorFile:
    """Place of a contiguous tensor in a file; `offset` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str
    offset: int

    @property
    def end(self) -> int:
        """First byte after the tensor."""
        return self.offset + self.dtype.itemsize * torch.Size(self.shape).numel()


@contextmanager
def share_tensors(tensors: Mapping[str, Tensor]) -> Iterator[Sequence[TensorFile]]:
    """Yield the files of tensors, valid within the context; names of one tensor share its bytes."""
    mappings = list(_iter_shared_mappings())
    starts = [start for start, _, _, _ in mappings]
    copies: dict[int, int] = {}
    with os.fdopen(os.memfd_create("weights"), "wb") as out:
        copy_path, files = f"{COPY_FOLDER}{os.getpid()}/fd/{out.fileno()}", []
        for name, tensor in tensors.items():
            address = tensor.data_ptr()
            mapping = mappings[max(bisect_right(starts, address) - 1, 0)] if mappings else None
            if mapping is not None and _is_inside(tensor, mapping):
                place = mapping[3], mapping[2] + address - mapping[0]
            else:
                if address not in copies:
                    out.seek(-out.tell() % ALIGNMENT_BYTES, os.SEEK_CUR)
                    copies[address] = out.tell()
                    flat = tensor.detach().cpu().contiguous().flatten()
                    out.write(flat.view(torch.uint8).numpy().data)
                place = copy_path, copies[address]
            files.append(TensorFile(name, tensor.dtype, tuple(tensor.shape), *place))
        out.flush()
        yield files


def _is_inside(tensor: Tensor, mapping: FileMapping) -> bool:
    start, end, _, _ = mapping
    address = tensor.data_ptr()
    is_flat = tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_flat and start <= address and address + tensor.nbytes <= end


def _iter_shared_mappings() -> Iterator[FileMapping]:
    """Yield this process's shared mappings of files that still exist, by address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(None, MAPS_FIELDS - 1)
            if len(fields) < MAPS_FIELDS or "s" not in fields[1] or not fields[5].startswith("/"):
                continue
            # The name of a removed file ends with " (deleted)".
            if os.path.exists(fields[5]):
                start, end = (int(text, 16) for text in fields[0].split("-"))
                yield start, end, int(fields[2], 16), fields[5]


class TensorFileReader:
    """Maps the tensors of `share_tensors` in another process, into pinned memory if it has a GPU.

    Mappings of files that the next version uses again stay pinned.
    """

    def __init__(self) -> None:
        self._pinned_files = PinnedFiles()

    def map_tensors(self, files: Iterable[TensorFile]) -> dict[str, Tensor]:
        """Return the tensors by name, read-only views of the files."""
        files = list(files)
        ends: dict[str, int] = {}
        for file in files:
            ends[file.path] = max(ends.get(file.path, 0), file.end)
        self._pinned_files.drop_removed()
        memory = {path: self._map_file(path, end) for path, end in ends.items()}
        places: dict[tuple[str, int], Tensor] = {}
        for file in files:
            data = memory[file.path][file.offset : file.end]
            tensor = as_tensor(data).view(file.dtype).view(file.shape)
            places.setdefault((file.path, file.offset), tensor)
        return {file.name: places[file.path, file.offset] for file in files}

    def _map_file(self, path: str, num_bytes: int) -> Array:
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ)
        data = np.frombuffer(mapping, np.uint8)
        # The path of a copy may name another file next time.
        if path.startswith(COPY_FOLDER) or not has_local_gpu():
            return data
        return self._pinned_files.view_range(path, 0, num_bytes, data)
