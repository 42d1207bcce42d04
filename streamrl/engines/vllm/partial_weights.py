"""Load weights into a rank of a tensor-parallel vLLM model that runs in trainer processes.

The part of each checkpoint parameter that the rank holds is inferred from shapes, then verified
once against the values that vLLM has read from the model directory. If the verification passes,
resharding can write into the parameters in place; otherwise weights go through vLLM's
`reload_weights`.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from streamrl.engines.vllm.load_check import list_source_names
from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.engines.vllm.weight_loader import (
    get_merged_modules,
    iter_stored_tensors,
    keep_plain_linears,
    use_onednn,
)
from streamrl.errors import WeightsError
from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.storage import ShardStorage
from streamrl.resharding.tensor_specs import FusedComponent, TensorSpec
from streamrl.weights import LoadVerification
from streamrl.weights.lora_merge import load_stored_weights
from streamrl.weights.parameters import ParameterSet

#: vLLM's worker of this rank.
VllmWorker = Any
#: Checkpoint name and full shape of a parameter.
NamedShape = tuple[str, tuple[int, ...]]
#: Checkpoint name, box of the parameter that this rank holds, and its view in vLLM's memory.
LocalPiece = tuple[str, TensorBox, Tensor]


class PartialWeightLoader:
    """Loads full tensors into one rank of a tensor-parallel vLLM model in a trainer process.

    vLLM keeps the rank's part of each tensor. `get_storage` returns views of these parts, which
    resharding writes in place. Callers hold the worker's lock during every call.
    """

    def __init__(
        self, worker: VllmWorker, parameters: ParameterSet, model_path: str, rank_group: RankGroup
    ) -> None:
        """Prepare loading into a worker that has just read the model directory `model_path`.

        Call `get_storage` before the first `load_weights`: it compares vLLM's values with the
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

    def load_weights(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Load this rank's part of all parameters; return the bytes copied and no verification.

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
        views: dict[str, list[tuple[TensorBox, Tensor]]] = {}
        for name, box, view in self._local_pieces:
            views.setdefault(self._parameters.get_first_name(name), []).append((box, view))
        return ShardStorage(views) if views else None

    @cached_property
    def _local_pieces(self) -> list[LocalPiece]:
        """Parts of checkpoint parameters that make up this rank's parameters; empty if unknown."""
        if self._worker.model_config.quantization is not None:
            return []
        return find_local_pieces(self._model, self._parameters, self._model_path, self._rank_group)


def find_local_pieces(
    model: torch.nn.Module, parameters: ParameterSet, model_path: str, rank_group: RankGroup
) -> list[LocalPiece]:
    """Map a rank's parameters in vLLM to the parts of checkpoint parameters that they hold.

    Returns an empty list if any parameter cannot be mapped. Relies on vLLM having just read the
    model from `model_path`: if the parts have equal values now, the mapping holds for every later
    version.
    """
    merged = get_merged_modules(model)
    pieces: list[LocalPiece] = []
    used_names: set[str] = set()
    for path, parameter in model.named_parameters():
        names = list_source_names(path, merged)
        if any(name not in parameters.shapes for name in names):
            return []
        module = model.get_submodule(path.rpartition(".")[0])
        full_shapes = [(name, parameters.shapes[name]) for name in names]
        matched = _match_parameter(module, parameter.data, full_shapes, rank_group)
        if matched is None:
            return []
        used_names.update(names)
        pieces += matched
    tied = {name for names in parameters.tied_groups if names & used_names for name in names}
    fits = parameters.shapes.keys() == used_names | tied
    return pieces if fits and _have_equal_values(pieces, parameters, model_path) else []


def _match_parameter(
    module: torch.nn.Module, local: Tensor, full_shapes: Sequence[NamedShape], rank_group: RankGroup
) -> list[LocalPiece] | None:
    """Map a parameter of vLLM's `module` to parts of checkpoint parameters by their shapes.

    `full_shapes` are the checkpoint parameters that this rank's tensor `local` may fuse.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices
        return _match_rows(
            local, full_shapes, indices.org_vocab_start_index, indices.org_vocab_end_index
        )
    if len(full_shapes) > 1:
        # With fewer key-value heads than ranks, vLLM replicates heads.
        heads = module.total_num_kv_heads if isinstance(module, QKVParallelLinear) else None
        return _match_merged(
            local, full_shapes, rank_group, [None, *([heads] * (len(full_shapes) - 1))]
        )
    return _match_split(local, full_shapes[0], rank_group)


def _match_rows(
    local: Tensor, full_shapes: Sequence[NamedShape], start: int, stop: int
) -> list[LocalPiece] | None:
    """Map rows of a vocabulary-parallel parameter; vLLM pads those of the last ranks."""
    ((name, shape),) = full_shapes
    if local.shape[1:] != shape[1:]:
        return None
    if start >= stop:
        return []
    return [(name, TensorBox.from_shape(shape).narrow(0, start, stop), local[: stop - start])]


def _match_split(
    local: Tensor, full_shape: NamedShape, rank_group: RankGroup
) -> list[LocalPiece] | None:
    """Map a parameter that is replicated, or split along the dimension in which it is shorter."""
    name, shape = full_shape
    local_shape = tuple(local.shape)
    if local_shape == shape:
        return [(name, TensorBox.from_shape(shape), local)]
    for dim, size in enumerate(shape):
        split_shape = (*shape[:dim], size // rank_group.size, *shape[dim + 1 :])
        if split_shape == local_shape and not size % rank_group.size:
            start = rank_group.group_rank * local_shape[dim]
            box = TensorBox.from_shape(shape).narrow(dim, start, start + local_shape[dim])
            return [(name, box, local)]
    return None


def _match_merged(
    local: Tensor,
    full_shapes: Sequence[NamedShape],
    rank_group: RankGroup,
    heads: Sequence[int | None],
) -> list[LocalPiece] | None:
    """Map a fused parameter: this rank's rows of several checkpoint parameters, concatenated.

    `heads` gives, for each, the number of heads by which vLLM splits it; None: by rows.
    """
    pieces, start = [], 0
    for (name, shape), units in zip(full_shapes, heads, strict=True):
        try:
            spec = TensorSpec(name, shape, (0,), 0, (FusedComponent(shape[0], units),))
            (box,) = spec.split_tensor(rank_group.group_rank, rank_group.size)
        except ValueError:
            return None
        stop = start + box.shape[0]
        if stop > len(local) or local.shape[1:] != shape[1:]:
            return None
        pieces.append((name, box, local[start:stop]))
        start = stop
    return pieces if start == len(local) else None


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
