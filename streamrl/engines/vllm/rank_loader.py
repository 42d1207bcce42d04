"""Weight loader in the process of a vLLM worker: each rank reads its own slices of a version.

vLLM's own loader gets every tensor of a version as a view of the published memory, cuts out the
slices of its rank and copies them; no other byte of the version is read. `ReadRecorder` notes the
slices. After the first versions, `LoadCheck` compares what the rank read with what its model holds.

The slices of the first version are the rank's layout. The layouts of all ranks must cover the
model, and later versions must read the same slices: `plan_loads` checks the first, `RankLoader` the
second. Together with the sums of each rank, every rank is shown to hold its part of what was
published. A publisher that knows the layout can send slices alone (`load_slices`).
"""

import copy
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.vllm.load_check import FingerprintsByDtype, LoadCheck, TensorFingerprint
from streamrl.engines.vllm.local_pieces import (
    find_local_pieces,
    get_merged_modules,
    make_storage,
)
from streamrl.engines.vllm.plain_layers import choose_linears, keep_plain_linears
from streamrl.files.hf_config import RECOMPUTED_TENSORS
from streamrl.resharding.boxes import TensorBox, merge_boxes, subtract_boxes
from streamrl.resharding.layouts import ModelLayout, TensorShard, create_whole_shard
from streamrl.resharding.plans import CopyPlan, NodeTopology, plan_copies
from streamrl.resharding.storage import ShardStorage
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec
from streamrl.weights import LoadVerification
from streamrl.weights.parameters import MergedWeights, ParameterSet, load_stored_weights
from streamrl.weights.rank_slices import SliceLayout, make_slice_name
from streamrl.weights.versions import NUM_INITIAL_CHECKS

#: vLLM's worker of a rank.
VllmWorker = Any
#: Slice that was read: tensor, storage of a copy, offset, shape and strides.
ReadKey = tuple[str, int, int, tuple[int, ...], tuple[int, ...]]
NO_VALUES = TensorFingerprint(0, 0.0, 0.0)
PUBLISHER = -1
"""Rank of the publisher in the plan of a load."""
COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
"""Operations whose result has the values of their first argument."""


