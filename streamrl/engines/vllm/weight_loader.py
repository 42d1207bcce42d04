"""Load new weights into a running vLLM model.

vLLM's `reload_weights` copies every tensor and, on a CPU, repacks each linear layer. Often vLLM's
parameters are the checkpoint's, concatenated by rows: qkv_proj is q_proj, k_proj and v_proj;
gate_up_proj is gate_proj and up_proj. Such parameters are bound (`BoundParameter`):

- on a CPU a load makes each parameter a view of the published tensors if they are adjacent in
  memory, else it copies them;
- on a GPU resharding can write into the parameters in place (`get_storage`).

The binding is verified once, against the values that vLLM itself has read: those of the model
directory, or of the first version. Quantized models, fused experts, several processes and ordinary
loads on a GPU go through vLLM's own loader (`RankLoader`).
"""

import ctypes
import gc
import itertools
import logging
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import Tensor

from streamrl.distributed.devices import get_local_device, synchronize_device
from streamrl.engines.vllm.load_check import LoadWarningHandler
from streamrl.engines.vllm.local_pieces import find_local_pieces, make_storage
from streamrl.engines.vllm.rank_loader import (
    RankLoad,
    RankLoader,
    combine_verifications,
    plan_loads,
)
from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.plans import CopyPlan
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import LoadVerification
from streamrl.weights.parameters import (
    MergedWeights,
    ParameterSet,
    build_full_weights,
    load_stored_weights,
)
from streamrl.weights.rank_slices import RankSlices, SliceLayout, is_slice_of
from streamrl.weights.shared_files import TensorFile, TensorFileReader, share_tensors

#: vLLM's LLMEngine.
VllmEngine = Any
#: vLLM's worker of a rank.
VllmWorker = Any


