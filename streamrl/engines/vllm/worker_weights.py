"""The weights of an engine whose layers are split over processes: how new ones reach them.

Each rank is a process that vLLM has started, and reads of every parameter what is its own. A
version is laid down once for all of them, in memory without a name: it is gone with the last who
has it open, also if that one is killed.
"""

import mmap
import os
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
"""Parameters begin at multiples of so many bytes."""
SHARED_MEMORY_DIR = "/dev/shm/"


@dataclass(frozen=True)
class StoredParameter:
    """Where a parameter lies: `start` in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class WorkerWeightLoader:
    """The parameters of a split engine; belongs to the engine's thread. See `WeightLoader`."""

    def __init__(self, engine: VllmEngine, parameters: ParameterSet, model_path: str) -> None:
        self._engine = engine
        self._model_path = model_path
        self._tied_names = {name: names for names in parameters.tied_groups for name in names}

    def load_weights(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Serve a full set of parameters; the bytes that were laid down."""
        file = os.memfd_create("weights")
        try:
            laid = list(self._write_tensors(file, tensors))
            path = f"/proc/{os.getpid()}/fd/{file}"
            self._engine.collective_rpc(reload_from_file, args=(path, laid))
            return os.fstat(file).st_size, LoadVerification()
        finally:
            os.close(file)

    def get_storage(self) -> None:
        """Nobody else can fill them."""
        return

    def _write_tensors(self, file: int, tensors: Mapping[str, Tensor]) -> Iterator[StoredParameter]:
        """Write the parameters one after the other, those of several names once."""
        begun: dict[frozenset[str], int] = {}
        with os.fdopen(os.dup(file), "wb") as out:
            for name, tensor in iter_stored_tensors(self._model_path, tensors):
                names = self._tied_names.get(name, frozenset([name]))
                if names not in begun:
                    out.seek(-out.tell() % ALIGNMENT, os.SEEK_CUR)
                    begun[names] = out.tell()
                    flat = tensor.detach().cpu().contiguous().flatten()
                    out.write(flat.view(torch.uint8).numpy().data)
                yield StoredParameter(name, tensor.dtype, tuple(tensor.shape), begun[names])


def reload_from_file(worker: VllmWorker, path: str, laid: Iterable[StoredParameter]) -> None:
    """In a rank's process: take what is its own of the parameters that lie in a file."""
    file = os.open(path, os.O_RDONLY)
    try:
        # Private pages: torch would warn of memory it may not write to.
        memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)
    worker.reload_weights(weights_iterator=_read_tensors(memory, laid))


def _read_tensors(
    memory: mmap.mmap, laid: Iterable[StoredParameter]
) -> Iterator[tuple[str, Tensor]]:
    for each in laid:
        count = torch.Size(each.shape).numel()
        flat = torch.frombuffer(memory, dtype=each.dtype, count=count, offset=each.offset)
        yield each.name, flat.view(each.shape)


def unlink_shared_memory(engine: VllmEngine) -> None:
    """Take away the names of the memory the ranks of a CPU talk through, once all have it.

    vLLM's processes are ended before they do, and the memory would stay for good.
    """
    for name in engine.collective_rpc(list_shared_memory_files)[0]:
        os.unlink(SHARED_MEMORY_DIR + name)


def list_shared_memory_files(worker: VllmWorker) -> list[str]:
    """In a rank's process: the files of its engine in shared memory."""
    begin = os.environ["VLLM_DIST_IDENT"]
    return [name for name in os.listdir(SHARED_MEMORY_DIR) if name.startswith(begin)]


def has_lost_rank(engine: VllmEngine) -> bool:
    """Whether a process of a split engine has died."""
    executor = engine.model_executor
    return hasattr(executor, "is_failed") and bool(executor.is_failed)
