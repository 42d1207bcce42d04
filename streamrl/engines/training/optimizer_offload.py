"""The memory of an optimizer's state, which others may have while no step is made.

On a GPU the state waits in main memory, on a CPU in a file that has no name. It comes back to where
it was, to the last bit: whoever holds a tensor of it holds the same one.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from streamrl.engines.memory.peak_memory import release_freed_memory
from streamrl.errors import StreamError


class OptimizerOffload:
    """Released and had again; not to be touched in between."""

    def __init__(
        self, state: Callable[[], Iterable[Tensor]], *, not_of: Callable[[], Iterable[Tensor]]
    ) -> None:
        """`state` is the optimizer's, which may be none before its first step; what shares memory
        with one of `not_of` stays."""
        self._get_state = state
        self._get_excluded = not_of
        self._offloaded_storages: OffloadedStorages | None = None

    def offload_state(self) -> None:
        """Give it up until `restore`. Raises StreamError, nothing given up, if there is no room."""
        if self._offloaded_storages is not None:
            return
        kept = {tensor.untyped_storage().data_ptr() for tensor in self._get_excluded()}
        storages = {}
        for tensor in self._get_state():
            # Of what a rank keeps nothing of, others may have the memory.
            if tensor.dim() and tensor.numel() and tensor.untyped_storage().data_ptr() not in kept:
                if not tensor.untyped_storage().resizable():
                    tensor.data = tensor.detach().clone()  # it was read from a checkpoint
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        found = list(storages.values())
        on_gpu = any(storage.device.type == "cuda" for storage in found)
        self._offloaded_storages = CpuOffload(found) if on_gpu else DiskOffload(found)
        for storage in found:
            storage.resize_(0)
        release_freed_memory()

    def restore_state(self) -> None:
        """Have it again as it was; nothing if it was not released."""
        if self._offloaded_storages is not None:
            self._offloaded_storages.copy_back()
            self._offloaded_storages = None


class OffloadedStorages(Protocol):
    """Copies of storages, which go once they are back."""

    def copy_back(self) -> None: ...


class CpuOffload:
    """Pinned copies of what is on a GPU."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self._copies = []
        try:
            for storage in storages:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                self._copies.append((storage, copy.copy_(_as_byte_tensor(storage))))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise StreamError(
                f"the optimizer's state cannot be put aside in main memory: {reason}"
            ) from error

    def copy_back(self) -> None:
        for storage, copy in self._copies:
            storage.resize_(len(copy))
            _as_byte_tensor(storage).copy_(copy)


class DiskOffload:
    """One file with a copy after the other."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        with ExitStack() as unless_done:
            unless_done.enter_context(_translate_disk_errors())
            self._file: Any = unless_done.enter_context(tempfile.TemporaryFile())
            for storage in storages:
                self._file.write(_as_memoryview(storage))
            self._file.flush()
            unless_done.pop_all()

    def copy_back(self) -> None:
        self._file.seek(0)
        for storage, size in self._sizes:
            storage.resize_(size)
            self._file.readinto(_as_memoryview(storage))
        self._file.close()


@contextmanager
def _translate_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise StreamError(
            f"the optimizer's state cannot be put aside in {where} (TMPDIR): {error.strerror}"
        ) from error


def _as_memoryview(storage: torch.UntypedStorage) -> memoryview:
    """Its bytes, where they lie. A view by numpy would leave a storage that cannot be resized."""
    return memoryview((ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr()))


def _as_byte_tensor(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def iter_optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """All an optimizer of torch holds: its state, and what it updates."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    for group in optimizer.param_groups:
        yield from group["params"]