class WeightLoader:
    """Loads weights into the model of a single-process engine; belongs to the engine's thread."""

    layouts: Sequence[SliceLayout] = ()

    def __init__(
        self, engine: VllmEngine, parameters: ParameterSet, model_path: str, *, is_loaded: bool
    ) -> None:
        """Bind the model's parameters to the checkpoint's where possible.

        is_loaded: vLLM has just read the model directory `model_path`; otherwise the first version
        is what the parameters are compared with.
        """
        worker = engine.model_executor.driver_worker.worker
        self._model: torch.nn.Module = worker.get_model()
        self._is_on_cpu = all(p.device.type == "cpu" for p in self._model.parameters())
        self._parameters = parameters
        self._bound_parameters: list[BoundParameter] = []
        self._free_executor = ThreadPoolExecutor(1, "old-weights")
        if self._is_on_cpu and is_loaded:
            stored = load_stored_weights(model_path)
            self._bound_parameters = bind_parameters(self._model, parameters, stored)
        self._can_bind = self._is_on_cpu and not is_loaded
        self._rank_loader = RankLoader(worker, parameters, model_path, is_loaded=is_loaded)

    def set_parameters(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Set all parameters, reading each of `tensors` once.

        Returns the bytes copied (or merged from adapters) and a verification, empty after the first
        few loads. Tensors that are not copied are aliased: keep them unchanged until the next load.
        After an exception the model may mix old and new parameters.
        """
        if not self._bound_parameters:
            num_bytes, verification = self._rank_loader.set_parameters(tensors)
            if self._can_bind and not verification.differing_names:
                # vLLM's own loader has read this version: what lies where is seen by its values.
                self._bound_parameters = bind_parameters(self._model, self._parameters, tensors)
            self._can_bind = False
            return num_bytes, verification
        old_tensors = [bound.live_tensors for bound in self._bound_parameters]
        num_bytes = sum(self._set_parameter(bound, tensors) for bound in self._bound_parameters)
        # Unmapping the old version takes as long as the rest of the load; do it in the background.
        self._free_executor.submit(old_tensors.clear)
        # Equal by construction: the binding was verified once, and views or copies follow it.
        return num_bytes, LoadVerification(len(self._parameters.shapes))

    @staticmethod
    def _set_parameter(bound: "BoundParameter", tensors: Mapping[str, Tensor]) -> int:
        parts = {name: tensors[name] for name in bound.names}
        num_bytes = bound.set_parts(list(parts.values()))
        if num_bytes or not isinstance(tensors, MergedWeights):
            return num_bytes
        # A view of merged weights: the merge has just written them.
        return sum(parts[name].nbytes for name in parts.keys() & tensors.merged_names)

    def get_storage(self) -> ShardStorage | None:
        """Return views of all parameters, by their first names, for resharding to write into.

        As in `RankLoader.get_storage`; do not use `set_parameters` afterwards. Write only while the
        engine is paused.
        """
        if not self._is_on_cpu:
            return self._rank_loader.get_storage()
        shapes = self._parameters.shapes
        pieces = [
            (name, TensorBox.from_shape(shapes[name]), rows)
            for bound in self._bound_parameters
            for name, rows in zip(
                bound.names, bound.list_targets(shapes[n][0] for n in bound.names), strict=True
            )
        ]
        return make_storage(pieces, self._parameters)


class BoundParameter:
    """A vLLM parameter that concatenates checkpoint parameters, called `names`, by rows."""

    def __init__(self, parameter: torch.nn.Parameter, names: Sequence[str]) -> None:
        self.names = names
        self._parameter = parameter
        #: Memory that belongs to the parameter and may be written; None while it is a view.
        self._own_tensor: Tensor | None = parameter.data
        #: Published tensors under a view; references keep their memory mapped.
        self._viewed_tensors: Sequence[Tensor] = ()

    @property
    def live_tensors(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Memory that the parameter uses now: its own tensor, and the published tensors it views.

        Holding the result keeps that memory alive after a load.
        """
        return self._parameter.data, self._viewed_tensors

    def set_parts(self, parts: Sequence[Tensor]) -> int:
        """Set the parameter to `parts`, concatenated by rows; return the bytes copied.

        If the parts are adjacent in memory, the parameter becomes a view of them and no byte is
        copied.
        """
        parts = [part.detach() for part in parts]
        block = view_as_block(parts, self._parameter)
        if block is not None:
            self._parameter.data, self._own_tensor, self._viewed_tensors = block, None, parts
            return 0
        num_bytes = 0
        for rows, part in zip(self.list_targets(map(len, parts)), parts, strict=True):
            rows.copy_(part)
            num_bytes += rows.nbytes
        return num_bytes

    def list_targets(self, sizes: Iterable[int]) -> Sequence[Tensor]:
        """Return the rows of the parameter to write the values of each checkpoint parameter into.

        `sizes` are their numbers of rows. If the parameter is a view of published tensors, it gets
        memory of its own first.
        """
        if self._own_tensor is None:
            self._own_tensor = torch.zeros_like(self._parameter)
        self._parameter.data, self._viewed_tensors = self._own_tensor, ()
        sizes = list(sizes)
        return self._own_tensor[: sum(sizes)].split(sizes)


def bind_parameters(
    model: torch.nn.Module, parameters: ParameterSet, stored: Mapping[str, Tensor]
) -> list[BoundParameter]:
    """Bind every parameter of vLLM's model to checkpoint parameters that it concatenates by rows.

    Returns an empty list if `find_local_pieces` finds no mapping.
    """
    pieces = find_local_pieces(model, parameters, stored)
    return [
        BoundParameter(model.get_parameter(path), [name for name, _, _ in parts])
        for path, parts in pieces.items()
    ]


def view_as_block(parts: Sequence[Tensor], like: Tensor) -> Tensor | None:
    """Return a view of `parts`, concatenated by rows, to replace the tensor `like`.

    The parts must be adjacent in memory and match dtype and device of `like`, otherwise the result
    is None. The view does not keep the memory alive. A single part may lack vLLM's padding rows of
    embeddings: no token looks them up, and logits are truncated to the vocabulary.
    """
    if any(part.dtype != like.dtype or part.device != like.device for part in parts):
        return None
    if not all(part.is_contiguous() for part in parts):
        return None
    if any(a.data_ptr() + a.nbytes != b.data_ptr() for a, b in itertools.pairwise(parts)):
        return None
    if len(parts) == 1:
        return parts[0]
    rows = sum(len(part) for part in parts)
    if rows != len(like):
        return None
    # as_strided would not do: adjacent parts of a bucket may be separate storages.
    num_bytes = sum(part.nbytes for part in parts)
    memory = (ctypes.c_byte * num_bytes).from_address(parts[0].data_ptr())
    return torch.frombuffer(memory, dtype=like.dtype).view(rows, *like.shape[1:])


class WorkerWeightLoader:
    """Loads weights into all worker processes that vLLM has started for a tensor-parallel engine.

    Every worker maps the memory of a version and reads its own slices (`RankLoader`), or those that
    were sent for it (`RankSlices`).
    """

    #: Bytes that each rank reads by the plan of the first version, and has read of the last one.
    plan: CopyPlan
    rank_bytes: Sequence[int] = ()
    layouts: Sequence[SliceLayout] = ()

    def __init__(
        self, engine: VllmEngine, parameters: ParameterSet, model_path: str, *, is_loaded: bool
    ) -> None:
        self._engine = engine
        engine.collective_rpc(start_worker_loader, args=(parameters, model_path, is_loaded))

    def set_parameters(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Have every worker load its slices; return the bytes read by all and the verification."""
        published = tensors.published if isinstance(tensors, MergedWeights) else tensors
        is_sliced = isinstance(tensors, RankSlices)
        with share_tensors(published) as files:
            loads = self._engine.collective_rpc(load_from_files, args=(files, is_sliced))
        if not self.rank_bytes:
            self.plan = plan_loads(loads)
            layouts = [load.layout for load in loads]
            self.layouts = layouts if all(layouts) else ()
        self.rank_bytes = [load.num_bytes for load in loads]
        return sum(self.rank_bytes), combine_verifications(loads)

    def get_storage(self) -> None:
        """Return None: other processes cannot write into the ranks' memory."""
        return


@dataclass(frozen=True)
class WorkerLoader:
    """What a worker process needs to load versions from the files of another process."""

    rank_loader: RankLoader
    parameters: ParameterSet
    model_path: str
    reader: TensorFileReader
    warnings: LoadWarningHandler


def start_worker_loader(
    worker: VllmWorker, parameters: ParameterSet, model_path: str, is_loaded: bool
) -> None:
    warnings = LoadWarningHandler()
    logging.getLogger("vllm").addHandler(warnings)
    config = worker.vllm_config.parallel_config
    rank_loader = RankLoader(
        *(worker, parameters, model_path),
        is_loaded=is_loaded,
        rank=config.rank,
        num_ranks=config.world_size,
    )
    worker.streamrl_loader = WorkerLoader(
        rank_loader, parameters, model_path, TensorFileReader(), warnings
    )


def load_from_files(worker: VllmWorker, files: Sequence[TensorFile], is_sliced: bool) -> RankLoad:
    loader: WorkerLoader = worker.streamrl_loader
    if is_sliced:
        own = [file for file in files if is_slice_of(loader.rank_loader.rank, file.name)]
        load = loader.rank_loader.load_slices(loader.reader.map_tensors(own))
    else:
        tensors = build_full_weights(
            loader.reader.map_tensors(files),
            loader.parameters,
            model_path=loader.model_path,
            device=get_local_device(),
        )
        load = loader.rank_loader.load(tensors)
    # Copies may still read the files, which the caller closes.
    synchronize_device()
    verification = replace(load.verification, warnings=loader.warnings.drain_warnings())
    return replace(load, verification=verification)


SHARED_MEMORY_DIR = "/dev/shm/"
PR_SET_PDEATHSIG = 1


def end_workers_with_engine(engine: VllmEngine) -> None:
    """Have the kernel kill the engine's workers when the thread that started them ends.

    A worker that waits for a lost rank in NCCL notices nothing else, and would keep its GPU.
    """
    engine.collective_rpc(set_parent_death_signal)


def set_parent_death_signal(worker: VllmWorker) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def unlink_shared_memory(engine: VllmEngine) -> None:
    """Unlink the shared memory of an engine and its workers, once all have mapped it.

    The processes are killed before they unlink the files, which would then leak.
    """
    engine.collective_rpc(unlink_queues)
    # The engine's own queue, which its process would unlink again.
    engine.model_executor.rpc_broadcast_mq.buffer.is_creator = False
    for name in engine.collective_rpc(list_shared_memory_files)[0]:
        os.unlink(SHARED_MEMORY_DIR + name)


def unlink_queues(worker: VllmWorker) -> None:
    """Unlink the files of the queues and buffers that this process has mapped."""
    for memory in gc.get_objects():
        if type(memory) is SharedMemory:
            with suppress(FileNotFoundError):  # another process was faster
                memory.unlink()
            # vLLM would unlink it again.
            memory.__dict__["unlink"] = lambda: None


def list_shared_memory_files(worker: VllmWorker) -> list[str]:
    """Return the files of collectives between CPU workers, which alone have an identifier."""
    prefix = os.environ.get("VLLM_DIST_IDENT", "")
    names = os.listdir(SHARED_MEMORY_DIR) if prefix else []
    return [name for name in names if name.startswith(prefix)]


def has_lost_rank(engine: VllmEngine) -> bool:
    executor = engine.model_executor
    return hasattr(executor, "is_failed") and bool(executor.is_failed)
