"""Load weights into a tensor-parallel engine whose worker processes vLLM has started.

A version is written once into an anonymous memory file (memfd). Every worker maps the file and
copies its part of each parameter. The kernel frees the memory when the last process closes the
file, even after a kill.
"""

import ctypes
import os
import signal
from collections.abc import Mapping
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamrl.engines.vllm.weight_loader import iter_stored_tensors
from streamrl.weights import LoadVerification
from streamrl.weights.parameters import ParameterSet

#: vLLM's LLMEngine.
VllmEngine = Any
#: vLLM's worker, in a rank's process.
VllmWorker = Any

SHARED_MEMORY_DIR = "/dev/shm/"
PR_SET_PDEATHSIG = 1


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
            path = f"/proc/{os.getpid()}/fd/{file}"
            sources, written = dict[str, str](), dict[str, Tensor]()
            for name, tensor in iter_stored_tensors(self._model_path, tensors):
                sources[name] = min(self._tied_names.get(name, {name}))
                written.setdefault(sources[name], tensor.detach().cpu().contiguous())
            save_file(written, path)
            self._engine.collective_rpc(reload_from_file, args=(path, sources))
            return os.fstat(file).st_size, LoadVerification()
        finally:
            os.close(file)

    def get_storage(self) -> None:
        """Return None: other processes cannot write into the ranks' memory."""
        return


def reload_from_file(worker: VllmWorker, path: str, sources: Mapping[str, str]) -> None:
    """Load tensors by name; `sources` are their names in the safetensors file."""
    with safe_open(path, framework="pt") as file:
        tensors = ((name, file.get_tensor(source)) for name, source in sources.items())
        worker.reload_weights(weights_iterator=tensors)


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
