"""Layouts: the parts that each rank stores, and their places in memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shard_memory import allocate_storage
from benchmarks.table_2 import partition_zero3
from streamrl.resharding.boxes import count_elements
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.layouts import (
    ModelLayout,
    create_layout,
    create_tensor_shard,
    partition_fsdp2,
)
from streamrl.resharding.tensor_specs import FusedComponent, TensorSpec
from tests.resharding.models import count_union_elements, even, transformer

FLOAT = torch.float32


def full_tensor(layout: ModelLayout, name: str) -> torch.Tensor:
    (spec,) = (spec for spec in layout.model.tensors if spec.name == name)
    return torch.arange(spec.numel, dtype=FLOAT).view(spec.shape)


def stored(layout: ModelLayout, rank: int, name: str) -> torch.Tensor:
    """Return a rank's buffer of a tensor, in memory order."""
    storage = allocate_storage(layout, rank, dict.fromkeys(layout.model.itemsizes, FLOAT))
    for box, view in storage.get_pieces(name):
        view.copy_(
            full_tensor(layout, name)[tuple(slice(low, high) for low, high in box.dim_ranges)]
        )
    (_, view), *_ = storage.get_pieces(name)
    return torch.tensor(view.untyped_storage(), dtype=torch.uint8).view(FLOAT)


def test_fused_components_are_split_separately():
    layout = create_layout(transformer(), RankGrid.from_text("1-2-1").assign_ranks())
    qkv = full_tensor(layout, "1.qkv")
    q, k, v = qkv.split([8, 4, 4])
    for rank in range(2):
        expected = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
        assert stored(layout, rank, "1.qkv").equal(expected.flatten())
    down = full_tensor(layout, "1.down")
    assert stored(layout, 1, "1.down").equal(down[:, 12:].flatten())


def test_heads_are_never_split_and_shared_by_surplus_ranks():
    layout = create_layout(transformer(), RankGrid.from_text("1-4-1").assign_ranks())
    k = full_tensor(layout, "1.qkv")[8:12]
    keys = [stored(layout, rank, "1.qkv").view(-1, 8)[2:4] for rank in range(4)]
    assert all(keys[rank].equal(k.chunk(2)[rank // 2]) for rank in range(4))


def test_indivisible_tensors_are_named():
    with pytest.raises(ValueError, match=r"0\.rows, dimension 0: 16 units do not divide among 3"):
        create_layout(even(1), RankGrid.from_text("1-3-1").assign_ranks())
    heads = TensorSpec("q", (8, 2), (0,), 0, (FusedComponent(8, 4),))
    with pytest.raises(ValueError, match="q, dimension 0: 4 units do not divide among 3"):
        create_tensor_shard(heads, 0, 3)


GRIDS = st.sampled_from(["1-1-1", "1-2-2", "2-2-1", "3-1-2", "1-4-2", "2-4-2", "5-2-1"])
ORDERS = st.sampled_from(["hf", "mcore"])


def assert_covers(layout: ModelLayout, ranks: list[int]) -> None:
    """Assert that these ranks hold every element, and that each rank's boxes are disjoint."""
    for spec in layout.model.tensors:
        boxes = [box for rank in ranks for box in layout.get_boxes(rank, spec.name)]
        assert count_union_elements(boxes) == spec.numel, spec.name
        for rank in ranks:
            rank_boxes = layout.get_boxes(rank, spec.name)
            assert count_union_elements(rank_boxes) == count_elements(rank_boxes)


@given(GRIDS, ORDERS)
def test_a_replica_covers_every_element(sizes: str, order: str):
    seating = RankGrid.from_text(sizes, order).assign_ranks()
    layout = create_layout(transformer(), seating)
    for group in seating.group_ranks("dp_rank"):
        assert_covers(layout, group)


@given(GRIDS, ORDERS, st.sampled_from([partition_zero3, partition_fsdp2]))
def test_partitioned_replicas_cover_every_element_together(sizes: str, order: str, share):
    seating = RankGrid.from_text(sizes, order).assign_ranks()
    before = create_layout(transformer(), seating)
    layout = share(before, seating.list_dp_groups())
    assert_covers(layout, layout.ranks)
    for group in seating.list_dp_groups():
        for spec in layout.model.tensors:
            parts = sum(count_elements(layout.get_boxes(rank, spec.name)) for rank in group)
            assert parts == count_elements(before.get_boxes(group[0], spec.name)), (
                "no element is held twice"
            )


def test_fsdp2_chunks_tensor_parallel_shards_along_the_first_dimension():
    seating = RankGrid.from_text("1-2-2").assign_ranks()
    layout = partition_fsdp2(create_layout(transformer(), seating), seating.list_dp_groups())
    # DTensor: (_StridedShard(0), Shard(0)) for both, (Shard(0), Shard(1)) for the next one.
    qkv = full_tensor(layout, "1.qkv")
    of_rank_1 = torch.cat([part.chunk(2)[1] for part in qkv.split([8, 4, 4])])
    assert stored(layout, 3, "1.qkv").equal(of_rank_1.chunk(2)[1].flatten())
    assert stored(layout, 1, "1.down").equal(full_tensor(layout, "1.down")[:4, 12:].flatten())


def test_an_empty_chunk_is_not_a_shard():
    seating = RankGrid.from_text("1-1-5").assign_ranks()
    layout = partition_fsdp2(create_layout(transformer(), seating), seating.list_dp_groups())
    # 12 rows in chunks of 3: none are left for the fifth rank.
    assert "embed" not in layout.shards[4] and "embed" in layout.shards[3]
