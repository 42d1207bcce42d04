"""Parts of checkpoint parameters in vLLM's model, found by names, shapes and values."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from streamrl.engines.vllm.load_check import list_source_names
from streamrl.errors import WeightsError
from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.storage import ShardStorage
from streamrl.resharding.tensor_specs import FusedComponent, TensorSpec
from streamrl.weights.parameters import ParameterSet

#: Checkpoint name and full shape of a parameter.
NamedShape = tuple[str, tuple[int, ...]]
#: Checkpoint name, box of the parameter that this rank holds, and its view in vLLM's memory.
LocalPiece = tuple[str, TensorBox, Tensor]
CHUNK_BYTES = 64 << 20
"""Bytes of a parameter that are compared at once."""


def find_local_pieces(
    model: torch.nn.Module,
    parameters: ParameterSet,
    stored: Mapping[str, Tensor],
    *,
    index: int = 0,
    num_ranks: int = 1,
) -> dict[str, list[LocalPiece]]:
    """Map each parameter of vLLM's model to the parts of checkpoint parameters that it holds.

    The model is that of rank `index` of `num_ranks` tensor-parallel ranks. Returns an empty dict if
    any parameter cannot be mapped. Relies on vLLM having just read the tensors `stored`: if the
    parts have equal values now, the mapping holds for every later version.
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
    return pieces if fits and _have_equal_values(flat, parameters, stored) else {}


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


def _have_equal_values(
    pieces: Sequence[LocalPiece], parameters: ParameterSet, stored: Mapping[str, Tensor]
) -> bool:
    """Return whether the pieces equal the stored tensors bit by bit, in their dtype."""
    full = stored
    if not stored.keys() >= parameters.shapes.keys():
        try:
            known = {n: t for n, t in stored.items() if n in parameters.shapes}
            full = parameters.expand_tied(known)
        except WeightsError:
            return False
    return all(_equals(view, full[name][box.slices]) for name, box, view in pieces)


def _equals(view: Tensor, published: Tensor) -> bool:
    """Compare on the device of `view`, by chunks: a GPU may lack memory for a copy."""
    if not view.ndim:
        return torch.equal(view, published.to(view.device, view.dtype))
    rows = max(1, CHUNK_BYTES * len(view) // max(view.nbytes, 1))
    return all(
        torch.equal(part, other.to(view.device, view.dtype))
        for part, other in zip(view.split(rows), published.split(rows), strict=True)
    )
