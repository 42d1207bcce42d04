"""Load new weights into a running vLLM model.

vLLM's `reload_weights` copies every tensor and, on a CPU, repacks each linear layer. Often vLLM's
parameters are the checkpoint's, concatenated by rows: qkv_proj is q_proj, k_proj and v_proj;
gate_up_proj is gate_proj and up_proj. Such parameters are bound (`BoundParameter`):

- on a CPU a load makes each parameter a view of the published tensors if they are adjacent in
  memory, else it copies them;
- on a GPU resharding can write into the parameters in place (`get_storage`).

The binding is verified once, against the values that vLLM has read from the model directory.
Quantized models, fused experts, several processes and ordinary loads on a GPU use `reload_weights`.

On a CPU the engine is built without weight packing, and its large linear layers use oneDNN's plain
kernel. That is nearly as fast as the packed kernel, which needs a second copy of every weight.
"""

import copy
import ctypes
import functools
import itertools
import mmap
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.vllm.load_check import FingerprintsByDtype, LoadCheck, list_source_names
from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.errors import WeightsError
from streamrl.files.hf_config import RECOMPUTED_TENSORS
from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.storage import ShardStorage
from streamrl.resharding.tensor_specs import FusedComponent, TensorSpec
from streamrl.weights import LoadVerification
from streamrl.weights.parameters import MergedWeights, ParameterSet, load_stored_weights
from streamrl.weights.versions import NUM_INITIAL_CHECKS

#: vLLM's LLMEngine.
VllmEngine = Any
#: vLLM's worker of a rank.
VllmWorker = Any
#: Checkpoint name and full shape of a parameter.
NamedShape = tuple[str, tuple[int, ...]]
#: Checkpoint name, box of the parameter that this rank holds, and its view in vLLM's memory.
LocalPiece = tuple[str, TensorBox, Tensor]

#: For smaller weights torch's own kernel is as fast: oneDNN's dispatch takes some 30 us.
MIN_ONEDNN_ELEMENTS = 2**19
NUM_HEAD_AXES = 3
"""Number of dimensions of queries that have a dimension for heads: [token, head, value]."""


class WeightLoader:
    """Loads weights into the model of a single-process engine; belongs to the engine's thread."""

    def __init__(self, engine: VllmEngine, parameters: ParameterSet, model_path: str) -> None:
        """Bind the model's parameters to the checkpoint's where possible.

        The engine was built from the model directory `model_path`.
        """
        self._engine = engine
        self._model: torch.nn.Module = engine.model_executor.driver_worker.worker.get_model()
        self._is_on_cpu = all(p.device.type == "cpu" for p in self._model.parameters())
        self._parameters = parameters
        self._model_path = model_path
        self._bound_parameters: list[BoundParameter] = []
        self._free_executor = ThreadPoolExecutor(1, "old-weights")
        if self._is_on_cpu:
            use_onednn(self._model)
            self._bound_parameters = bind_parameters(self._model, parameters, model_path)
        self._num_checked = 0
        self._load_check: LoadCheck | None = None
        if not self._bound_parameters and engine.model_config.quantization is None:
            merged = get_merged_modules(self._model)
            self._load_check = LoadCheck(self._model, load_stored_weights(model_path), merged)

    def set_parameters(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Set all parameters, reading each of `tensors` once.

        Returns the bytes copied (or merged from adapters) and a verification, empty after the first
        few loads. Tensors that are not copied are aliased: keep them unchanged until the next load.
        After an exception the model may mix old and new parameters.
        """
        if not self._bound_parameters:
            return self._reload_weights(tensors)
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

        Call it before the first load, and do not use `set_parameters` afterwards. Write only while
        the engine is paused. Returns None if a parameter is not a concatenation of the
        checkpoint's.
        """
        shapes = self._parameters.shapes
        if not self._is_on_cpu:
            # Bind on a GPU only here: CUDA graphs read parameters at fixed addresses, so a load
            # must never turn parameters into views.
            found = find_local_pieces(self._model, self._parameters, self._model_path)
            return make_storage(itertools.chain(*found.values()), self._parameters)
        pieces = [
            (name, TensorBox.from_shape(shapes[name]), rows)
            for bound in self._bound_parameters
            for name, rows in zip(
                bound.names, bound.list_targets(shapes[n][0] for n in bound.names), strict=True
            )
        ]
        return make_storage(pieces, self._parameters)

    def _reload_weights(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        num_bytes, prints = 0, dict[str, FingerprintsByDtype]()
        check = self._load_check if self._num_checked < NUM_INITIAL_CHECKS else None
        self._num_checked += 1

        def iter_counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, tensor in iter_stored_tensors(self._model_path, tensors):
                num_bytes += tensor.nbytes
                if check is not None:
                    prints[name] = check.make_fingerprints(tensor)
                yield name, tensor

        if self._is_on_cpu:
            reload_through_copy(self._engine.vllm_config, self._model, iter_counted())
            use_onednn(self._model)
        else:
            self._engine.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter_counted()}
            )
        return num_bytes, LoadVerification() if check is None else check.compare_loaded(prints)


