"""Layouts: which rank stores what of a tensor, and that the pieces lie where they are said to."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from streamrl.resharding.boxes import Box, total, union_numel
from streamrl.resharding.grids import Grid
from streamrl.resharding.layouts import (
    Layout,
    chunked,
    seated_layout,
    tensor_shard,
    zero_partitioned,
)
from streamrl.resharding.storage import allocate, inside
from streamrl.resharding.tensor_specs import Component, TensorSpec, even_stages, merged_stages
from tests.resharding.models import even, transformer

FLOAT = torch.float32


def whole(layout: Layout, name: str) -> torch.Tensor:
    spec = layout.model.by_name()[name]
    return torch.arange(spec.numel, dtype=FLOAT).view(spec.shape)


def stored(layout: Layout, rank: int, name: str) -> torch.Tensor:
    """What lies in a rank's buffer of a tensor, in the order of its memory."""
    storage = allocate(layout, rank, dict.fromkeys(layout.model.by_name(), FLOAT))
    for box, view in storage.pieces(name):
        view.copy_(whole(layout, name)[tuple(slice(low, high) for low, high in box.spans)])
    (_, view), *_ = storage.pieces(name)
    return torch.tensor(view.untyped_storage(), dtype=torch.uint8).view(FLOAT)


def test_fused_components_are_split_each_for_itself() -> None:
    layout = seated_layout(transformer(), Grid.parse("1-2-1").seating())
    qkv = whole(layout, "1.qkv")
    q, k, v = qkv.split([8, 4, 4])
    for rank in range(2):
        expected = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
        assert stored(layout, rank, "1.qkv").equal(expected.flatten())
    down = whole(layout, "1.down")
    assert stored(layout, 1, "1.down").equal(down[:, 12:].flatten())


def test_a_head_is_never_cut_and_ranks_share_one_where_there_are_more_ranks() -> None:
    layout = seated_layout(transformer(), Grid.parse("1-4-1").seating())
    k = whole(layout, "1.qkv")[8:12]
    held = [stored(layout, rank, "1.qkv").view(-1, 8)[2:4] for rank in range(4)]
    assert all(held[rank].equal(k.chunk(2)[rank // 2]) for rank in range(4))


def test_a_tied_embedding_lies_in_the_first_and_in_the_last_stage() -> None:
    layout = seated_layout(transformer(layers=4), Grid.parse("3-1-1").seating())
    assert ["embed" in layout.shards[rank] for rank in range(3)] == [True, False, True]
    untied = seated_layout(transformer(layers=4, tied=False), Grid.parse("3-1-1").seating())
    assert "head" in untied.shards[2] and "embed" not in untied.shards[2]


def test_stages_may_be_uneven_and_are_refused_where_they_do_not_fit() -> None:
    assert even_stages(5, 3) == (2, 2, 1)
    layout = seated_layout(even(5), Grid.parse("2-1-1").seating(), stages=(1, 4))
    assert list(layout.shards[0]) == ["0.rows", "0.columns"]
    with pytest.raises(ValueError, match=r"stages of \(3, 3\) places: must be 2, in all 5"):
        seated_layout(even(5), Grid.parse("2-1-1").seating(), stages=(3, 3))
    with pytest.raises(ValueError, match="6 pipeline stages for 5 places"):
        seated_layout(even(5), Grid.parse("6-1-1").seating())


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 6))
def test_stages_are_as_even_as_they_go_and_fewer_are_made_of_whole_ones(
    num_places: int, stages: int, ratio: int
) -> None:
    assume(stages * ratio <= num_places)
    parts, whole = even_stages(num_places, stages * ratio), even_stages(num_places, stages)
    assert sum(parts) == num_places and max(parts) - min(parts) <= 1
    assert merged_stages(parts, stages) == whole


def test_listed_stages_are_merged_where_they_divide() -> None:
    assert even_stages(6, 4) == (2, 1, 2, 1)
    assert merged_stages((3, 1, 1, 2), 2) == (4, 3)
    with pytest.raises(ValueError, match="4 stages do not make up 3"):
        merged_stages((3, 1, 1, 2), 3)


def test_what_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match=r"0\.rows, dimension 0: 16 do not divide among 3"):
        seated_layout(even(1), Grid.parse("1-3-1").seating())
    heads = TensorSpec("q", (8, 2), (0,), 0, (Component(8, 4),))
    with pytest.raises(ValueError, match="q, dimension 0: 4 do not divide among 3"):
        tensor_shard(heads, 0, 3)


GRIDS = st.sampled_from(["1-1-1", "1-2-2", "2-2-1", "3-1-2", "1-4-2", "2-4-2", "5-2-1"])
ORDERS = st.sampled_from(["hf", "mcore"])


