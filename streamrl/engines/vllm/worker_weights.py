"""Load weights into a tensor-parallel engine whose worker processes vLLM has started.

A version is written once into an anonymous memory file (memfd). Every worker maps the file and
copies its part of each parameter. The kernel frees the memory when the last process closes the
file, even after a kill.
"""

import ctypes
import mmap
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamrl.engines.vllm.weight_loader import iter_stored_tensors
from streamrl.weights import LoadVerification
from streamrl.weights.parameters import ParameterSet

#: vLLM's LLMEngine.
VllmEngine = Any
#: vLLM's worker, in a rank's process.
VllmWorker = Any

ALIGNMENT = 64
"""Alignment of parameters in the memory file, bytes."""
SHARED_MEMORY_DIR = "/dev/shm/"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class StoredParameter:
    """Position of a parameter in the memory file; `offset` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class WorkerWeightLoader:
    """Loads weights into all worker processes of an engine.

    `WeightLoader` has the same methods, for engines of a single process.
    """

    def __init__(self, engine: VllmEngine, parameters: ParameterSet, model_path: str) -> None:
        self._engine = engine
        self._model_path = model_path
        self._tied_names = {name: names for names in parameters.tied_groups for name in names}

    def load_weights(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Write all parameters into a memory file and load them in every worker.

        Returns the size of the file in bytes and an empty verification.
        """
        file = os.memfd_create("weights")
        try:
            stored = list(self._write_tensors(file, tensors))
            path = f"/proc/{os.getpid()}/fd/{file}"
            self._engine.collective_rpc(reload_from_file, args=(path, stored))
            return os.fstat(file).st_size, LoadVerification()
        finally:
            os.close(file)

    def get_storage(self) -> None:
        """Return None: other processes cannot write into the ranks' memory."""
        return

    def _write_tensors(self, file: int, tensors: Mapping[str, Tensor]) -> Iterator[StoredParameter]:
        offsets: dict[frozenset[str], int] = {}
        with os.fdopen(os.dup(file), "wb") as out:
            for name, tensor in iter_stored_tensors(self._model_path, tensors):
                names = self._tied_names.get(name, frozenset([name]))
                if names not in offsets:
                    out.seek(-out.tell() % ALIGNMENT, os.SEEK_CUR)
                    offsets[names] = out.tell()
                    flat = tensor.detach().cpu().contiguous().flatten()
                    out.write(flat.view(torch.uint8).numpy().data)
                yield StoredParameter(name, tensor.dtype, tuple(tensor.shape), offsets[names])


def reload_from_file(worker: VllmWorker, path: str, stored: Iterable[StoredParameter]) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        # ACCESS_COPY: torch warns about read-only memory.
        memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)
    worker.reload_weights(weights_iterator=_read_tensors(memory, stored))


def _read_tensors(
    memory: mmap.mmap, stored: Iterable[StoredParameter]
) -> Iterator[tuple[str, Tensor]]:
    for parameter in stored:
        count = torch.Size(parameter.shape).numel()
        flat = torch.frombuffer(memory, dtype=parameter.dtype, count=count, offset=parameter.offset)
        yield parameter.name, flat.view(parameter.shape)


def end_workers_with_engine(engine: VllmEngine) -> None:
    """Have the kernel kill the engine's workers when the thread that started them ends.

    A worker that waits for a lost rank in NCCL notices nothing else, and would keep its GPU.
    """
    engine.collective_rpc(set_parent_death_signal)


def set_parent_death_signal(worker: VllmWorker) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def unlink_shared_memory(engine: VllmEngine) -> None:
    """Unlink the shared memory files of an engine's CPU workers once all workers have mapped them.

    vLLM kills its processes before they unlink the files, which would then leak.
    """
    for name in engine.collective_rpc(list_shared_memory_files)[0]:
        os.unlink(SHARED_MEMORY_DIR + name)


def list_shared_memory_files(worker: VllmWorker) -> list[str]:
    prefix = os.environ["VLLM_DIST_IDENT"]
    return [name for name in os.listdir(SHARED_MEMORY_DIR) if name.startswith(prefix)]


def has_lost_rank(engine: VllmEngine) -> bool:
    executor = engine.model_executor
    return hasattr(executor, "is_failed") and bool(executor.is_failed)
