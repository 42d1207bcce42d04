"""Plans: the paper's volumes as exact fractions, ReaL's transfers, and every element once."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamrl.resharding.boxes import nested, total, union_numel
from streamrl.resharding.byte_report import Nodes, table_2
from streamrl.resharding.grids import Coordinates, Grid, Seating
from streamrl.resharding.grouping import (
    GROUPINGS,
    GenerationSizes,
    max_overlap,
    micro_groups,
    seat,
    vanilla,
    zero_redundancy,
)
from streamrl.resharding.layouts import Layout, chunked, seated_layout, zero_partitioned
from streamrl.resharding.plans import CopyPlan, plan_copies, plan_gather
from streamrl.resharding.tensor_specs import Component, ModelSpec, TensorSpec
from tests.resharding.models import GRIDS, even, transformer

CLUSTER = Nodes(4)
PAPER = [("1-4-2", "1-2-2-2"), ("1-2-2", "1-1-2-2"), ("2-4-1", "1-2-4-1"), ("4-2-1", "2-1-4-1")]
LARGER = [("1-8-2", "1-2-4-2"), ("4-4-1", "2-2-4-1"), ("8-1-2", "2-1-4-2"), ("2-8-4", "1-8-2-4")]


@pytest.mark.parametrize("order", ["hf", "mcore"])
@pytest.mark.parametrize(("train", "generate"), PAPER + LARGER)
def test_table_2_of_the_paper_as_exact_fractions(train: str, generate: str, order: str) -> None:
    grid, sizes = Grid.parse(train, order), GenerationSizes.parse(generate)
    model = even(8)
    held = seated_layout(model, grid.seating())
    expected = table_2(
        grid.stages,
        grid.tensor,
        grid.replicas,
        serving_stages=sizes.stages,
        serving_tensor=sizes.tensor,
    )
    serving = zero_redundancy(grid, sizes)
    zero = seated_layout(model, serving)
    side_by_side = seated_layout(model, vanilla(grid, sizes))
    partitioned = zero_partitioned(held, grid.seating().data_groups())
    plans = {
        "zero": plan_gather(held, zero, CLUSTER, micro_groups(grid, serving)),
        "vanilla": plan_gather(held, side_by_side, CLUSTER, grid.seating().replica_groups()),
        "full_gather": plan_gather(
            partitioned, zero, CLUSTER, [list(range(grid.size))], keeps_copy=True
        ),
    }
    for scheme, plan in plans.items():
        report = plan.bytes_report()
        for rank in range(grid.size):
            assert report.received(rank) == expected[scheme].received, scheme
            assert report.peak(rank) == expected[scheme].peak, scheme
        most = max(report.redundant(rank) for rank in range(grid.size))
        without = [r for r in report.ranks if not report.ranks[r].received["local"]]
        if scheme != "vanilla" or without:
            assert most == expected[scheme].redundant, scheme
    exact = plan_copies(held, zero, CLUSTER).bytes_report()
    assert {exact.received(rank) for rank in range(grid.size)} == {expected["zero"].received}


def test_worked_fractions_of_figure_8() -> None:
    grid, sizes = Grid.parse("1-4-2"), GenerationSizes.parse("1-2-2-2")
    held = seated_layout(even(2), grid.seating())
    served = seated_layout(even(2), vanilla(grid, sizes))
    exact = plan_copies(held, served, CLUSTER).bytes_report()
    quarter, half = Fraction(1, 4), Fraction(1, 2)
    received = [exact.received(rank) for rank in range(8)]
    assert received == [quarter, half, half, quarter] * 2
    gathered = plan_gather(held, served, CLUSTER, grid.seating().replica_groups()).bytes_report()
    assert {gathered.received(rank) for rank in range(8)} == {Fraction(3, 4)}


def mesh(stages: int, replicas: int, first: int = 0) -> Seating:
    """Stages outermost, as ReaL numbers them, from a first rank on."""
    grid = Grid(stages, 1, replicas, "mcore")
    return Seating(stages, 1, replicas, grid.seating().seats, first)


def test_reals_example_on_eight_devices_moves_what_is_needed_from_balanced_senders() -> None:
    model = even(2)
    train, generate = (
        seated_layout(model, mesh(2, 2)),
        seated_layout(model, mesh(2, 4)),
    )
    plan = plan_copies(train, generate, Nodes(8))
    report = plan.bytes_report()
    assert sum(report.received(rank) for rank in range(8)) == 3
    assert report.received(0) == report.received(1) == 0
    pairs = {(c.source, c.destination) for c in plan.copies if c.source != c.destination}
    assert pairs == {(0, 2), (1, 3), (2, 4), (3, 5), (2, 6), (3, 7)}
    sent = Counter({rank: report.ranks[rank].sent_bytes for rank in range(4)})
    assert sent[0] == sent[1] and sent[2] == sent[3]
    # ReaL's own plan moves 3.5 M: it sends to rank 1 what that has.


def test_a_holder_on_the_same_node_is_asked_first() -> None:
    model = even(1)
    train = seated_layout(model, Grid.parse("1-1-8").seating())
    some = Layout(model, {rank: train.shards[rank] for rank in (1, 5)})
    wanted = Layout(model, {rank: train.shards[rank] for rank in (0, 2, 3, 4, 6, 7)})
    plan = plan_copies(some, wanted, CLUSTER)
    assert {(c.source, c.destination) for c in plan.copies} == {
        *((1, 0), (1, 2), (1, 3)),
        *((5, 4), (5, 6), (5, 7)),
    }
    assert plan.bytes_report().link_bytes("network") == 0


def test_a_holder_of_a_smaller_box_on_the_same_node_is_asked_first() -> None:
    model = ModelSpec((TensorSpec("w", (8, 4), (0,), 0),), 1)
    (whole,) = seated_layout(model, Grid.parse("1-1-1").seating()).shards.values()
    halves = seated_layout(model, Grid.parse("1-2-1").seating()).shards
    # Rank 0 of the first node has all of it, rank 2 of the second one half.
    source = Layout(model, {0: whole, 2: halves[0]})
    near = plan_copies(source, Layout(model, {3: halves[0]}), Nodes(2))
    assert [(c.source, c.destination) for c in near.copies] == [(2, 3)]
    assert near.bytes_report().link_bytes("network") == 0
    both = plan_copies(source, Layout(model, {3: whole}), Nodes(2))
    check_complete(both)
    report = both.bytes_report()
    assert (report.link_bytes("node"), report.link_bytes("network")) == (64, 64)


def mixed(model: ModelSpec, data: st.DataObject) -> Layout:
    """Eight ranks that each hold what they would in a layout of their own."""
    shards = {}
    for rank in range(8):
        seating = Grid.parse(data.draw(st.sampled_from(["1-2-4", "1-4-2", "2-1-4"]))).seating()
        layout = seated_layout(model, seating)
        divide = data.draw(st.sampled_from([zero_partitioned, chunked, None]))
        if divide:
            layout = divide(layout, seating.data_groups())
        shards[rank] = layout.shards[rank]
    return Layout(model, shards)


@given(st.data(), st.integers(1, 4))
def test_no_byte_crosses_the_network_that_a_rank_of_the_node_holds(
    data: st.DataObject, per_node: int
) -> None:
    model = transformer(heads=4, kv_heads=4)
    (whole,) = seated_layout(model, Grid.parse("1-1-1").seating()).shards.values()
    source = Layout(model, {**mixed(model, data).shards, 8: whole})
    target, cluster = mixed(model, data), Nodes(per_node)
    plan = plan_copies(source, target, cluster)
    check_complete(plan)
    for copy in plan.copies:
        if cluster.link(copy.source, copy.destination) == "network":
            tensor, box = copy.gift
            near = [r for r in source.ranks if cluster.node(r) == cluster.node(copy.destination)]
            assert not any(box.meet(own) for r in near for own in source.boxes(r, tensor))
    gather = plan_gather(source, target, cluster, [source.ranks])
    for spec in model.tensors:
        gives = {
            rank: [box for name, box in gifts if name == spec.name]
            for rank, gifts in gather.gives.items()
        }
        every = [box for boxes in gives.values() for box in boxes]
        assert total(every) == union_numel(every) == spec.numel
        assert all(nested(boxes, source.boxes(rank, spec.name)) for rank, boxes in gives.items())


def test_pools_without_a_rank_in_common() -> None:
    model = transformer()
    train = seated_layout(model, Grid.parse("2-2-2", "mcore").seating())
    pool = Seating(1, 2, 2, Grid.parse("1-2-2").seating().seats, first_rank=8)
    plan = plan_copies(train, seated_layout(model, pool), CLUSTER)
    check_complete(plan)
    report = plan.bytes_report()
    assert report.link_bytes("local") == report.link_bytes("node") == 0
    assert all(report.ranks[rank].received_bytes == 0 for rank in range(8))
    sent = [report.ranks[rank].sent_bytes for rank in range(8)]
    assert max(sent) < 2 * report.model_bytes / 8 * 1.5


def check_complete(plan: CopyPlan) -> None:
    """Every element that is needed comes once, from a rank that holds it."""
    for rank in plan.target.ranks:
        for spec in plan.target.model.tensors:
            come = [
                c.gift[1] for c in plan.copies if c.destination == rank and c.gift[0] == spec.name
            ]
            wanted = plan.target.boxes(rank, spec.name)
            assert total(come) == union_numel(come) == union_numel(wanted) == total(wanted)
            assert union_numel([*come, *wanted]) == total(wanted)
    for copy in plan.copies:
        tensor, box = copy.gift
        assert any(held.meet(box) == box for held in plan.source.boxes(copy.source, tensor))


@given(GRIDS, GRIDS, st.sampled_from(["plain", "zero", "fsdp"]), st.booleans(), st.integers(0, 9))
def test_any_layout_becomes_any_other(
    one: Grid, other: Grid, shared: str, tied: bool, first: int
) -> None:
    model = transformer(tied=tied)
    source = seated_layout(model, one.seating())
    if shared != "plain":
        divide = zero_partitioned if shared == "zero" else chunked
        source = divide(source, one.seating().data_groups())
    seating = other.seating()
    target = seated_layout(
        model,
        Seating(seating.stages, seating.tensor, seating.replicas, seating.seats, first),
    )
    plan = plan_copies(source, target, CLUSTER)
    check_complete(plan)
    assert plan == plan_copies(source, target, CLUSTER), "every rank makes the same"
    report = plan.bytes_report()
    for rank in target.ranks:
        counts = report.ranks[rank]
        own = sum(union_numel([*target.boxes(rank, s.name)]) * s.itemsize for s in model.tensors)
        assert sum(counts.received.values()) == own
        assert counts.received["local"] >= 0
    assert sum(c.sent_bytes for c in report.ranks.values()) == sum(
        c.received_bytes for c in report.ranks.values()
    )


@given(GRIDS, st.sampled_from(GROUPINGS), st.integers(1, 2))
def test_a_group_that_gives_each_other_all_gives_no_element_twice(
    grid: Grid, grouping: str, ratio: int
) -> None:
    assume(grid.tensor % ratio == 0)
    sizes = GenerationSizes(grid.stages, grid.tensor // ratio, ratio, grid.replicas)
    model = transformer()
    held = seated_layout(model, grid.seating())
    serving = seat(grouping, grid, sizes, held)
    target = seated_layout(model, serving)
    plan = plan_gather(held, target, CLUSTER, grid.seating().replica_groups())
    for group in plan.groups:
        for spec in model.tensors:
            given = [box for rank in group for name, box in plan.gives[rank] if name == spec.name]
            assert total(given) == union_numel(given) == spec.numel


def test_what_several_of_a_group_hold_they_give_in_equal_shares() -> None:
    model = even(6)
    whole = seated_layout(model, Grid.parse("1-1-4").seating())
    plan = plan_gather(whole, whole, CLUSTER, [[0, 1, 2], [3]])
    given = {rank: total(box for _, box in plan.gives[rank]) for rank in range(4)}
    assert given == {0: 1024, 1: 1024, 2: 1024, 3: 3072}


def test_what_nobody_holds_is_named() -> None:
    model = even(2)
    train = seated_layout(model, Grid.parse("2-1-1").seating())
    half = Layout(model, {0: train.shards[0]})
    whole = seated_layout(model, Grid.parse("1-1-2").seating())
    with pytest.raises(ValueError, match=r"1\.rows\[0:16, 0:16\], needed by rank 0: no rank holds"):
        plan_copies(half, whole, CLUSTER)
    with pytest.raises(ValueError, match=r"needed by rank 0: no rank of its group \[0\] holds it"):
        plan_gather(train, whole, CLUSTER, [[0], [1]])


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([[0]], "rank 1: is 0 times in the groups"),
        ([[0, 1], [1]], "rank 1: is 2 times in the groups"),
    ],
)
def test_every_rank_is_in_one_group(groups: list[list[int]], told: str) -> None:
    whole = seated_layout(even(2), Grid.parse("1-1-2").seating())
    with pytest.raises(ValueError, match=told):
        plan_gather(whole, whole, CLUSTER, groups)


@pytest.mark.parametrize("units", [-2, 0, 3])
def test_a_component_is_made_of_whole_units(units: int) -> None:
    with pytest.raises(ValueError, match=f"component of size 4: must be a multiple of {units}"):
        Component(4, units)


def test_an_element_has_some_bytes() -> None:
    with pytest.raises(ValueError, match="w: itemsize 3 is none of"):
        TensorSpec("w", (4,), (0,), itemsize=3)


def test_a_switch_between_equal_layouts_moves_nothing() -> None:
    for grid in (Grid.parse("1-4-2"), Grid.parse("2-2-2", "mcore")):
        held = seated_layout(transformer(), grid.seating())
        sizes = GenerationSizes(grid.stages, grid.tensor, 1, grid.replicas)
        serving = max_overlap(held, sizes)
        report = plan_copies(held, seated_layout(held.model, serving), CLUSTER).bytes_report()
        assert all(report.received(rank) == 0 == report.redundant(rank) for rank in report.ranks)
        assert serving.of(0) == Coordinates(0, 0, 0)
