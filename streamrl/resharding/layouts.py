"""Layouts: the part of each tensor that each rank stores, and its place in memory.

A shard is the data that a rank stores of a tensor: a local tensor with its own shape, or a flat
range of its elements. The pieces of a shard map boxes of the whole tensor to offsets and strides in
that storage, so every piece is a strided view.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from streamrl.resharding.boxes import TensorBox, iter_flat_boxes
from streamrl.resharding.grids import RankAssignment
from streamrl.resharding.tensor_specs import (
    ModelSpec,
    TensorSpec,
    list_stage_positions,
    split_stages_evenly,
)


@dataclass(frozen=True)
class ShardPiece:
    """Box of the whole tensor and its place in a shard's memory: offset and strides in elements."""

    box: TensorBox
    offset: int
    strides: tuple[int, ...]

    def narrow_to(self, box: TensorBox) -> "ShardPiece":
        """Return the piece of the smaller `box`, which must lie inside this piece."""
        dims = zip(box.start, self.box.start, self.strides, strict=True)
        return ShardPiece(
            box,
            self.offset + sum((low - piece_start) * stride for low, piece_start, stride in dims),
            self.strides,
        )


@dataclass(frozen=True)
class TensorShard:
    """Data that a rank stores of a tensor.

    shape: of the rank's local tensor. box_origins: boxes of the whole tensor that the local tensor
    contains, each with the index where it begins there. flat_range: elements of the local tensor
    that are stored, counted in row-major order; None for all.
    """

    tensor: str
    shape: tuple[int, ...]
    box_origins: tuple[tuple[TensorBox, tuple[int, ...]], ...]
    flat_range: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """Number of elements that the rank stores."""
        start, stop = self._resolved_range
        return stop - start

    @property
    def boxes(self) -> list[TensorBox]:
        """Boxes of the whole tensor that the rank stores; disjoint."""
        return [piece.box for piece in self.pieces]

    @cached_property
    def pieces(self) -> tuple[ShardPiece, ...]:
        """Stored boxes with their offsets and strides in the shard's storage."""
        strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        start, stop = self._resolved_range
        pieces = []
        for local in iter_flat_boxes(self.shape, start, stop):
            for box, origin in self.box_origins:
                common = local.intersect(_shift_box(box, box.start, origin))
                if common:
                    offset = sum(
                        i * stride for i, stride in zip(common.start, strides, strict=True)
                    )
                    pieces.append(
                        ShardPiece(_shift_box(common, origin, box.start), offset - start, strides)
                    )
        return tuple(pieces)

    def chunk(self, dim: int, index: int, count: int) -> "TensorShard | None":
        """Return chunk `index` of `count` along `dim` of the local tensor, as in torch.chunk.

        Returns None if the chunk is empty.
        """
        size = -(-self.shape[dim] // count)
        start, stop = index * size, min((index + 1) * size, self.shape[dim])
        if start >= stop:
            return None
        window = TensorBox.from_shape(self.shape).narrow(dim, start, stop)
        box_origins = []
        for box, origin in self.box_origins:
            common = window.intersect(_shift_box(box, box.start, origin))
            if common:
                box_origins.append(
                    (_shift_box(common, origin, box.start), _shift_box(common, window.start).start)
                )
        return TensorShard(self.tensor, window.shape, tuple(box_origins))

    def chunk_flat(self, index: int, count: int) -> "TensorShard | None":
        """Return part `index` of `count` equal parts of the local tensor, as in ZeRO.

        A part is a range of elements in row-major order. The last part may be shorter or None.
        """
        size = -(-math.prod(self.shape) // count)
        start, stop = index * size, min((index + 1) * size, math.prod(self.shape))
        if start >= stop:
            return None
        return TensorShard(self.tensor, self.shape, self.box_origins, (start, stop))

    @property
    def _resolved_range(self) -> tuple[int, int]:
        """`flat_range`, or the range of all elements."""
        return self.flat_range or (0, math.prod(self.shape))


def _shift_box(
    box: TensorBox, origin: tuple[int, ...], to: tuple[int, ...] | None = None
) -> TensorBox:
    """Move the box so that index `origin` becomes index `to` (default: zeros)."""
    shift = [new - old for new, old in zip(to or (0,) * len(origin), origin, strict=True)]
    return TensorBox(
        tuple(low + offset for low, offset in zip(box.start, shift, strict=True)),
        tuple(high + offset for high, offset in zip(box.stop, shift, strict=True)),
    )


@dataclass(frozen=True)
class ModelLayout:
    """Shards that every rank stores, by rank and tensor name. A rank may have no shards."""

    model: ModelSpec
    shards: Mapping[int, Mapping[str, TensorShard]]

    @property
    def ranks(self) -> list[int]:
        return sorted(self.shards)

    def get_boxes(self, rank: int, tensor: str) -> list[TensorBox]:
        """Return the boxes of a tensor that a rank stores; empty if none."""
        shard = self.shards.get(rank, {}).get(tensor)
        return shard.boxes if shard else []


def create_layout(model: ModelSpec, assignment: RankAssignment) -> ModelLayout:
    """Return the layout of a model with pipeline and tensor parallelism, equal in every replica.

    Raises ValueError if a tensor does not divide, or with more stages than pipeline positions.
    """
    counts = split_stages_evenly(model.num_pipeline_positions, assignment.pp_size)
    stage_positions = [set(positions) for positions in list_stage_positions(counts)]
    shards_by_coords: dict[tuple[int, int], dict[str, TensorShard]] = {}
    shards = {}
    for rank in assignment.ranks:
        coords = assignment.get_coordinates(rank)
        if (coords.pp_rank, coords.tp_rank) not in shards_by_coords:
            shards_by_coords[coords.pp_rank, coords.tp_rank] = {
                spec.name: create_tensor_shard(spec, coords.tp_rank, assignment.tp_size)
                for spec in model.tensors
                if stage_positions[coords.pp_rank].intersection(spec.pipeline_positions)
            }
        shards[rank] = shards_by_coords[coords.pp_rank, coords.tp_rank]
    return ModelLayout(model, shards)


def create_tensor_shard(spec: TensorSpec, index: int, count: int) -> TensorShard:
    """Return the shard of tensor rank `index` of `count`: its part of each fused component."""
    boxes = spec.split_tensor(index, count)
    if spec.split_dim is None:
        return create_whole_shard(spec.name, spec.shape)
    dim = spec.split_dim
    box_origins = []
    length = 0
    for box in boxes:
        box_origins.append((box, (*(0,) * dim, length, *(0,) * (len(spec.shape) - dim - 1))))
        length += box.shape[dim]
    shape = (*spec.shape[:dim], length, *spec.shape[dim + 1 :])
    return TensorShard(spec.name, shape, tuple(box_origins))


def create_whole_shard(tensor: str, shape: tuple[int, ...]) -> TensorShard:
    """Return the shard of a rank that stores all elements of a tensor."""
    return TensorShard(tensor, shape, ((TensorBox.from_shape(shape), (0,) * len(shape)),))


def partition_fsdp2(layout: ModelLayout, groups: Sequence[Sequence[int]]) -> ModelLayout:
    """Return the layout in which each rank of a group keeps a chunk of every shard (FSDP2).

    The ranks of a group must hold the same shards in `layout`. Over tensor parallelism this matches
    DTensor's Shard(0), or its strided shard if tensor parallelism splits the same dimension.
    Scalars stay whole.
    """

    def chunk(shard: TensorShard, index: int, count: int) -> TensorShard | None:
        return shard.chunk(0, index, count) if shard.shape else shard

    return partition_shards(layout, groups, chunk)


def partition_shards(
    layout: ModelLayout,
    groups: Sequence[Sequence[int]],
    partition: Callable[[TensorShard, int, int], TensorShard | None],
) -> ModelLayout:
    """Divide the shards of each group among its ranks.

    partition: function of (shard, index of the rank in the group, size of the group) that returns
    the rank's part. The groups hold every rank of the layout once.
    """
    shards: dict[int, dict[str, TensorShard]] = {}
    for group in groups:
        for index, rank in enumerate(group):
            parts = (partition(shard, index, len(group)) for shard in layout.shards[rank].values())
            shards[rank] = {shard.tensor: shard for shard in parts if shard}
    return ModelLayout(layout.model, shards)
