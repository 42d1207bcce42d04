"""Layouts: which rank holds which part of which tensor, and where in its memory.

A shard is what one rank stores of one tensor: a local tensor of its own shape, or a run of its
elements. Its pieces say which boxes of the whole tensor lie where in that storage, so that any
piece is a strided view of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from streamrl.resharding.boxes import TensorBox, count_elements, iter_flat_boxes
from streamrl.resharding.grids import RankAssignment
from streamrl.resharding.tensor_specs import (
    ModelSpec,
    TensorSpec,
    list_stage_positions,
    split_stages_evenly,
)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class ShardPiece:
    """A box of the whole tensor, and where it lies: offset and strides in elements."""

    box: TensorBox
    offset: int
    strides: tuple[int, ...]

    def narrow_to(self, box: TensorBox) -> "ShardPiece":
        """The part of it that is `box`, which lies inside."""
        steps = zip(box.start, self.box.start, self.strides, strict=True)
        return ShardPiece(
            box, self.offset + sum((low - own) * by for low, own, by in steps), self.strides
        )


@dataclass(frozen=True)
class TensorShard:
    """What a rank stores of a tensor.

    shape: that of the local tensor. parts: for each box of the whole tensor that lies in it, the
    index where it begins there. run: the elements of the local tensor, in row-major order, that
    are stored; None is all of them.
    """

    tensor: str
    shape: tuple[int, ...]
    box_origins: tuple[tuple[TensorBox, tuple[int, ...]], ...]
    flat_range: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """Elements stored."""
        start, stop = self._resolved_range
        return stop - start

    @property
    def boxes(self) -> list[TensorBox]:
        """The boxes of the whole tensor that are stored; disjoint."""
        return [piece.box for piece in self.pieces]

    @cached_property
    def pieces(self) -> tuple[ShardPiece, ...]:
        """What is stored, and where."""
        strides = row_major_strides(self.shape)
        start, stop = self._resolved_range
        found = []
        for local in iter_flat_boxes(self.shape, start, stop):
            for box, at in self.box_origins:
                common = local.intersect(_shift_box(box, box.start, at))
                if common:
                    offset = sum(i * by for i, by in zip(common.start, strides, strict=True))
                    found.append(
                        ShardPiece(_shift_box(common, at, box.start), offset - start, strides)
                    )
        return tuple(found)

    def chunk(self, dim: int, index: int, count: int) -> "TensorShard | None":
        """Chunk `index` of `count` along `dim` of the local tensor, as torch.chunk cuts it.

        None where nothing is left for it.
        """
        size = -(-self.shape[dim] // count)
        start, stop = index * size, min((index + 1) * size, self.shape[dim])
        if start >= stop:
            return None
        window = TensorBox.from_shape(self.shape).narrow(dim, start, stop)
        parts = []
        for box, at in self.box_origins:
            common = window.intersect(_shift_box(box, box.start, at))
            if common:
                parts.append(
                    (_shift_box(common, at, box.start), _shift_box(common, window.start).start)
                )
        return TensorShard(self.tensor, window.shape, tuple(parts))

    def chunk_flat(self, index: int, count: int) -> "TensorShard | None":
        """Part `index` of `count` of the local tensor's elements, as ZeRO cuts it.

        All parts have the same size but the last ones, which may be shorter or None.
        """
        size = -(-math.prod(self.shape) // count)
        start, stop = index * size, min((index + 1) * size, math.prod(self.shape))
        if start >= stop:
            return None
        return TensorShard(self.tensor, self.shape, self.box_origins, (start, stop))

    @property
    def _resolved_range(self) -> tuple[int, int]:
        return self.flat_range or (0, math.prod(self.shape))


def _shift_box(
    box: TensorBox, origin: tuple[int, ...], to: tuple[int, ...] | None = None
) -> TensorBox:
    """The box, counted from `to` (or zeros) instead of from `origin`."""
    shift = [new - old for new, old in zip(to or (0,) * len(origin), origin, strict=True)]
    return TensorBox(
        tuple(low + by for low, by in zip(box.start, shift, strict=True)),
        tuple(high + by for high, by in zip(box.stop, shift, strict=True)),
    )


@dataclass(frozen=True)
class ModelLayout:
    """The shards of every rank by tensor name. A rank without any may still be in it."""

    model: ModelSpec
    shards: Mapping[int, Mapping[str, TensorShard]]

    @property
    def ranks(self) -> list[int]:
        """Who has a part in it."""
        return sorted(self.shards)

    def get_boxes(self, rank: int, tensor: str) -> list[TensorBox]:
        """What of a tensor a rank holds; nothing where it is not in the layout."""
        shard = self.shards.get(rank, {}).get(tensor)
        return shard.boxes if shard else []

    def count_bytes(self, rank: int) -> int:
        """Bytes a rank stores."""
        sizes = {spec.name: spec.itemsize for spec in self.model.tensors}
        return sum(
            count_elements(s.boxes) * sizes[s.tensor] for s in self.shards.get(rank, {}).values()
        )


def create_layout(
    model: ModelSpec, seating: RankAssignment, *, stages: Sequence[int] | None = None
) -> ModelLayout:
    """Tensor-parallel shards in pipeline stages, the same in every replica.

    stages: how many places each stage holds; None shares them out evenly. Raises ValueError where a
    tensor does not divide or the stages do not fit.
    """
    counts = tuple(stages or split_stages_evenly(model.num_pipeline_positions, seating.pp_size))
    if (
        len(counts) != seating.pp_size
        or sum(counts) != model.num_pipeline_positions
        or min(counts) < 1
    ):
        raise ValueError(
            f"stages of {counts} places: must be {seating.pp_size}, in all"
            f" {model.num_pipeline_positions}"
        )
    places = [set(held) for held in list_stage_positions(counts)]
    made: dict[tuple[int, int], dict[str, TensorShard]] = {}
    shards = {}
    for rank in seating.ranks:
        at = seating.get_coordinates(rank)
        if (at.pp_rank, at.tp_rank) not in made:
            made[at.pp_rank, at.tp_rank] = {
                spec.name: create_tensor_shard(spec, at.tp_rank, seating.tp_size)
                for spec in model.tensors
                if places[at.pp_rank].intersection(spec.pipeline_positions)
            }
        shards[rank] = made[at.pp_rank, at.tp_rank]
    return ModelLayout(model, shards)


def create_tensor_shard(spec: TensorSpec, index: int, count: int) -> TensorShard:
    """What tensor rank `index` of `count` stores: its parts of the components in turn."""
    boxes = spec.split_tensor(index, count)
    if spec.split_dim is None:
        return create_whole_shard(spec.name, spec.shape)
    dim = spec.split_dim
    parts = []
    length = 0
    for box in boxes:
        parts.append((box, (*(0,) * dim, length, *(0,) * (len(spec.shape) - dim - 1))))
        length += box.shape[dim]
    shape = (*spec.shape[:dim], length, *spec.shape[dim + 1 :])
    return TensorShard(spec.name, shape, tuple(parts))


def create_whole_shard(tensor: str, shape: tuple[int, ...]) -> TensorShard:
    """All of a tensor."""
    return TensorShard(tensor, shape, ((TensorBox.from_shape(shape), (0,) * len(shape)),))


def partition_zero3(layout: ModelLayout, groups: Sequence[Sequence[int]]) -> ModelLayout:
    """The same, but the ranks of a group, which hold the same, each keep a run of every shard.

    This is how ZeRO stage 3 holds parameters.
    """
    return _partition_shards(
        layout, groups, lambda shard, index, count: shard.chunk_flat(index, count)
    )


def partition_fsdp2(
    layout: ModelLayout, groups: Sequence[Sequence[int]], *, dim: int = 0
) -> ModelLayout:
    """The same, but the ranks of a group, which hold the same, each keep a chunk along `dim`.

    This is how FSDP2 holds parameters, over tensor parallelism too: DTensor's Shard(dim), or its
    strided shard where tensor parallelism splits the same dimension. Scalars stay whole.
    """

    def part(shard: TensorShard, index: int, count: int) -> TensorShard | None:
        return shard.chunk(dim, index, count) if shard.shape else shard

    return _partition_shards(layout, groups, part)


def _partition_shards(
    layout: ModelLayout,
    groups: Sequence[Sequence[int]],
    part: Callable[[TensorShard, int, int], TensorShard | None],
) -> ModelLayout:
    shards: dict[int, dict[str, TensorShard]] = {}
    for group in groups:
        for index, rank in enumerate(group):
            held = layout.shards[rank]
            if rank in shards:
                raise ValueError(f"rank {rank} is in the groups more than once")
            if held != layout.shards[group[0]]:
                raise ValueError(f"ranks {group[0]} and {rank} of one group hold different shards")
            parts = (part(shard, index, len(group)) for shard in held.values())
            shards[rank] = {shard.tensor: shard for shard in parts if shard}
    if shards.keys() != layout.shards.keys():
        raise ValueError("the groups must have every rank of the layout")
    return ModelLayout(layout.model, shards)
