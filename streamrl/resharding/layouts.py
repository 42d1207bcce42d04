"""Layouts: which rank holds which part of which tensor, and where in its memory.

A shard is what one rank stores of one tensor: a local tensor of its own shape, or a run of its
elements. Its pieces say which boxes of the whole tensor lie where in that storage, so that any
piece is a strided view of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from streamrl.resharding.boxes import Box, flat_boxes, total
from streamrl.resharding.grids import Seating
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec, even_stages, stage_places


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class Piece:
    """A box of the whole tensor, and where it lies: offset and strides in elements."""

    box: Box
    offset: int
    strides: tuple[int, ...]

    def within(self, box: Box) -> "Piece":
        """The part of it that is `box`, which lies inside."""
        steps = zip(box.start, self.box.start, self.strides, strict=True)
        return Piece(
            box, self.offset + sum((low - own) * by for low, own, by in steps), self.strides
        )


@dataclass(frozen=True)
class Shard:
    """What a rank stores of a tensor.

    shape: that of the local tensor. parts: for each box of the whole tensor that lies in it, the
    index where it begins there. run: the elements of the local tensor, in row-major order, that
    are stored; None is all of them.
    """

    tensor: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Box, tuple[int, ...]], ...]
    run: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """Elements stored."""
        start, stop = self._run
        return stop - start

    @property
    def boxes(self) -> list[Box]:
        """The boxes of the whole tensor that are stored; disjoint."""
        return [piece.box for piece in self.pieces]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What is stored, and where."""
        strides = row_major(self.shape)
        start, stop = self._run
        found = []
        for local in flat_boxes(self.shape, start, stop):
            for box, at in self.parts:
                common = local.meet(_moved(box, box.start, at))
                if common:
                    offset = sum(i * by for i, by in zip(common.start, strides, strict=True))
                    found.append(Piece(_moved(common, at, box.start), offset - start, strides))
        return tuple(found)

    def chunk(self, dim: int, index: int, count: int) -> "Shard | None":
        """Chunk `index` of `count` along `dim` of the local tensor, as torch.chunk cuts it.

        None where nothing is left for it.
        """
        size = -(-self.shape[dim] // count)
        start, stop = index * size, min((index + 1) * size, self.shape[dim])
        if start >= stop:
            return None
        window = Box.whole(self.shape).narrow(dim, start, stop)
        parts = []
        for box, at in self.parts:
            common = window.meet(_moved(box, box.start, at))
            if common:
                parts.append((_moved(common, at, box.start), _moved(common, window.start).start))
        return Shard(self.tensor, window.shape, tuple(parts))

    def flat_part(self, index: int, count: int) -> "Shard | None":
        """Part `index` of `count` of the local tensor's elements, as ZeRO cuts it.

        All parts have the same size but the last ones, which may be shorter or None.
        """
        size = -(-math.prod(self.shape) // count)
        start, stop = index * size, min((index + 1) * size, math.prod(self.shape))
        if start >= stop:
            return None
        return Shard(self.tensor, self.shape, self.parts, (start, stop))

    @property
    def _run(self) -> tuple[int, int]:
        return self.run or (0, math.prod(self.shape))


def _moved(box: Box, origin: tuple[int, ...], to: tuple[int, ...] | None = None) -> Box:
    """The box, counted from `to` (or zeros) instead of from `origin`."""
    shift = [new - old for new, old in zip(to or (0,) * len(origin), origin, strict=True)]
    return Box(
        tuple(low + by for low, by in zip(box.start, shift, strict=True)),
        tuple(high + by for high, by in zip(box.stop, shift, strict=True)),
    )


@dataclass(frozen=True)
class Layout:
    """The shards of every rank by tensor name. A rank without any may still be in it."""

    model: ModelSpec
    shards: Mapping[int, Mapping[str, Shard]]

    @property
    def ranks(self) -> list[int]:
        """Who has a part in it."""
        return sorted(self.shards)

    def boxes(self, rank: int, tensor: str) -> list[Box]:
        """What of a tensor a rank holds; nothing where it is not in the layout."""
        shard = self.shards.get(rank, {}).get(tensor)
        return shard.boxes if shard else []

    def num_bytes(self, rank: int) -> int:
        """Bytes a rank stores."""
        sizes = {spec.name: spec.itemsize for spec in self.model.tensors}
        return sum(total(s.boxes) * sizes[s.tensor] for s in self.shards.get(rank, {}).values())


def seated_layout(
    model: ModelSpec, seating: Seating, *, stages: Sequence[int] | None = None
) -> Layout:
    """Tensor-parallel shards in pipeline stages, the same in every replica.

    stages: how many places each stage holds; None shares them out evenly. Raises ValueError where a
    tensor does not divide or the stages do not fit.
    """
    counts = tuple(stages or even_stages(model.num_places, seating.stages))
    if len(counts) != seating.stages or sum(counts) != model.num_places or min(counts) < 1:
        raise ValueError(
            f"stages of {counts} places: must be {seating.stages}, in all {model.num_places}"
        )
    places = [set(held) for held in stage_places(counts)]
    made: dict[tuple[int, int], dict[str, Shard]] = {}
    shards = {}
    for rank in seating.ranks:
        at = seating.of(rank)
        if (at.stage, at.tensor) not in made:
            made[at.stage, at.tensor] = {
                spec.name: tensor_shard(spec, at.tensor, seating.tensor)
                for spec in model.tensors
                if places[at.stage].intersection(spec.places)
            }
        shards[rank] = made[at.stage, at.tensor]
    return Layout(model, shards)


def tensor_shard(spec: TensorSpec, index: int, count: int) -> Shard:
    """What tensor rank `index` of `count` stores: its parts of the components in turn."""
    boxes = spec.part(index, count)
    if spec.split_dim is None:
        return whole_shard(spec.name, spec.shape)
    dim = spec.split_dim
    parts = []
    length = 0
    for box in boxes:
        parts.append((box, (*(0,) * dim, length, *(0,) * (len(spec.shape) - dim - 1))))
        length += box.shape[dim]
    shape = (*spec.shape[:dim], length, *spec.shape[dim + 1 :])
    return Shard(spec.name, shape, tuple(parts))


def whole_shard(tensor: str, shape: tuple[int, ...]) -> Shard:
    """All of a tensor."""
    return Shard(tensor, shape, ((Box.whole(shape), (0,) * len(shape)),))


def zero_partitioned(layout: Layout, groups: Sequence[Sequence[int]]) -> Layout:
    """The same, but the ranks of a group, which hold the same, each keep a run of every shard.

    This is how ZeRO stage 3 holds parameters.
    """
    return _divided(layout, groups, lambda shard, index, count: shard.flat_part(index, count))


def chunked(layout: Layout, groups: Sequence[Sequence[int]], *, dim: int = 0) -> Layout:
    """The same, but the ranks of a group, which hold the same, each keep a chunk along `dim`.

    This is how FSDP2 holds parameters, over tensor parallelism too: DTensor's Shard(dim), or its
    strided shard where tensor parallelism splits the same dimension. Scalars stay whole.
    """

    def part(shard: Shard, index: int, count: int) -> Shard | None:
        return shard.chunk(dim, index, count) if shard.shape else shard

    return _divided(layout, groups, part)


def _divided(
    layout: Layout,
    groups: Sequence[Sequence[int]],
    part: Callable[[Shard, int, int], Shard | None],
) -> Layout:
    shards: dict[int, dict[str, Shard]] = {}
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
    return Layout(layout.model, shards)
