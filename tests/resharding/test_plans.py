"""Plans: the paper's volumes as exact fractions, ReaL's transfers, and completeness."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.resharding import (
    assign_vanilla,
    list_micro_dp_groups,
    parse_generation_sizes,
)
from benchmarks.table_2 import (
    compute_table_2,
    count_link_bytes,
    partition_zero3,
    peak_fraction,
    received_fraction,
    redundant_fraction,
    report_plan,
)
from streamrl.resharding.boxes import TensorBox, count_elements
from streamrl.resharding.grids import RankAssignment, RankGrid
from streamrl.resharding.grouping import (
    assign_zero_redundancy,
)
from streamrl.resharding.layouts import ModelLayout, create_layout, partition_fsdp2
from streamrl.resharding.plans import (
    CopyPlan,
    NodeTopology,
    plan_copies,
    plan_gather,
)
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec
from tests.resharding.models import GRIDS, count_union_elements, even, shift_ranks, transformer

CLUSTER = NodeTopology(4)
PAPER = [("1-4-2", "1-2-2-2"), ("1-2-2", "1-1-2-2"), ("2-4-1", "1-2-4-1"), ("4-2-1", "2-1-4-1")]
LARGER = [("1-8-2", "1-2-4-2"), ("4-4-1", "2-2-4-1"), ("8-1-2", "2-1-4-2"), ("2-8-4", "1-8-2-4")]


@pytest.mark.parametrize("order", ["hf", "mcore"])
@pytest.mark.parametrize(("train", "generate"), PAPER + LARGER)
def test_table_2_of_the_paper_in_exact_fractions(train: str, generate: str, order: str):
    grid, sizes = RankGrid.from_text(train, order), parse_generation_sizes(generate)
    model = even(8)
    trained = create_layout(model, grid.assign_ranks())
    expected = compute_table_2(
        grid.pp_size,
        grid.tp_size,
        grid.dp_size,
        serving_stages=sizes.pp_size,
        serving_tensor=sizes.tp_size,
    )
    serving = assign_zero_redundancy(grid, sizes)
    zero = create_layout(model, serving)
    side_by_side = create_layout(model, assign_vanilla(grid, sizes))
    partitioned = partition_zero3(trained, grid.assign_ranks().list_dp_groups())
    plans = {
        "zero": plan_gather(trained, zero, list_micro_dp_groups(grid, serving)),
        "vanilla": plan_gather(trained, side_by_side, grid.assign_ranks().group_ranks("dp_rank")),
        "full_gather": plan_gather(partitioned, zero, [list(range(grid.num_ranks))]),
    }
    for scheme, plan in plans.items():
        report = report_plan(plan, CLUSTER, keeps_copy=scheme == "full_gather")
        for rank in range(grid.num_ranks):
            assert received_fraction(report, rank) == expected[scheme].received, scheme
            assert peak_fraction(report, rank) == expected[scheme].peak, scheme
        max_redundant = max(redundant_fraction(report, rank) for rank in range(grid.num_ranks))
        without = [
            r for r in report.rank_bytes if not report.rank_bytes[r].received_by_link["local"]
        ]
        if scheme != "vanilla" or without:
            assert max_redundant == expected[scheme].redundant, scheme
    exact = report_plan(plan_copies(trained, zero, CLUSTER), CLUSTER)
    assert {received_fraction(exact, rank) for rank in range(grid.num_ranks)} == {
        expected["zero"].received
    }


def mesh(stages: int, replicas: int) -> RankAssignment:
    """Return a layout with stages outermost, as ReaL numbers ranks."""
    return RankGrid(stages, 1, replicas, "mcore").assign_ranks()


def test_reals_example_on_eight_devices_balances_the_senders():
    model = even(2)
    train, generate = (create_layout(model, mesh(2, 2)), create_layout(model, mesh(2, 4)))
    plan = plan_copies(train, generate, NodeTopology(8))
    report = report_plan(plan, NodeTopology(8))
    assert sum(received_fraction(report, rank) for rank in range(8)) == 3
    assert received_fraction(report, 0) == received_fraction(report, 1) == 0
    pairs = {(c.source, c.destination) for c in plan.copies if c.source != c.destination}
    assert pairs == {(0, 2), (1, 3), (2, 4), (3, 5), (2, 6), (3, 7)}
    sent = Counter({rank: report.rank_bytes[rank].sent_bytes for rank in range(4)})
    assert sent[0] == sent[1] and sent[2] == sent[3]
    # ReaL's own plan moves 3.5 M: it sends rank 1 data that rank 1 already has.


def test_a_holder_of_a_smaller_box_on_the_same_node_is_preferred():
    model = ModelSpec((TensorSpec("w", (8, 4), (0,), 0),), 1)
    (full_shard,) = create_layout(model, RankGrid.from_text("1-1-1").assign_ranks()).shards.values()
    halves = create_layout(model, RankGrid.from_text("1-2-1").assign_ranks()).shards
    # Rank 0 on the first node has all of it, rank 2 on the second node has half.
    source = ModelLayout(model, {0: full_shard, 2: halves[0]})
    plan = plan_copies(source, ModelLayout(model, {3: halves[0]}), NodeTopology(2))
    assert [(c.source, c.destination) for c in plan.copies] == [(2, 3)]
    assert count_link_bytes(report_plan(plan, NodeTopology(2)), "network") == 0
    plan_of_both = plan_copies(source, ModelLayout(model, {3: full_shard}), NodeTopology(2))
    assert_complete(plan_of_both)
    report = report_plan(plan_of_both, NodeTopology(2))
    assert (count_link_bytes(report, "node"), count_link_bytes(report, "network")) == (64, 64)


def assert_complete(plan: CopyPlan) -> None:
    """Assert that every needed element comes once, from a rank that holds it."""
    for rank in plan.target.ranks:
        for spec in plan.target.model.tensors:
            received_boxes = [
                c.named_box[1]
                for c in plan.copies
                if c.destination == rank and c.named_box[0] == spec.name
            ]
            needed = plan.target.get_boxes(rank, spec.name)
            assert (
                count_elements(received_boxes)
                == count_union_elements(received_boxes)
                == count_union_elements(needed)
                == count_elements(needed)
            )
            assert count_union_elements([*received_boxes, *needed]) == count_elements(needed)
    for copy in plan.copies:
        tensor, box = copy.named_box
        assert any(
            trained.intersect(box) == box for trained in plan.source.get_boxes(copy.source, tensor)
        )


@given(GRIDS, GRIDS, st.sampled_from(["plain", "zero", "fsdp"]), st.booleans(), st.integers(0, 9))
def test_copy_plans_between_any_layouts_are_complete(
    source_grid: RankGrid, target_grid: RankGrid, shared: str, tied: bool, first: int
):
    model = transformer(tied=tied)
    source = create_layout(model, source_grid.assign_ranks())
    if shared != "plain":
        divide = partition_zero3 if shared == "zero" else partition_fsdp2
        source = divide(source, source_grid.assign_ranks().list_dp_groups())
    target = shift_ranks(create_layout(model, target_grid.assign_ranks()), first)
    plan = plan_copies(source, target, CLUSTER)
    assert_complete(plan)
    assert plan == plan_copies(source, target, CLUSTER), "every rank makes the same"
    received = plan.count_received_bytes()
    for rank, counts in report_plan(plan, CLUSTER).rank_bytes.items():
        stored_bytes = sum(
            count_union_elements([*target.get_boxes(rank, s.name)]) * s.itemsize
            for s in model.tensors
        )
        assert sum(counts.received_by_link.values()) == stored_bytes
        assert counts.received_bytes == received.get(rank, 0)


def test_data_that_no_rank_holds_is_named():
    model = even(2)
    train = create_layout(model, RankGrid.from_text("2-1-1").assign_ranks())
    half = ModelLayout(model, {0: train.shards[0]})
    full = create_layout(model, RankGrid.from_text("1-1-2").assign_ranks())
    with pytest.raises(ValueError, match=r"1\.rows\[0:16, 0:16\], needed by rank 0: no rank holds"):
        plan_copies(half, full, CLUSTER)
    with pytest.raises(ValueError, match=r"needed by rank 0: no rank of its group \[0\] holds it"):
        plan_gather(train, full, [[0], [1]])


def test_planning_cost_grows_with_ranks_but_not_with_layers(monkeypatch: pytest.MonkeyPatch):
    intersected: list[TensorBox] = []
    plain = TensorBox.intersect

    def counting_intersect(box: TensorBox, other: TensorBox) -> TensorBox | None:
        intersected.append(box)
        return plain(box, other)

    monkeypatch.setattr(TensorBox, "intersect", counting_intersect)

    def count_intersections(layers: int, ranks: int) -> int:
        full = create_layout(transformer(layers=layers), RankGrid(1, 1, ranks).assign_ranks())
        parts = partition_zero3(full, [list(range(ranks))])
        intersected.clear()
        plan_copies(parts, full, NodeTopology()).count_received_bytes()
        plan_gather(parts, full, [list(range(ranks))])
        return len(intersected)

    assert count_intersections(4, 8) == count_intersections(40, 8) > 0
    assert count_intersections(4, 32) < 2 * (32 / 8) * count_intersections(4, 8)
