"""The weights of one rank's part of a vLLM model that several ranks share.

Which part of each parameter of the checkpoint it holds is worked out from their shapes, and not
taken on trust but tried once, on the weights vLLM itself has read from the model directory. Where
it is so, others may fill them where they lie; every other model goes through `reload_weights`.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.engines.vllm.weight_loader import (
    iter_stored_tensors,
    keep_plain_linears,
    list_source_names,
    use_onednn,
)
from streamrl.errors import WeightsError
from streamrl.resharding import FusedComponent, TensorBox, TensorSpec
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import LoadVerification
from streamrl.weights.lora_merge import load_stored_weights
from streamrl.weights.parameters import ParameterSet

#: vLLM's worker of this rank.
VllmWorker = Any
#: A name of the checkpoint and the shape of it.
NamedShape = tuple[str, tuple[int, ...]]
#: A name, the box of it that is here, and where that lies.
LocalPiece = tuple[str, TensorBox, Tensor]


class PartialWeightLoader:
    """The parameters of a worker's part of the model; belongs to the worker's thread."""

    def __init__(
        self, worker: VllmWorker, parameters: ParameterSet, model_path: str, team: RankGroup
    ) -> None:
        """`parameters` and `model_path` are of the directory the worker has read.

        Which parts of the parameters these are is found out at the first `get_storage`, which has
        to come before the first `put`.
        """
        self._worker = worker
        self._model: torch.nn.Module = worker.get_model()
        self._is_on_cpu = all(p.device.type == "cpu" for p in self._model.parameters())
        self._parameters = parameters
        self._model_path = model_path
        self._rank_group = team
        if self._is_on_cpu:
            use_onednn(self._model)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        """Serve a full set of parameters, of which the worker copies its own; the bytes of those.

        The other ranks must do so, too, before anything is computed.
        """
        with keep_plain_linears() if self._is_on_cpu else nullcontext():
            stored = iter_stored_tensors(self._model_path, tensors)
            self._worker.reload_weights(weights_iterator=stored)
        if self._is_on_cpu:
            use_onednn(self._model)
        return sum(parameter.nbytes for parameter in self._model.parameters()), LoadVerification()

    def get_storage(self) -> ShardStorage | None:
        """Where what is here lies, by the first of its names; see `WeightLoader.get_storage`."""
        views: dict[str, list[tuple[TensorBox, Tensor]]] = {}
        for name, box, view in self._local_pieces:
            views.setdefault(self._parameters.get_first_name(name), []).append((box, view))
        return ShardStorage(views) if views else None

    @cached_property
    def _local_pieces(self) -> list[LocalPiece]:
        if self._worker.model_config.quantization is not None:
            return []
        return find_local_pieces(self._model, self._parameters, self._model_path, self._rank_group)


def find_local_pieces(
    model: torch.nn.Module, parameters: ParameterSet, model_path: str, team: RankGroup
) -> list[LocalPiece]:
    """What the parameters of a rank's model are of the checkpoint; none if they do not fit.

    vLLM has just read the model from `model_path`: if the boxes of the tensors there are what its
    parameters hold, so they will be for every later version.
    """
    # Only models that take adapters or quantisation say what they merge.
    merged: Any = model.packed_modules_mapping if hasattr(model, "packed_modules_mapping") else {}
    found: list[LocalPiece] = []
    used: set[str] = set()
    for path, parameter in model.named_parameters():
        names = list_source_names(path, merged)
        if any(name not in parameters.shapes for name in names):
            return []
        module = model.get_submodule(path.rpartition(".")[0])
        wholes = [(name, parameters.shapes[name]) for name in names]
        pieces = _match_parameter(module, parameter.data, wholes, team)
        if pieces is None:
            return []
        used.update(names)
        found += pieces
    tied = {name for names in parameters.tied_groups if names & used for name in names}
    fits = parameters.shapes.keys() == used | tied
    return found if fits and _have_equal_values(found, parameters, model_path) else []


def _match_parameter(
    module: torch.nn.Module, held: Tensor, wholes: Sequence[NamedShape], team: RankGroup
) -> list[LocalPiece] | None:
    """The boxes of some tensors, merged by their rows, that make up a parameter of this rank."""
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, VocabParallelEmbedding):
        at = module.shard_indices
        return _match_rows(held, wholes, at.org_vocab_start_index, at.org_vocab_end_index)
    if len(wholes) > 1:
        # Keys and values may have fewer heads than there are ranks.
        heads = module.total_num_kv_heads if isinstance(module, QKVParallelLinear) else None
        return _match_merged(held, wholes, team, [None, *([heads] * (len(wholes) - 1))])
    return _match_split(held, wholes[0], team)


def _match_rows(
    held: Tensor, wholes: Sequence[NamedShape], start: int, stop: int
) -> list[LocalPiece] | None:
    """Some rows, which vLLM pads; the last ranks may have none but those."""
    ((name, shape),) = wholes
    if held.shape[1:] != shape[1:]:
        return None
    if start >= stop:
        return []
    return [(name, TensorBox.from_shape(shape).narrow(0, start, stop), held[: stop - start])]


def _match_split(held: Tensor, whole: NamedShape, team: RankGroup) -> list[LocalPiece] | None:
    """All of a tensor, or this rank's part along the dimension that is shorter here."""
    name, shape = whole
    local = tuple(held.shape)
    if local == shape:
        return [(name, TensorBox.from_shape(shape), held)]
    for dim, size in enumerate(shape):
        if (*shape[:dim], size // team.size, *shape[dim + 1 :]) == local and not size % team.size:
            start = team.group_rank * local[dim]
            return [
                (name, TensorBox.from_shape(shape).narrow(dim, start, start + local[dim]), held)
            ]
    return None


def _match_merged(
    held: Tensor, wholes: Sequence[NamedShape], team: RankGroup, heads: Sequence[int | None]
) -> list[LocalPiece] | None:
    """Of each tensor this rank's rows, one behind the other; what has heads is split by them."""
    found, begin = [], 0
    for (name, shape), units in zip(wholes, heads, strict=True):
        try:
            spec = TensorSpec(name, shape, (0,), 0, (FusedComponent(shape[0], units),))
            (box,) = spec.split_tensor(team.group_rank, team.size)
        except ValueError:
            return None
        stop = begin + box.shape[0]
        if stop > len(held) or held.shape[1:] != shape[1:]:
            return None
        found.append((name, box, held[begin:stop]))
        begin = stop
    return found if begin == len(held) else None


def _have_equal_values(
    pieces: Sequence[LocalPiece], parameters: ParameterSet, model_path: str
) -> bool:
    """Whether these are their values now, to the last bit of their own type."""
    stored = load_stored_weights(model_path)
    try:
        full = parameters.expand_tied({n: t for n, t in stored.items() if n in parameters.shapes})
    except WeightsError:
        return False
    # On the CPU: a GPU need not have room for any of it twice.
    return all(
        torch.equal(view.cpu(), full[name][box.slices].to(view.dtype)) for name, box, view in pieces
    )
