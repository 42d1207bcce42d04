"""The weights of a vLLM model that serves: how new ones take the place of old ones.

vLLM's own `reload_weights` reads every tensor, copies it and, on a CPU, packs each linear layer
anew. Where the parameters of vLLM's model are those of the checkpoint, laid end to end (q, k and v
are one parameter there, gate and up another), none of this is needed: a parameter becomes a view of
the tensors it was given, or, where they do not lie next to each other, a copy of them. Whether that
is so is not taken on trust but tried once, on the weights vLLM itself has read from the model
directory. On a GPU, parameters that are so may be filled where they lie; every other model
(quantised, of several processes, with what is loaded on a GPU) goes through `reload_weights`.

On a CPU the engine is built without packing, and its large linear layers multiply with oneDNN's
plain kernel: nearly as fast as the packed one, which would need a second copy of every weight.
"""

import copy
import ctypes
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.vllm.load_check import FingerprintsByDtype, LoadCheck
from streamrl.errors import WeightsError
from streamrl.files.hf_config import RECOMPUTED_TENSORS
from streamrl.resharding import TensorBox
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import LoadVerification
from streamrl.weights.logprob_probe import NUM_INITIAL_CHECKS
from streamrl.weights.lora_merge import MergedWeights, load_stored_weights
from streamrl.weights.parameters import ParameterSet

#: vLLM's LLMEngine.
VllmEngine = Any

#: Below this many elements of a weight torch's own product is as fast: oneDNN takes some 30 us to
#: make up its mind.
MIN_ONEDNN_ELEMENTS = 2**19


NUM_HEAD_AXES = 3
"""Axes of queries whose heads lie apart: token, head and value."""


