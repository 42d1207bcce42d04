"""Offload the optimizer's state between updates: to host memory on a GPU, to disk on a CPU.

Storages are emptied and refilled in place, bit for bit, so references to the state's tensors stay
valid.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

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
        self._copy_back: Callable[[], None] | None = None

    def offload_state(self) -> None:
        """Copy the optimizer's state away and free its memory until `restore_state`.

        Raises StreamError and keeps the state if host memory or disk has no space for the copy.
        """
        if self._copy_back is not None:
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
        self._copy_back = offload_to_host(offloaded) if on_gpu else offload_to_disk(offloaded)
        for storage in offloaded:
            storage.resize_(0)
        release_freed_memory()

    def restore_state(self) -> None:
        if self._copy_back is not None:
            self._copy_back()
            self._copy_back = None


def offload_to_host(storages: Sequence[torch.UntypedStorage]) -> Callable[[], None]:
    """Copy GPU storages to pinned host memory; return a function that refills them once."""
    try:
        copies = [(storage, copy_to_pinned(_as_byte_tensor(storage))) for storage in storages]
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise StreamError(
            f"the optimizer's state cannot be offloaded to host memory: {reason}"
        ) from error

    def copy_back() -> None:
        for storage, copy in copies:
            storage.resize_(len(copy))
            _as_byte_tensor(storage).copy_(copy)

    return copy_back


def offload_to_disk(storages: Sequence[torch.UntypedStorage]) -> Callable[[], None]:
    """Copy CPU storages to an unnamed temporary file; return a function that refills them once."""
    sizes = [(storage, storage.nbytes()) for storage in storages]
    with ExitStack() as unless_done:
        try:
            file: Any = unless_done.enter_context(tempfile.TemporaryFile())
            for storage in storages:
                file.write(_as_memoryview(storage))
            file.flush()
        except OSError as error:
            folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
            raise StreamError(
                f"the optimizer's state cannot be offloaded to {folder} (TMPDIR): {error.strerror}"
            ) from error
        unless_done.pop_all()

    def copy_back() -> None:
        with file:
            file.seek(0)
            for storage, size in sizes:
                storage.resize_(size)
                file.readinto(_as_memoryview(storage))

    return copy_back


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