def iter_stored_tensors(
    model_path: str, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield new values of a model's tensors with the names and shapes of its directory's files.

    `tensors` are the trained parameters. Untrained tensors of the directory, such as a router's
    biases, come first; recomputed buffers are omitted. Trained tensors are read one at a time,
    unless transformers stores them in another form (such as all experts in a single tensor), which
    needs all at once.
    """
    skeleton = load_skeleton(model_path)
    if get_model_conversion_mapping(skeleton, add_legacy=False):
        tensors = revert_weight_conversion(skeleton, dict(tensors))
    stored = load_stored_weights(model_path)
    trained = dict(skeleton.named_parameters(remove_duplicate=False)).keys() | tensors.keys()
    for name in stored.keys() - trained:
        if not RECOMPUTED_TENSORS.search(name):
            yield name, stored[name]
    yield from tensors.items()


def reload_through_copy(
    vllm_config: Any, model: torch.nn.Module, stored: Iterator[tuple[str, Tensor]]
) -> None:
    """Load a second vLLM model from `stored`, then move its tensors into `model`.

    The second model goes through the same packing, padding and layout changes as the first. Raises
    ValueError if a parameter gets no value.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class StoredTensorLoader(DefaultModelLoader):
        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
            return stored

    config_copy, compilation = copy.copy(vllm_config), copy.copy(vllm_config.compilation_config)
    config_copy.compilation_config = compilation
    # vLLM registers layers by name in this dict and rejects duplicates.
    compilation.static_forward_context = {}
    loader = StoredTensorLoader(vllm_config.load_config)
    with set_current_vllm_config(config_copy), keep_plain_linears():
        loaded = loader.load_model(config_copy, vllm_config.model_config)
    new_tensors = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = new_tensors[name].data
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if is_deferred_attention_layer(module):
            module.process_weights_after_loading(vllm_config.model_config.dtype)


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
    model: torch.nn.Module, parameters: ParameterSet, model_path: str
) -> list[BoundParameter]:
    """Bind every parameter of vLLM's model to checkpoint parameters that it concatenates by rows.

    Returns an empty list if `find_local_pieces` finds no mapping.
    """
    pieces = find_local_pieces(model, parameters, model_path)
    return [
        BoundParameter(model.get_parameter(path), [name for name, _, _ in parts])
        for path, parts in pieces.items()
    ]


