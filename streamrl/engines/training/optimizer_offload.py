"""Offload the optimizer's state between updates: to host memory on a GPU, to disk on a CPU.

Storages are emptied and refilled in place, bit for bit, so references to the state's tensors stay
valid.
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
from streamrl.weights.pinned_memory import copy_to_pinned


class OptimizerOffload:
    """Offloads and restores an optimizer's state; the state must not be used in between."""

    def __init__(
        self, state: Callable[[], Iterable[Tensor]], *, excluding: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Remember how to list the tensors to offload.

        `state` lists the tensors of the optimizer's state (empty before its first step). Tensors
        that share memory with a tensor of `excluding`, such as parameters, are not offloaded.
        """
        self._get_state = state
        self._get_excluded = excluding
        self._offloaded_storages: OffloadedStorages | None = None

    def offload_state(self) -> None:
        """Copy the optimizer's state away and free its memory until `restore_state`.

        Raises StreamError and keeps the state if host memory or disk has no space for the copy.
        """
        if self._offloaded_storages is not None:
            return
        excluded = {tensor.untyped_storage().data_ptr() for tensor in self._get_excluded()}
        storages = {}
        for tensor in self._get_state():
            # An empty tensor's address may belong to another tensor by now.
            if (
                tensor.dim()
                and tensor.numel()
                and tensor.untyped_storage().data_ptr() not in excluded
            ):
                if not tensor.untyped_storage().resizable():
                    tensor.data = tensor.detach().clone()  # mapped or loaded from a checkpoint
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        offloaded = list(storages.values())
        on_gpu = any(storage.device.type != "cpu" for storage in offloaded)
        self._offloaded_storages = CpuOffload(offloaded) if on_gpu else DiskOffload(offloaded)
        for storage in offloaded:
            storage.resize_(0)
        release_freed_memory()

    def restore_state(self) -> None:
        if self._offloaded_storages is not None:
            self._offloaded_storages.copy_back()
            self._offloaded_storages = None


class OffloadedStorages(Protocol):
    """Copies of freed torch storages; `copy_back` refills the storages and drops the copies."""

    def copy_back(self) -> None: ...


class CpuOffload:
    """Copies of GPU storages in pinned host memory."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self._copies = []
        try:
            for storage in storages:
                self._copies.append((storage, copy_to_pinned(_as_byte_tensor(storage))))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise StreamError(
                f"the optimizer's state cannot be offloaded to host memory: {reason}"
            ) from error

    def copy_back(self) -> None:
        for storage, copy in self._copies:
            storage.resize_(len(copy))
            _as_byte_tensor(storage).copy_(copy)


class DiskOffload:
    """Copies of CPU storages, concatenated in an unnamed temporary file."""

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
    """Turn an OSError of the temporary file into StreamError."""
    try:
        yield
    except OSError as error:
        directory = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        raise StreamError(
            f"the optimizer's state cannot be offloaded to {directory} (TMPDIR): {error.strerror}"
        ) from error


def _as_memoryview(storage: torch.UntypedStorage) -> memoryview:
    """Return a storage's bytes without a copy.

    A numpy view instead would make the storage non-resizable.
    """
    return memoryview((ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr()))


def _as_byte_tensor(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def iter_optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    for group in optimizer.param_groups:
        yield from group["params"]