@contextmanager
def keep_plain_linears() -> Iterator[None]:
    """A model that vLLM builds in here keeps its linear weights as they are.

    So do the classes of transformers that vLLM builds some models of: to be compiled, which is not
    done on a CPU, they would be changed for everybody in the process. Rotary positions of a part of
    each head, as DeepSeek's attention has them, are computed by torch: vLLM's CPU kernel leaves
    what does not lie in one piece as it was.
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

    def decorate_own(cls: type, *arguments: Any, **named: Any) -> type:
        is_own = cls.__module__.partition(".")[0] == "vllm"
        return decorate(cls, *arguments, **named) if is_own else cls

    _custom_ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda n, k, dtype: False
    decorators._support_torch_compile = decorate_own
    # Layers look up what they call when they are built.
    RotaryEmbedding.forward_cpu = rotate_any
    try:
        yield
    finally:
        _custom_ops._supports_onednn = supports_onednn
        layers.check_cpu_sgl_kernel = check_cpu_sgl_kernel
        decorators._support_torch_compile = decorate
        RotaryEmbedding.forward_cpu = rotate


def use_onednn(model: torch.nn.Module) -> None:
    """Let the large linear layers of a model with plain weights multiply with oneDNN."""
    for module in model.modules():
        if "cpu_linear" in vars(module):
            weight = module.get_parameter("weight")
            if weight.numel() >= MIN_ONEDNN_ELEMENTS and _has_onednn_kernel(weight.dtype):
                vars(module)["cpu_linear"] = onednn_linear


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def _has_onednn_kernel(dtype: torch.dtype) -> bool:
    """Whether this build of oneDNN has a kernel for a type; many have none for float16."""
    try:
        onednn_linear(torch.zeros(1, 8, dtype=dtype), torch.zeros(8, 8, dtype=dtype))
    except RuntimeError:
        return False
    return True


class WeightLoader:
    """The parameters of an engine's model; belongs to the engine's thread."""

    def __init__(self, engine: VllmEngine, parameters: ParameterSet, model_path: str) -> None:
        """Find out whether the model's parameters are those of the checkpoint.

        `parameters` and `model_path` are of the directory the engine was built from.
        """
        self._engine = engine
        self._model = _get_model(engine)
        self._is_on_cpu = all(p.device.type == "cpu" for p in self._model.parameters())
        self._parameters = parameters
        self._model_path = model_path
        self._is_plain = _is_one_plain_rank(engine)
        self._bound_parameters: list[BoundParameter] = []
        self._free_executor = ThreadPoolExecutor(1, "old-weights")
        if self._is_on_cpu:
            use_onednn(self._model)
        if self._is_on_cpu and self._is_plain:
            self._bound_parameters = bind_parameters(self._model, parameters, model_path)
        self._num_checked = 0
        self._load_check: LoadCheck | None = None
        if self._is_plain and not self._bound_parameters:
            merged = get_merged_modules(self._model)
            self._load_check = LoadCheck(self._model, load_stored_weights(model_path), merged)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Serve a full set of parameters, each asked for once; the bytes that were copied, or
        merged of adapters, and whether they have arrived, which the first few sets tell.

        What was not copied is used where it lies, and only read: it must stay unchanged until the
        next set is put. If this raises, the model is half old and half new.
        """
        if not self._bound_parameters:
            return self._reload_weights(tensors)
        before = [bound.live_tensors for bound in self._bound_parameters]
        num_bytes = sum(self._load_parameter(bound, tensors) for bound in self._bound_parameters)
        # To unmap a version takes as long as all else here: not while sampling stands still.
        self._free_executor.submit(before.clear)
        return num_bytes, LoadVerification(len(self._parameters.shapes))

    @staticmethod
    def _load_parameter(bound: "BoundParameter", tensors: Mapping[str, Tensor]) -> int:
        parts = {name: tensors[name] for name in bound.names}
        num_bytes = bound.load_parts(list(parts.values()))
        if num_bytes or not isinstance(tensors, MergedWeights):
            return num_bytes
        # What is looked at where it lies was laid down there only now.
        return sum(parts[name].nbytes for name in parts.keys() & tensors.merged_names)

    def get_storage(self) -> ShardStorage | None:
        """Where every parameter lies, by the first of its names, for others to fill there.

        To be asked for before the first `put`. It is to be filled while nothing is computed, and
        `put` is not to be called any more. None if the model's parameters are not those of the
        checkpoint.
        """
        bound = self._bound_parameters
        if self._is_plain and not self._is_on_cpu:
            # Only for this: captured graphs read the parameters where they are, never as views.
            bound = bind_parameters(self._model, self._parameters, self._model_path)
        views: dict[str, list[tuple[TensorBox, Tensor]]] = {}
        for each in bound:
            for name, rows in each.list_targets(self._parameters.shapes):
                whole = TensorBox.from_shape(self._parameters.shapes[name])
                views.setdefault(self._parameters.get_first_name(name), []).append((whole, rows))
        return ShardStorage(views) if views else None

    def _reload_weights(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        num_bytes, prints = 0, dict[str, FingerprintsByDtype]()
        check = self._load_check if self._num_checked < NUM_INITIAL_CHECKS else None
        self._num_checked += 1

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, tensor in iter_stored_tensors(self._model_path, tensors):
                num_bytes += tensor.nbytes
                if check is not None:
                    prints[name] = check.make_fingerprints(tensor)
                yield name, tensor

        if self._is_on_cpu:
            reload_through_copy(self._engine.vllm_config, self._model, counted())
            use_onednn(self._model)
        else:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": counted()})
        return num_bytes, LoadVerification() if check is None else check.compare_loaded(prints)


def iter_stored_tensors(
    model_path: str, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors by the names, and in the shapes, that they have in its directory.

    First what the directory holds besides parameters, as the biases of a router, which are not
    trained; without what every model computes anew. Where transformers keeps parameters as the
    directory does, each is asked for on its turn only; of others, as the weights of all experts in
    one, all are asked for at once.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

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
    """Have a model of vLLM take up what vLLM makes of a directory with these tensors in it.

    A second model is built and loaded as the first one was, so that what is packed, padded or laid
    out anew on the way is so again. Raises ValueError if a parameter gets no value.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class Given(DefaultModelLoader):
        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
            return stored

    beside, compilation = copy.copy(vllm_config), copy.copy(vllm_config.compilation_config)
    beside.compilation_config = compilation
    # The layers of the first model are known by their names there.
    compilation.static_forward_context = {}
    loader = Given(vllm_config.load_config)
    with set_current_vllm_config(beside), keep_plain_linears():
        loaded = loader.load_model(beside, vllm_config.model_config)
    found = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    for name, held in (*model.named_parameters(), *model.named_buffers()):
        held.data = found[name].data
    layers: Iterator[Any] = model.modules()
    for module in layers:
        if is_deferred_attention_layer(module):
            module.process_weights_after_loading(vllm_config.model_config.dtype)


class BoundParameter:
    """A parameter of vLLM's model and the tensors that make it up, one after the other."""

    def __init__(self, parameter: torch.nn.Parameter, names: tuple[str, ...]) -> None:
        self.names = names
        self._parameter = parameter
        #: What may be written into; nobody else has it. None while the parameter is a view.
        self._own_tensor: Tensor | None = parameter.data
        #: What a view looks at: memory lives as long as one of its tensors.
        self._viewed_tensors: Sequence[Tensor] = ()

    @property
    def live_tensors(self) -> tuple[Tensor, Sequence[Tensor]]:
        """What keeps the memory of its values alive."""
        return self._parameter.data, self._viewed_tensors

    def has_matching_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether tensors of these shapes, by name, make up the parameter.

        vLLM pads the rows of embeddings and heads.
        """
        if any(name not in shapes for name in self.names):
            return False
        rows, *rest = self._parameter.shape
        parts = [shapes[name] for name in self.names]
        num_rows = sum(part[0] for part in parts)
        padded = len(parts) == 1 and num_rows < rows and len(rest) == 1
        return (num_rows == rows or padded) and all(list(part[1:]) == rest for part in parts)

    def has_equal_values(self, parts: Sequence[Tensor]) -> bool:
        """Whether these are its values now, to the last bit of its own type."""
        start = 0
        for part in parts:
            rows = self._parameter.data[start : start + len(part)]
            # On the CPU: a GPU need not have room for any of it twice.
            if not torch.equal(rows.cpu(), part.to(rows.dtype)):
                return False
            start += len(part)
        return True

    def load_parts(self, parts: Sequence[Tensor]) -> int:
        """Take these values, as a view if that can be; the bytes that were copied."""
        parts = [part.detach() for part in parts]
        block = view_as_block(parts, self._parameter)
        if block is not None:
            self._parameter.data, self._own_tensor, self._viewed_tensors = block, None, parts
            return 0
        shapes = {n: tuple(part.shape) for n, part in zip(self.names, parts, strict=True)}
        num_bytes = 0
        for (_, rows), part in zip(self.list_targets(shapes), parts, strict=True):
            rows.copy_(part)
            num_bytes += rows.nbytes
        return num_bytes

    def list_targets(self, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, Tensor]]:
        """What to write the values of each name into, in memory of the parameter's own."""
        if self._own_tensor is None:
            self._own_tensor = torch.zeros_like(self._parameter)
        self._parameter.data, self._viewed_tensors = self._own_tensor, ()
        found, start = [], 0
        for name in self.names:
            stop = start + shapes[name][0]
            found.append((name, self._own_tensor[start:stop]))
            start = stop
        return found


def bind_parameters(
    model: torch.nn.Module, parameters: ParameterSet, model_path: str
) -> list[BoundParameter]:
    """Every parameter of vLLM's model with its names in the checkpoint; none if they do not fit.

    vLLM has just read the model from `model_path`: if the tensors there, laid end to end, are
    what its parameters hold, so they will be for every later version.
    """
    merged = get_merged_modules(model)
    bound = [
        BoundParameter(parameter, list_source_names(name, merged))
        for name, parameter in model.named_parameters()
    ]
    used = {name for each in bound for name in each.names}
    tied = {name for names in parameters.tied_groups if names & used for name in names}
    if parameters.shapes.keys() != used | tied:
        return []
    if not all(each.has_matching_shapes(parameters.shapes) for each in bound):
        return []
    stored = load_stored_weights(model_path)
    known = {name: tensor for name, tensor in stored.items() if name in parameters.shapes}
    try:
        full = parameters.expand_tied(known)
    except WeightsError:
        return []
    if not all(each.has_equal_values([full[name] for name in each.names]) for each in bound):
        return []
    return bound


def get_merged_modules(model: torch.nn.Module) -> Mapping[str, Sequence[str]]:
    """Return which modules of the checkpoint a module of vLLM's model takes together.

    Only models that take adapters or quantisation say so.
    """
    found: Any = model.packed_modules_mapping if hasattr(model, "packed_modules_mapping") else {}
    return dict(found)


def list_source_names(name: str, merged: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The checkpoint's names of what one parameter of vLLM is made of, in order.

    `merged` says which modules of the checkpoint a module of vLLM takes together.
    """
    path, _, kind = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    if module not in merged:
        return (name,)
    return tuple(f"{parent}.{source}.{kind}" for source in merged[module])


def view_as_block(parts: Sequence[Tensor], like: Tensor) -> Tensor | None:
    """The tensors as one, in the place of `like`, without a copy, if their bytes allow it.

    They do if the tensors follow each other in memory and have the type and place of `like`. The
    result does not keep that memory alive. Rows that vLLM has added to an embedding are left away:
    nothing looks them up, and logits are cut to the vocabulary.
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
    # Not by strides: the parts of one bucket may each have a storage of its own.
    num_bytes = sum(part.nbytes for part in parts)
    memory = (ctypes.c_byte * num_bytes).from_address(parts[0].data_ptr())
    return torch.frombuffer(memory, dtype=like.dtype).view(rows, *like.shape[1:])


def _get_model(engine: VllmEngine) -> torch.nn.Module:
    return engine.model_executor.driver_worker.worker.model_runner.get_model()


def _is_one_plain_rank(engine: VllmEngine) -> bool:
    parallel = engine.vllm_config.parallel_config
    return parallel.world_size == 1 and engine.model_config.quantization is None