def check_covers(layout: Layout, ranks: list[int]) -> None:
    """Those ranks together hold every element of the model; each its own boxes once."""
    for spec in layout.model.tensors:
        held = [box for rank in ranks for box in layout.boxes(rank, spec.name)]
        assert union_numel(held) == spec.numel, spec.name
        for rank in ranks:
            own = layout.boxes(rank, spec.name)
            assert union_numel(own) == total(own)


@given(GRIDS, ORDERS)
def test_a_replica_holds_every_element(sizes: str, order: str) -> None:
    seating = Grid.parse(sizes, order).seating()
    layout = seated_layout(transformer(), seating)
    for group in seating.replica_groups():
        check_covers(layout, group)


@given(GRIDS, ORDERS, st.sampled_from([zero_partitioned, chunked]))
def test_replicas_that_share_their_shards_hold_every_element_together(
    sizes: str, order: str, share
) -> None:
    seating = Grid.parse(sizes, order).seating()
    before = seated_layout(transformer(), seating)
    layout = share(before, seating.data_groups())
    check_covers(layout, layout.ranks)
    for group in seating.data_groups():
        for spec in layout.model.tensors:
            parts = sum(total(layout.boxes(rank, spec.name)) for rank in group)
            assert parts == total(before.boxes(group[0], spec.name)), "no element is held twice"


def test_zero_holds_runs_of_a_shards_elements() -> None:
    seating = Grid.parse("1-2-3").seating()
    layout = zero_partitioned(seated_layout(transformer(), seating), seating.data_groups())
    # 3 replicas share the 6x4 elements of tensor rank 1's half of the embedding: 16 each.
    embed = whole(layout, "embed")[6:].flatten()
    assert [stored(layout, rank, "embed").tolist() for rank in (1, 3, 5)] == [
        part.tolist() for part in embed.split(16)
    ]
    down = whole(layout, "1.down")[:, 12:].flatten()
    assert stored(layout, 5, "1.down").equal(down[64:])


def test_fsdp_chunks_what_tensor_parallelism_left_along_its_first_dimension() -> None:
    seating = Grid.parse("1-2-2").seating()
    layout = chunked(seated_layout(transformer(), seating), seating.data_groups())
    # DTensor says (_StridedShard(0), Shard(0)) of both, (Shard(0), Shard(1)) of the one below.
    qkv = whole(layout, "1.qkv")
    of_rank_1 = torch.cat([part.chunk(2)[1] for part in qkv.split([8, 4, 4])])
    assert stored(layout, 3, "1.qkv").equal(of_rank_1.chunk(2)[1].flatten())
    assert stored(layout, 1, "1.down").equal(whole(layout, "1.down")[:4, 12:].flatten())


def test_a_chunk_that_is_left_empty_is_no_shard() -> None:
    seating = Grid.parse("1-1-5").seating()
    layout = chunked(seated_layout(transformer(), seating), seating.data_groups())
    # 12 rows in chunks of 3: the fifth rank has none.
    assert "embed" not in layout.shards[4] and "embed" in layout.shards[3]


def test_groups_must_hold_the_same_and_be_everybody() -> None:
    layout = seated_layout(transformer(), Grid.parse("1-2-2").seating())
    with pytest.raises(ValueError, match="ranks 0 and 1 of one group hold different shards"):
        chunked(layout, [[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="must have every rank"):
        zero_partitioned(layout, [[0, 2]])
    with pytest.raises(ValueError, match="rank 0 is in the groups more than once"):
        zero_partitioned(layout, [[0, 2, 0], [1, 3]])


def test_a_smaller_shard_lies_inside_a_larger_one_and_shares_its_memory() -> None:
    model = transformer()
    small = seated_layout(model, Grid.parse("1-4-1").seating())
    large = seated_layout(model, Grid.parse("1-2-2").seating())
    host = allocate(large, 0, dict.fromkeys(model.by_name(), FLOAT))
    guest = inside(small, 1, host)
    for name, _, view in guest:
        ((_, home), *_) = host.pieces(name)
        assert view.untyped_storage().data_ptr() == home.untyped_storage().data_ptr()
    ((box, view), *_) = guest.pieces("1.down")
    view.fill_(7.0)
    assert host.view("1.down", box).eq(7.0).all()
    with pytest.raises(ValueError, match="rank 2 cannot share its memory: embed"):
        inside(small, 2, host)


def test_a_storage_has_views_of_the_right_shapes_and_sizes_only() -> None:
    layout = seated_layout(even(1), Grid.parse("1-1-1").seating())
    with pytest.raises(ValueError, match=r"0\.rows: torch.float64 has not 4 bytes"):
        allocate(layout, 0, dict.fromkeys(layout.model.by_name(), torch.float64))
    storage = allocate(layout, 0, dict.fromkeys(layout.model.by_name(), FLOAT))
    with pytest.raises(KeyError, match="not in one piece"):
        storage.view("0.rows", Box((0, 0), (17, 16)))
