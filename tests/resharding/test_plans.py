"""Plans: the paper's volumes as exact fractions, ReaL's transfers, and completeness."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.resharding import (
    GROUPINGS,
    assign_generation_ranks,
    assign_vanilla,
    list_micro_dp_groups,
    parse_generation_sizes,
)
from benchmarks.table_2 import (
    compute_table_2,
    count_link_bytes,
    peak_fraction,
    received_fraction,
    redundant_fraction,
)
from streamrl.resharding.boxes import count_elements, is_nested
from streamrl.resharding.grids import RankAssignment, RankCoordinates, RankGrid
from streamrl.resharding.grouping import (
    GenerationSizes,
    assign_max_overlap,
    assign_zero_redundancy,
)
from streamrl.resharding.layouts import ModelLayout, create_layout, partition_fsdp2, partition_zero3
from streamrl.resharding.plans import CopyPlan, NodeTopology, plan_copies, plan_gather
from streamrl.resharding.tensor_specs import FusedComponent, ModelSpec, TensorSpec
from tests.resharding.models import GRIDS, count_union_elements, even, transformer

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
        "zero": plan_gather(trained, zero, CLUSTER, list_micro_dp_groups(grid, serving)),
        "vanilla": plan_gather(
            trained, side_by_side, CLUSTER, grid.assign_ranks().group_ranks("dp_rank")
        ),
        "full_gather": plan_gather(
            partitioned, zero, CLUSTER, [list(range(grid.num_ranks))], keeps_copy=True
        ),
    }
    for scheme, plan in plans.items():
        report = plan.report_bytes()
        for rank in range(grid.num_ranks):
            assert received_fraction(report, rank) == expected[scheme].received, scheme
            assert peak_fraction(report, rank) == expected[scheme].peak, scheme
        max_redundant = max(redundant_fraction(report, rank) for rank in range(grid.num_ranks))
        without = [
            r for r in report.rank_bytes if not report.rank_bytes[r].received_by_link["local"]
        ]
        if scheme != "vanilla" or without:
            assert max_redundant == expected[scheme].redundant, scheme
    exact = plan_copies(trained, zero, CLUSTER).report_bytes()
    assert {received_fraction(exact, rank) for rank in range(grid.num_ranks)} == {
        expected["zero"].received
    }


def test_fractions_of_figure_8_of_the_paper():
    grid, sizes = RankGrid.from_text("1-4-2"), parse_generation_sizes("1-2-2-2")
    trained = create_layout(even(2), grid.assign_ranks())
    served = create_layout(even(2), assign_vanilla(grid, sizes))
    exact = plan_copies(trained, served, CLUSTER).report_bytes()
    quarter, half = Fraction(1, 4), Fraction(1, 2)
    received = [received_fraction(exact, rank) for rank in range(8)]
    assert received == [quarter, half, half, quarter] * 2
    gathered = plan_gather(
        trained, served, CLUSTER, grid.assign_ranks().group_ranks("dp_rank")
    ).report_bytes()
    assert {received_fraction(gathered, rank) for rank in range(8)} == {Fraction(3, 4)}


def mesh(stages: int, replicas: int, first: int = 0) -> RankAssignment:
    """Return a layout with stages outermost, as ReaL numbers ranks, from a first rank on."""
    grid = RankGrid(stages, 1, replicas, "mcore")
    return RankAssignment(stages, 1, replicas, grid.assign_ranks().coordinates, first)


def test_reals_example_on_eight_devices_balances_the_senders():
    model = even(2)
    train, generate = (create_layout(model, mesh(2, 2)), create_layout(model, mesh(2, 4)))
    plan = plan_copies(train, generate, NodeTopology(8))
    report = plan.report_bytes()
    assert sum(received_fraction(report, rank) for rank in range(8)) == 3
    assert received_fraction(report, 0) == received_fraction(report, 1) == 0
    pairs = {(c.source, c.destination) for c in plan.copies if c.source != c.destination}
    assert pairs == {(0, 2), (1, 3), (2, 4), (3, 5), (2, 6), (3, 7)}
    sent = Counter({rank: report.rank_bytes[rank].sent_bytes for rank in range(4)})
    assert sent[0] == sent[1] and sent[2] == sent[3]
    # ReaL's own plan moves 3.5 M: it sends rank 1 data that rank 1 already has.


def test_a_holder_on_the_same_node_is_preferred():
    model = even(1)
    train = create_layout(model, RankGrid.from_text("1-1-8").assign_ranks())
    source = ModelLayout(model, {rank: train.shards[rank] for rank in (1, 5)})
    target = ModelLayout(model, {rank: train.shards[rank] for rank in (0, 2, 3, 4, 6, 7)})
    plan = plan_copies(source, target, CLUSTER)
    assert {(c.source, c.destination) for c in plan.copies} == {
        *((1, 0), (1, 2), (1, 3)),
        *((5, 4), (5, 6), (5, 7)),
    }
    assert count_link_bytes(plan.report_bytes(), "network") == 0


def test_a_holder_of_a_smaller_box_on_the_same_node_is_preferred():
    model = ModelSpec((TensorSpec("w", (8, 4), (0,), 0),), 1)
    (full_shard,) = create_layout(model, RankGrid.from_text("1-1-1").assign_ranks()).shards.values()
    halves = create_layout(model, RankGrid.from_text("1-2-1").assign_ranks()).shards
    # Rank 0 on the first node has all of it, rank 2 on the second node has half.
    source = ModelLayout(model, {0: full_shard, 2: halves[0]})
    plan = plan_copies(source, ModelLayout(model, {3: halves[0]}), NodeTopology(2))
    assert [(c.source, c.destination) for c in plan.copies] == [(2, 3)]
    assert count_link_bytes(plan.report_bytes(), "network") == 0
    plan_of_both = plan_copies(source, ModelLayout(model, {3: full_shard}), NodeTopology(2))
    assert_complete(plan_of_both)
    report = plan_of_both.report_bytes()
    assert (count_link_bytes(report, "node"), count_link_bytes(report, "network")) == (64, 64)


def mixed(model: ModelSpec, data: st.DataObject) -> ModelLayout:
    """Return a layout of eight ranks, each with the shards of a randomly drawn layout."""
    shards = {}
    for rank in range(8):
        seating = RankGrid.from_text(
            data.draw(st.sampled_from(["1-2-4", "1-4-2", "2-1-4"]))
        ).assign_ranks()
        layout = create_layout(model, seating)
        divide = data.draw(st.sampled_from([partition_zero3, partition_fsdp2, None]))
        if divide:
            layout = divide(layout, seating.list_dp_groups())
        shards[rank] = layout.shards[rank]
    return ModelLayout(model, shards)


@given(st.data(), st.integers(1, 4))
def test_no_byte_crosses_the_network_if_the_node_holds_it(data: st.DataObject, per_node: int):
    model = transformer(heads=4, kv_heads=4)
    (full_shard,) = create_layout(model, RankGrid.from_text("1-1-1").assign_ranks()).shards.values()
    source = ModelLayout(model, {**mixed(model, data).shards, 8: full_shard})
    target, cluster = mixed(model, data), NodeTopology(per_node)
    plan = plan_copies(source, target, cluster)
    assert_complete(plan)
    for copy in plan.copies:
        if cluster.get_link(copy.source, copy.destination) == "network":
            tensor, box = copy.named_box
            same_node = [
                r for r in source.ranks if cluster.get_node(r) == cluster.get_node(copy.destination)
            ]
            assert not any(
                box.intersect(box_of_rank)
                for r in same_node
                for box_of_rank in source.get_boxes(r, tensor)
            )
    gather = plan_gather(source, target, cluster, [source.ranks])
    for spec in model.tensors:
        boxes_by_rank = {
            rank: [box for name, box in gifts if name == spec.name]
            for rank, gifts in gather.contributions.items()
        }
        all_boxes = [box for boxes in boxes_by_rank.values() for box in boxes]
        assert count_elements(all_boxes) == count_union_elements(all_boxes) == spec.numel
        assert all(
            is_nested(boxes, source.get_boxes(rank, spec.name))
            for rank, boxes in boxes_by_rank.items()
        )


def test_copies_between_disjoint_pools():
    model = transformer()
    train = create_layout(model, RankGrid.from_text("2-2-2", "mcore").assign_ranks())
    pool = RankAssignment(
        1, 2, 2, RankGrid.from_text("1-2-2").assign_ranks().coordinates, first_rank=8
    )
    plan = plan_copies(train, create_layout(model, pool), CLUSTER)
    assert_complete(plan)
    report = plan.report_bytes()
    assert count_link_bytes(report, "local") == count_link_bytes(report, "node") == 0
    assert all(report.rank_bytes[rank].received_bytes == 0 for rank in range(8))
    sent = [report.rank_bytes[rank].sent_bytes for rank in range(8)]
    assert max(sent) < 2 * report.model_bytes / 8 * 1.5


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
    seating = target_grid.assign_ranks()
    target = create_layout(
        model,
        RankAssignment(
            seating.pp_size, seating.tp_size, seating.dp_size, seating.coordinates, first
        ),
    )
    plan = plan_copies(source, target, CLUSTER)
    assert_complete(plan)
    assert plan == plan_copies(source, target, CLUSTER), "every rank makes the same"
    report = plan.report_bytes()
    for rank in target.ranks:
        counts = report.rank_bytes[rank]
        stored_bytes = sum(
            count_union_elements([*target.get_boxes(rank, s.name)]) * s.itemsize
            for s in model.tensors
        )
        assert sum(counts.received_by_link.values()) == stored_bytes
        assert counts.received_by_link["local"] >= 0
    assert sum(c.sent_bytes for c in report.rank_bytes.values()) == sum(
        c.received_bytes for c in report.rank_bytes.values()
    )


@given(GRIDS, st.sampled_from(GROUPINGS), st.integers(1, 2))
def test_gather_plans_send_no_element_twice(grid: RankGrid, grouping: str, ratio: int):
    assume(grid.tp_size % ratio == 0)
    sizes = GenerationSizes(grid.pp_size, grid.tp_size // ratio, ratio, grid.dp_size)
    model = transformer()
    trained = create_layout(model, grid.assign_ranks())
    serving = assign_generation_ranks(grouping, grid, sizes, trained)
    target = create_layout(model, serving)
    plan = plan_gather(trained, target, CLUSTER, grid.assign_ranks().group_ranks("dp_rank"))
    for group in plan.groups:
        for spec in model.tensors:
            contributed = [
                box for rank in group for name, box in plan.contributions[rank] if name == spec.name
            ]
            assert count_elements(contributed) == count_union_elements(contributed) == spec.numel


def test_shared_data_is_contributed_in_equal_shares():
    model = even(6)
    full = create_layout(model, RankGrid.from_text("1-1-4").assign_ranks())
    plan = plan_gather(full, full, CLUSTER, [[0, 1, 2], [3]])
    contributed = {
        rank: count_elements(box for _, box in plan.contributions[rank]) for rank in range(4)
    }
    assert contributed == {0: 1024, 1: 1024, 2: 1024, 3: 3072}


def test_data_that_no_rank_holds_is_named():
    model = even(2)
    train = create_layout(model, RankGrid.from_text("2-1-1").assign_ranks())
    half = ModelLayout(model, {0: train.shards[0]})
    full = create_layout(model, RankGrid.from_text("1-1-2").assign_ranks())
    with pytest.raises(ValueError, match=r"1\.rows\[0:16, 0:16\], needed by rank 0: no rank holds"):
        plan_copies(half, full, CLUSTER)
    with pytest.raises(ValueError, match=r"needed by rank 0: no rank of its group \[0\] holds it"):
        plan_gather(train, full, CLUSTER, [[0], [1]])


@pytest.mark.parametrize(
    ("groups", "error_text"),
    [([[0]], "rank 1: is in 0 groups"), ([[0, 1], [1]], "rank 1: is in 2 groups")],
)
def test_every_rank_must_be_in_exactly_one_group(groups: list[list[int]], error_text: str):
    full = create_layout(even(2), RankGrid.from_text("1-1-2").assign_ranks())
    with pytest.raises(ValueError, match=error_text):
        plan_gather(full, full, CLUSTER, groups)


@pytest.mark.parametrize("units", [-2, 0, 3])
def test_a_component_must_consist_of_whole_units(units: int):
    with pytest.raises(ValueError, match=f"component of size 4: must be a multiple of {units}"):
        FusedComponent(4, units)


def test_an_unknown_itemsize_is_refused():
    with pytest.raises(ValueError, match="w: itemsize 3 is none of"):
        TensorSpec("w", (4,), (0,), itemsize=3)


def test_equal_layouts_need_no_copies():
    for grid in (RankGrid.from_text("1-4-2"), RankGrid.from_text("2-2-2", "mcore")):
        trained = create_layout(transformer(), grid.assign_ranks())
        sizes = GenerationSizes(grid.pp_size, grid.tp_size, 1, grid.dp_size)
        serving = assign_max_overlap(trained, sizes)
        report = plan_copies(trained, create_layout(trained.model, serving), CLUSTER).report_bytes()
        assert all(
            received_fraction(report, rank) == 0 == redundant_fraction(report, rank)
            for rank in report.rank_bytes
        )
        assert serving.get_coordinates(0) == RankCoordinates(0, 0, 0)