@dataclass
class WatchedTensor:
    """Tensor whose reads are recorded, and what was read so far.

    address: of the first element. boxes: slices, disjoint. prints: of the values that went into a
    model, by dtype.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    address: int
    boxes: list[TensorBox] = field(default_factory=list)
    prints: dict[torch.dtype, TensorFingerprint] = field(default_factory=dict)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "WatchedTensor":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.itemsize, tensor.data_ptr())

    def find_address(self, box: TensorBox) -> int:
        """Return the address of the first element of a box."""
        return self.address + self.itemsize * sum(map(mul, box.start, self.strides))

    def find_box(
        self, address: int, view_shape: Sequence[int], view_strides: Sequence[int]
    ) -> TensorBox:
        """Return the box of a view; the whole tensor if a view of another shape is no box."""
        rest = (address - self.address) // self.itemsize
        order = sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])
        starts = dict.fromkeys(order, 0)
        for dim in order:
            if self.shape[dim] > 1:
                starts[dim], rest = divmod(rest, self.strides[dim])
        sizes = {
            stride: size for stride, size in zip(view_strides, view_shape, strict=True) if size > 1
        }
        start = tuple(starts[dim] for dim in range(len(self.shape)))
        stop = tuple(
            low + sizes.pop(stride, 1) for low, stride in zip(start, self.strides, strict=True)
        )
        is_box = not sizes and rest == 0 and all(map(int.__le__, stop, self.shape))
        return TensorBox(start, stop) if is_box else TensorBox.from_shape(self.shape)


class ReadRecorder(TorchDispatchMode):
    """Records, while active, which slices of watched tensors are read: by a copy into a model."""

    def __init__(self, load_check: LoadCheck | None) -> None:
        """Create a recorder; with `load_check` it also sums what is read."""
        super().__init__()
        self.num_bytes = 0
        self.watched: dict[str, WatchedTensor] = {}
        self._load_check = load_check
        # A weak reference keeps the storage's number from being used again.
        self._names: dict[int, tuple[str, bool, StorageWeakRef]] = {}
        self._first_names: dict[Any, tuple[str, StorageWeakRef]] = {}
        self._seen: set[ReadKey] = set()

    def watch(self, name: str, tensor: Tensor) -> Tensor:
        """Return an alias of a tensor, whose reads are recorded under its name from now on."""
        alias = torch.from_dlpack(tensor.detach())
        storage = tensor.untyped_storage()
        place = storage._cdata, tensor.storage_offset(), tuple(tensor.shape)
        name, _ = self._first_names.setdefault(place, (name, StorageWeakRef(storage)))
        if name in self.watched:  # another name of a tied tensor
            self._register(name, alias, is_copy=False)
            return alias
        dtypes = () if self._load_check is None else self._load_check.dtypes
        self.watched[name] = WatchedTensor.from_tensor(alias)
        self.watched[name].prints = dict.fromkeys(dtypes, NO_VALUES)
        self._register(name, alias, is_copy=False)
        return alias

    @property
    def prints(self) -> dict[str, FingerprintsByDtype]:
        """Sums of the values that went into the model, by tensor; zero for unread ones."""
        return {name: watched.prints for name, watched in self.watched.items()}

    def sort_boxes(self) -> dict[str, list[TensorBox]]:
        """Return the slices of each tensor that were read."""
        return {name: sorted(watched.boxes) for name, watched in self.watched.items()}

    def find_layout(self, tensors: Mapping[str, Tensor]) -> dict[str, list[TensorBox]]:
        """Return the slices that were read of tensors in whose memory the watched ones lie."""
        owners = {n: WatchedTensor.from_tensor(tensor) for n, tensor in tensors.items()}
        order = sorted(owners, key=lambda name: owners[name].address)
        for watched in self.watched.values():
            for box in watched.boxes:
                address = watched.find_address(box)
                index = bisect_right(order, address, key=lambda name: owners[name].address) - 1
                name = order[max(index, 0)]
                if 0 <= address - owners[name].address < tensors[name].nbytes:
                    found = owners[name].find_box(address, box.shape, watched.strides)
                    owners[name].boxes += subtract_boxes([found], owners[name].boxes)
        return {n: merge_boxes(owner.boxes) for n, owner in owners.items() if owner.boxes}

    def _register(self, name: str, tensor: Tensor, *, is_copy: bool) -> None:
        storage = tensor.untyped_storage()
        self._names[storage._cdata] = name, is_copy, StorageWeakRef(storage)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; record the watched tensors that it reads."""
        result = function(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.is_meta:
            return result
        storage = result.untyped_storage()._cdata
        for tensor in args if function.overloadpacket is not torch.ops.aten.cat else args[0]:
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                continue
            number = tensor.untyped_storage()._cdata
            if number in self._names and number != storage:
                name, is_copy, _ = self._names[number]
                self._record(name, tensor, is_copy)
                if function in COPIES:
                    self._register(name, result, is_copy=True)
                else:
                    self._sum(name, tensor, is_copy)
        return result

    def _record(self, name: str, view: Tensor, is_copy: bool) -> None:
        """Count the bytes of a slice of the published memory, and add its box."""
        if is_copy or not view.numel():
            return
        watched = self.watched[name]
        self.num_bytes += view.nbytes
        box = watched.find_box(view.data_ptr(), view.shape, view.stride())
        watched.boxes += subtract_boxes([box], watched.boxes)

    def _sum(self, name: str, view: Tensor, is_copy: bool) -> None:
        """Add the values of a slice to the sums of its tensor, once."""
        # Names of a tied tensor have an alias each; copies of slices are storages of their own.
        number = view.untyped_storage()._cdata if is_copy else 0
        key = (name, number, int(view.storage_offset()), tuple(view.shape), view.stride())
        if self._load_check is not None and key not in self._seen:
            self._seen.add(key)
            prints = self.watched[name].prints
            for dtype, fingerprint in self._load_check.make_fingerprints(view).items():
                prints[dtype] = TensorFingerprint.from_fingerprints([prints[dtype], fingerprint])


@dataclass(frozen=True)
class RankLoad:
    """Load of a version on one rank.

    num_bytes: bytes of the published memory that the rank read. shapes, boxes: of every tensor, and
    its slices that the rank read; empty if they are those of the last load. layout: what the rank
    reads of later versions; empty if it is unknown.
    """

    num_bytes: int
    verification: LoadVerification
    shapes: Mapping[str, tuple[tuple[int, ...], int]]
    boxes: Mapping[str, Sequence[TensorBox]]
    layout: SliceLayout = field(default_factory=dict)


class RankLoader:
    """Loads versions into the model of one vLLM worker, in the worker's process."""

    layouts: Sequence[SliceLayout] = ()

    def __init__(
        self,
        worker: VllmWorker,
        parameters: ParameterSet,
        model_path: str,
        *,
        is_loaded: bool,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Prepare loading into tensor-parallel rank `rank` of `num_ranks`.

        is_loaded: vLLM has just read the model directory; otherwise its parameters have no values
        yet.
        """
        self._worker = worker
        self._parameters = parameters
        self.rank, self._num_ranks = rank, num_ranks
        is_split = num_ranks > 1
        self._model: torch.nn.Module = worker.get_model()
        self._model_path = model_path
        self._is_on_cpu = all(p.device.type == "cpu" for p in self._model.parameters())
        # vLLM packs the weights of experts.
        has_experts = any(n.endswith("w13_weight") for n, _ in self._model.named_parameters())
        self._needs_copy = self._is_on_cpu and (has_experts or (is_loaded and not is_split))
        # On a CPU, a model that is whole becomes views of each version instead.
        self._can_bind = not self._needs_copy and (is_split or not self._is_on_cpu)
        if self._is_on_cpu:
            choose_linears(self._model)
        self._boxes: dict[str, list[TensorBox]] | None = None
        self._layout: dict[str, list[TensorBox]] = {}
        self._storage: ShardStorage | None = None
        self._num_loads = 0
        #: The model holds the directory's values, to which the first load compares it.
        self._is_loaded = is_loaded
        self.load_check: LoadCheck | None = None
        if worker.vllm_config.model_config.quantization is None:
            self.load_check = LoadCheck(self._model, get_merged_modules(self._model))

    def _exclude_changed(self, check: LoadCheck) -> None:
        """Exclude layers that vLLM changed when it read the model directory from comparisons."""
        stored = load_stored_weights(self._model_path)
        if self._num_ranks > 1:  # only a load shows which slices the rank reads
            recorder = ReadRecorder(check)
            self._reload(recorder, stored.items())
            self._boxes = recorder.sort_boxes()
            prints = recorder.prints
        else:
            prints = {name: check.make_fingerprints(tensor) for name, tensor in stored.items()}
        check.exclude_changed(prints)

    def set_parameters(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Load this rank's slices as `load` does; return the bytes read and the verification."""
        load = self.load(tensors)
        return load.num_bytes, load.verification

    def get_storage(self) -> ShardStorage | None:
        """Return views of this rank's parameters, for resharding to write into.

        Call it before the first load: it compares vLLM's values with the model directory's. Returns
        None if `find_local_pieces` finds no mapping.
        """
        return self._served_storage

    @cached_property
    def _served_storage(self) -> ShardStorage | None:
        return self._find_storage(load_stored_weights(self._model_path))

    def load(self, tensors: Mapping[str, Tensor]) -> RankLoad:
        """Load this rank's slices of all parameters, and compare the first versions.

        After an exception the model may mix old and new parameters.
        """
        is_first = self._num_loads == 0
        check = self._begin_load()
        if is_first and self._is_loaded and check is not None:
            self._exclude_changed(check)
        recorder = ReadRecorder(check)
        if self._storage is None:
            self._reload(recorder, iter_stored_tensors(self._model_path, tensors))
        else:
            copy_boxes(recorder, tensors, self._storage)
        boxes = recorder.sort_boxes()
        expected, self._boxes = self._boxes or boxes, boxes
        verification = LoadVerification()
        if check is not None:
            verification = check.compare_loaded(recorder.prints)
        if is_first and self._can_bind and not verification.differing_names:
            # vLLM's own loader has read this version: what lies where is seen by its values.
            self._storage = self._find_storage(tensors)
            if self._storage is not None:
                self._boxes = self._storage.list_boxes()
        if is_first and not isinstance(tensors, MergedWeights):
            published = {name: tensors[name] for name in self._parameters.unique_names}
            self._layout = recorder.find_layout(published) if self._storage is None else self._boxes
        moved = {n for n in boxes.keys() | expected.keys() if boxes.get(n) != expected.get(n)}
        differing = sorted({*moved, *verification.differing_names})
        return RankLoad(
            recorder.num_bytes,
            replace(verification, differing_names=differing),
            {n: (w.shape, w.itemsize) for n, w in recorder.watched.items() if is_first},
            boxes if is_first else {},
            {name: [box.slices for box in own] for name, own in self._layout.items() if is_first},
        )

    def _begin_load(self) -> LoadCheck | None:
        """Count a load; return the check of its values if they are compared."""
        self._num_loads += 1
        return self.load_check if self._num_loads <= NUM_INITIAL_CHECKS else None

    def load_slices(self, slices: Mapping[str, Tensor]) -> RankLoad:
        """Load slices that were packed by the layout of this rank's first load.

        slices: by `make_slice_name`. Names of tensors of which a slice is missing differ.
        """
        pieces = {
            (name, box): slices.get(make_slice_name(self.rank, name, box.slices))
            for name, boxes in self._layout.items()
            for box in boxes
        }
        missing = {name for (name, _), piece in pieces.items() if piece is None}
        found = {place: piece for place, piece in pieces.items() if piece is not None}
        if self._storage is None:
            load = self.load(self._spread_slices(found))
        else:
            load = self._copy_slices(found, self._storage)
        differing = sorted({*missing, *load.verification.differing_names})
        return replace(load, verification=replace(load.verification, differing_names=differing))

    def _copy_slices(
        self, slices: Mapping[tuple[str, TensorBox], Tensor], storage: ShardStorage
    ) -> RankLoad:
        for name, box, view in storage:
            if (name, box) in slices:
                view.copy_(slices[name, box])
        verification, check = LoadVerification(), self._begin_load()
        if check is not None:
            prints: dict[str, FingerprintsByDtype] = {}
            for (name, _), piece in slices.items():
                sums = prints.get(name, dict.fromkeys(check.dtypes, NO_VALUES))
                prints[name] = {
                    dtype: TensorFingerprint.from_fingerprints([sums[dtype], values])
                    for dtype, values in check.make_fingerprints(piece).items()
                }
            verification = check.compare_loaded(prints)
        return RankLoad(sum(piece.nbytes for piece in slices.values()), verification, {}, {})

    def _spread_slices(
        self, slices: Mapping[tuple[str, TensorBox], Tensor]
    ) -> Mapping[str, Tensor]:
        """Return whole tensors with values at the slices; pages without any take no memory."""
        dtypes = {name: piece.dtype for (name, _), piece in slices.items()}
        shapes = self._parameters.shapes
        whole = {
            name: torch.empty(shapes[name], dtype=dtypes.get(name))
            for name in self._parameters.unique_names
        }
        for (name, box), piece in slices.items():
            whole[name][box.slices] = piece
        return self._parameters.expand_tied(whole)

    def _find_storage(self, loaded: Mapping[str, Tensor]) -> ShardStorage | None:
        """Return views of the parameters that vLLM has read from `loaded`; None without a mapping.

        They are written in place: CUDA graphs read parameters at fixed addresses.
        """
        pieces = find_local_pieces(
            *(self._model, self._parameters, loaded), index=self.rank, num_ranks=self._num_ranks
        )
        return make_storage(itertools.chain(*pieces.values()), self._parameters)

    def _reload(self, recorder: ReadRecorder, stored: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors by vLLM's own loader."""
        watched = ((name, recorder.watch(name, tensor)) for name, tensor in stored)
        with recorder:
            if self._needs_copy:
                reload_through_copy(self._worker.vllm_config, self._model, watched)
            else:
                with keep_plain_linears() if self._is_on_cpu else nullcontext():
                    self._worker.reload_weights(weights_iterator=watched)
        if self._is_on_cpu:
            choose_linears(self._model)


def copy_boxes(
    recorder: ReadRecorder, tensors: Mapping[str, Tensor], storage: ShardStorage
) -> None:
    """Copy the boxes of a storage, from tensors by their first names."""
    source, name = None, ""
    with recorder:
        for tensor, box, view in storage:
            if source is None or tensor != name:
                name, source = tensor, recorder.watch(tensor, tensors[tensor])
            view.copy_(source[box.slices])


def plan_loads(loads: Sequence[RankLoad]) -> CopyPlan:
    """Return the plan of the bytes that each rank receives from the publisher, by rank.

    loads: first load of each rank.
    """
    shapes = loads[0].shapes
    specs = (TensorSpec(n, shape, (0,), itemsize=size) for n, (shape, size) in shapes.items())
    model = ModelSpec(tuple(specs), 1)
    whole = {name: create_whole_shard(name, shape) for name, (shape, _) in shapes.items()}
    shards = {
        rank: {
            name: TensorShard(name, shapes[name][0], tuple((box, box.start) for box in boxes))
            for name, boxes in load.boxes.items()
            if boxes
        }
        for rank, load in enumerate(loads)
    }
    return plan_copies(
        ModelLayout(model, {PUBLISHER: whole}), ModelLayout(model, shards), NodeTopology()
    )


def find_unread(loads: Sequence[RankLoad]) -> dict[str, list[int]]:
    """Return the tensors of which a part is read by no rank, with the ranks to blame.

    These are ranks that read nothing of the tensor, else ranks that read what is another's: rank r
    has slice r of equal ones.
    """
    unread: dict[str, list[int]] = {}
    for name, (shape, _) in loads[0].shapes.items():
        rank_boxes = [load.boxes.get(name, ()) for load in loads]
        if subtract_boxes([TensorBox.from_shape(shape)], itertools.chain(*rank_boxes)):
            empty = [rank for rank, boxes in enumerate(rank_boxes) if not boxes]
            misplaced = [
                rank
                for rank, boxes in enumerate(rank_boxes)
                if any(
                    size < full and start != rank * size
                    for box in boxes
                    for start, size, full in zip(box.start, box.shape, shape, strict=True)
                )
            ]
            unread[name] = empty or misplaced or list(range(len(loads)))
    return unread


def combine_verifications(loads: Sequence[RankLoad]) -> LoadVerification:
    """Return the verification of a load on all ranks; names of parameters name the rank, too."""
    faults = {rank: set(load.verification.differing_names) for rank, load in enumerate(loads)}
    for name, ranks in find_unread(loads).items():
        for rank in ranks:
            faults[rank].add(name)
    return LoadVerification(
        min(load.verification.num_compared for load in loads),
        tuple(f"{name} of rank {rank}" for rank, names in faults.items() for name in sorted(names)),
        tuple(dict.fromkeys(text for load in loads for text in load.verification.warnings)),
    )


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
        with KeepViews():
            tensors = revert_weight_conversion(skeleton, dict(tensors))
    stored = load_stored_weights(model_path)
    trained = dict(skeleton.named_parameters(remove_duplicate=False)).keys() | tensors.keys()
    for name in stored.keys() - trained:
        if not RECOMPUTED_TENSORS.search(name):
            yield name, stored[name]
    yield from tensors.items()


class KeepViews(TorchFunctionMode):
    """Makes `contiguous` return the tensor itself: a slice of all experts stays a view."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, except `contiguous`."""
        if function is Tensor.contiguous:
            return args[0]
        return function(*args, **(kwargs or {}))


def reload_through_copy(
    vllm_config: Any, model: torch.nn.Module, stored: Iterator[tuple[str, Tensor]]
) -> None:
    """Load a second vLLM model from `stored`, then move its tensors into `model`.

    The second model goes through the same packing, padding and layout changes as the first.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class StoredTensorLoader(DefaultModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            # Without vLLM's search for unread names: `LoadCheck` finds them, and names the rank.
            model.load_weights(stored)

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