class PartialWeightLoader:
    """Loads full tensors into one rank of a tensor-parallel vLLM model in a trainer process.

    vLLM keeps the rank's part of each tensor. `get_storage` returns views of these parts, which
    resharding writes in place. Callers hold the worker's lock during every call.
    """

    def __init__(
        self, worker: VllmWorker, parameters: ParameterSet, model_path: str, rank_group: RankGroup
    ) -> None:
        """Prepare loading into a worker that has just read the model directory `model_path`.

        Call `get_storage` before the first `set_parameters`: it compares vLLM's values with the
        directory's.
        """
        self._worker = worker
        self._model: torch.nn.Module = worker.get_model()
        self._is_on_cpu = all(p.device.type == "cpu" for p in self._model.parameters())
        self._parameters = parameters
        self._model_path = model_path
        self._rank_group = rank_group
        if self._is_on_cpu:
            use_onednn(self._model)

    def set_parameters(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Set this rank's part of all parameters; return the bytes copied and no verification.

        All ranks of the group must load the same tensors before the next decode step.
        """
        with keep_plain_linears() if self._is_on_cpu else nullcontext():
            stored = iter_stored_tensors(self._model_path, tensors)
            self._worker.reload_weights(weights_iterator=stored)
        if self._is_on_cpu:
            use_onednn(self._model)
        return sum(parameter.nbytes for parameter in self._model.parameters()), LoadVerification()

    def get_storage(self) -> ShardStorage | None:
        """Return views of this rank's parameters; None if `find_local_pieces` finds no mapping."""
        return self._storage

    @cached_property
    def _storage(self) -> ShardStorage | None:
        pieces = find_local_pieces(
            self._model,
            self._parameters,
            self._model_path,
            index=self._rank_group.group_rank,
            num_ranks=self._rank_group.size,
        )
        return make_storage(itertools.chain(*pieces.values()), self._parameters)


def find_local_pieces(
    model: torch.nn.Module,
    parameters: ParameterSet,
    model_path: str,
    *,
    index: int = 0,
    num_ranks: int = 1,
) -> dict[str, list[LocalPiece]]:
    """Map each parameter of vLLM's model to the parts of checkpoint parameters that it holds.

    The model is that of rank `index` of `num_ranks` tensor-parallel ranks. Returns an empty dict if
    any parameter cannot be mapped. Relies on vLLM having just read the model from `model_path`: if
    the parts have equal values now, the mapping holds for every later version.
    """
    merged = get_merged_modules(model)
    pieces: dict[str, list[LocalPiece]] = {}
    for path, parameter in model.named_parameters():
        names = list_source_names(path, merged)
        if any(name not in parameters.shapes for name in names):
            return {}
        module = model.get_submodule(path.rpartition(".")[0])
        full_shapes = [(name, parameters.shapes[name]) for name in names]
        matched = _match_parameter(module, parameter.data, full_shapes, index, num_ranks)
        if matched is None:
            return {}
        pieces[path] = matched
    used = {name for path in pieces for name in list_source_names(path, merged)}
    tied = {name for names in parameters.tied_groups if names & used for name in names}
    fits = parameters.shapes.keys() == used | tied
    flat = [*itertools.chain(*pieces.values())]
    return pieces if fits and _have_equal_values(flat, parameters, model_path) else {}


def make_storage(pieces: Iterable[LocalPiece], parameters: ParameterSet) -> ShardStorage | None:
    """Return pieces as a storage for resharding to write into, by their parameters' first names."""
    views: dict[str, list[tuple[TensorBox, Tensor]]] = {}
    for name, box, view in pieces:
        views.setdefault(parameters.get_first_name(name), []).append((box, view))
    return ShardStorage(views) if views else None


def _match_parameter(
    module: Any,
    local: Tensor,
    full_shapes: Sequence[NamedShape],
    index: int,
    num_ranks: int,
) -> list[LocalPiece] | None:
    """Map a parameter of vLLM's `module` to parts of checkpoint parameters by their shapes.

    `full_shapes` are the checkpoint parameters that this rank's tensor `local` may fuse.
    """
    if hasattr(module, "shard_indices"):  # an embedding or a head
        # vLLM pads the rows of the last ranks, which may have no others.
        ((name, shape),) = full_shapes
        start = module.shard_indices.org_vocab_start_index
        stop = module.shard_indices.org_vocab_end_index
        if local.shape[1:] != shape[1:]:
            return None
        if start == stop:
            return []
        box = TensorBox.from_shape(shape).narrow(0, start, stop)
        return [(name, box, local[: stop - start])]
    # With fewer key-value heads than ranks, vLLM replicates heads.
    heads = module.total_num_kv_heads if hasattr(module, "total_num_kv_heads") else None
    dims = range(local.ndim if len(full_shapes) == 1 else 1)
    if len(full_shapes) == 1 and local.shape == full_shapes[0][1]:
        return [(full_shapes[0][0], TensorBox.from_shape(full_shapes[0][1]), local)]
    splits = (_match_split(local, full_shapes, dim, heads, (index, num_ranks)) for dim in dims)
    return next((pieces for pieces in splits if pieces is not None), None)


def _match_split(
    local: Tensor,
    full_shapes: Sequence[NamedShape],
    dim: int,
    heads: int | None,
    rank: tuple[int, int],
) -> list[LocalPiece] | None:
    """Map a rank's parts of checkpoint parameters, concatenated along a dimension.

    `heads` is the number of heads by which vLLM splits all but the first; None: anywhere. `rank` is
    (index, number of ranks).
    """
    pieces, start = [], 0
    for number, (name, shape) in enumerate(full_shapes):
        try:
            component = FusedComponent(shape[dim], heads if number else None)
            (box,) = TensorSpec(name, shape, (0,), dim, (component,)).split_tensor(*rank)
        except (ValueError, IndexError):  # IndexError: vLLM's parameter has more dimensions
            return None
        size = box.shape[dim]
        if start + size > local.shape[dim]:
            return None
        view = local.narrow(dim, start, size)
        if tuple(view.shape) != box.shape:
            return None
        pieces.append((name, box, view))
        start += size
    return pieces if start == local.shape[dim] else None


def get_merged_modules(model: torch.nn.Module) -> Mapping[str, Sequence[str]]:
    """Return the checkpoint's modules that each fused module of vLLM's model combines.

    Only models that support LoRA or quantization have `packed_modules_mapping`.
    """
    merged: Any = model.packed_modules_mapping if hasattr(model, "packed_modules_mapping") else {}
    return dict(merged)


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


def _have_equal_values(
    pieces: Sequence[LocalPiece], parameters: ParameterSet, model_path: str
) -> bool:
    """Return whether the pieces equal the model directory's bit by bit, in their dtype."""
    stored = load_stored_weights(model_path)
    try:
        full = parameters.expand_tied({n: t for n, t in stored.items() if n in parameters.shapes})
    except WeightsError:
        return False
    # Compare on the CPU: a GPU may lack memory for a copy.
    return all(
        torch.equal(view.cpu(), full[name][box.slices].to(view.dtype)) for name, box, view in pieces
    )


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
    """Loads weights into all worker processes that vLLM has started for a tensor-parallel engine.

    A version is written once into an anonymous memory file (memfd). Every worker maps the file and
    copies its part of each parameter. The kernel frees the memory when the last process closes the
    file, even after a kill.
    """

    def __init__(self, engine: VllmEngine, parameters: ParameterSet, model_path: str) -> None:
        self._engine = engine
        self._model_path = model_path
        self._tied_names = {name: names for names in parameters.tied_groups for name in names}

    def set_parameters(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Write all parameters into a memory file, from which every worker loads its part.

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


@contextmanager
def keep_plain_linears() -> Iterator[None]:
    """Patch vLLM 0.32 while it builds a model on a CPU, and undo the patches on exit.

    - Linear layers do not pack their weights.
    - transformers' classes, which vLLM uses for some models, are not decorated for compilation:
      the decoration would change them for the whole process, and CPUs do not compile.
    - Rotary embeddings of non-contiguous queries (DeepSeek's attention) use torch: vLLM's CPU
      kernel leaves such queries unrotated.
    """
    from vllm import _custom_ops
    from vllm.compilation import decorators
    from vllm.model_executor.layers import utils as layers
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    supports_onednn = _custom_ops._supports_onednn
    check_cpu_sgl_kernel = layers.check_cpu_sgl_kernel
    decorate = decorators._support_torch_compile
    rotate = RotaryEmbedding.forward_cpu

    def rotate_any(self: Any, positions: Tensor, query: Tensor, key: Any = None) -> Any:
        if query.dim() == NUM_HEAD_AXES and not query.is_contiguous():
            return self.forward_native(positions, query, key)
        return rotate(self, positions, query, key)

    def decorate_vllm_class(cls: type, *arguments: Any, **keywords: Any) -> type:
        is_vllm_class = cls.__module__.partition(".")[0] == "vllm"
        return decorate(cls, *arguments, **keywords) if is_vllm_class else cls

    _custom_ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda n, k, dtype: False
    decorators._support_torch_compile = decorate_vllm_class
    # Layers bind forward_cpu when they are built, so the patch outlives this context for them.
    RotaryEmbedding.forward_cpu = rotate_any
    try:
        yield
    finally:
        _custom_ops._supports_onednn = supports_onednn
        layers.check_cpu_sgl_kernel = check_cpu_sgl_kernel
        decorators._support_torch_compile = decorate
        RotaryEmbedding.forward_cpu = rotate


def use_onednn(model: torch.nn.Module) -> None:
    for module in model.modules():
        if "cpu_linear" in vars(module):
            weight = module.get_parameter("weight")
            if weight.numel() >= MIN_ONEDNN_ELEMENTS and _has_onednn_kernel(weight.dtype):
                vars(module)["cpu_linear"] = onednn_linear


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [..., in] @ weight [out, in].T + bias [out] with oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def _has_onednn_kernel(dtype: torch.dtype) -> bool:
    """Return whether this build of oneDNN has a linear kernel for a dtype; many lack float16."""
    try:
        onednn_linear(torch.zeros(1, 8, dtype=dtype), torch.zeros(8, 8, dtype=dtype))
    except RuntimeError:
        return False
    return True
