"""Groups of training and generation: the paper's, ReaL's, and what must hold for any sizes."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streamrl.resharding.byte_report import Nodes
from streamrl.resharding.grids import Coordinates, Grid
from streamrl.resharding.grouping import (
    GenerationSizes,
    max_overlap,
    micro_groups,
    seat,
    vanilla,
    zero_redundancy,
)
from streamrl.resharding.layouts import seated_layout
from streamrl.resharding.plans import plan_copies, plan_gather
from streamrl.resharding.tensor_specs import merged_stages
from tests.resharding.models import even, transformer


def test_training_groups_of_figure_8() -> None:
    seating = Grid.parse("1-4-2").seating()
    assert seating.tensor_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert seating.data_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert seating.replica_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_stages_outermost_is_what_megatron_and_real_do() -> None:
    # planner_resharding: the second node of two, ranks 8 to 15.
    seating = Grid.parse("2-2-2", "mcore").seating()
    assert seating.pipeline_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert seating.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert seating.data_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("order", ["hf", "mcore"])
@given(st.data())
def test_every_rank_has_coordinates_of_its_own(order: str, data: st.DataObject) -> None:
    stages, tensor, replicas = data.draw(st.tuples(*[st.integers(1, 4)] * 3))
    grid = Grid(stages, tensor, replicas, order)
    assert [grid.rank(grid.coordinates(rank)) for rank in range(grid.size)] == list(
        range(grid.size)
    )
    for groups in (
        grid.seating().tensor_groups(),
        grid.seating().pipeline_groups(),
        grid.seating().data_groups(),
        grid.seating().replica_groups(),
    ):
        assert sorted(rank for group in groups for rank in group) == list(range(grid.size))


FIGURES = [
    # train, generate, tensor groups, pipeline groups, micro-DP groups; zero redundancy
    (
        *("1-4-2", "1-2-2-2"),
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0], [1], [2], [3], [4], [5], [6], [7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ),
    ("1-2-2", "1-1-2-2", [[0], [1], [2], [3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]]),
    (
        *("2-4-1", "1-2-4-1"),
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0], [1], [2], [3], [4], [5], [6], [7]],
        [[0, 1, 4, 5], [2, 3, 6, 7]],
    ),
    (
        *("4-2-1", "2-1-4-1"),
        [[0], [1], [2], [3], [4], [5], [6], [7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
]


@pytest.mark.parametrize("grouping", ["zero", "overlap"])
@pytest.mark.parametrize(("train", "generate", "tensor", "pipeline", "micro"), FIGURES)
def test_zero_redundancy_groups_of_the_paper_and_overlap_comes_to_the_same(
    grouping: str,
    train: str,
    generate: str,
    tensor: list[list[int]],
    pipeline: list[list[int]],
    micro: list[list[int]],
) -> None:
    grid = Grid.parse(train)
    held = seated_layout(even(4), grid.seating())
    serving = seat(grouping, grid, GenerationSizes.parse(generate), held)
    assert serving.tensor_groups() == tensor
    assert serving.pipeline_groups() == pipeline
    assert micro_groups(grid, serving) == micro


@pytest.mark.parametrize(
    ("train", "generate", "tensor", "micro"),
    [
        (
            *("1-4-2", "1-2-2-2"),
            [[0, 1], [2, 3], [4, 5], [6, 7]],
            [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
        ("2-4-1", "1-2-4-1", [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_vanilla_groups_are_of_consecutive_ranks(
    train: str, generate: str, tensor: list[list[int]], micro: list[list[int]]
) -> None:
    grid = Grid.parse(train)
    serving = vanilla(grid, GenerationSizes.parse(generate))
    assert serving.tensor_groups() == tensor
    assert micro_groups(grid, serving) == micro


@pytest.mark.parametrize(
    ("train", "generate", "without"),
    [
        ("1-4-2", "1-2-2-2", [1, 2, 5, 6]),
        ("2-4-1", "1-2-4-1", [1, 2, 5, 6]),
        ("4-2-1", "2-1-4-1", [1, 3, 4, 6]),
    ],
)
def test_vanilla_leaves_ranks_nothing_of_what_they_had(
    train: str, generate: str, without: list[int]
) -> None:
    grid = Grid.parse(train)
    held = seated_layout(even(4), grid.seating())
    serving = vanilla(grid, GenerationSizes.parse(generate))
    report = plan_copies(held, seated_layout(even(4), serving), Nodes()).bytes_report()
    assert [rank for rank in report.ranks if not report.ranks[rank].received["local"]] == without


SIZES = st.integers(1, 4)


@given(SIZES, SIZES, st.integers(1, 2), SIZES, SIZES, st.sampled_from(["hf", "mcore"]))
def test_zero_redundancy_holds_for_all_sizes_that_divide_and_overlap_keeps_as_much(
    stages: int, tensor: int, replicas: int, more_stages: int, more_tensor: int, order: str
) -> None:
    assume(stages * more_stages <= 4 and tensor * more_tensor <= 8)
    grid = Grid(stages * more_stages, tensor * more_tensor, replicas, order)
    sizes = GenerationSizes(stages, tensor, more_stages * more_tensor, replicas)
    model = even(grid.stages, size=840)
    held = seated_layout(model, grid.seating())
    served = seated_layout(model, zero_redundancy(grid, sizes))
    report = plan_copies(held, served, Nodes()).bytes_report()
    expected = (sizes.micro - 1) / grid.model_ranks
    assert all(report.received(rank) == pytest.approx(expected) for rank in report.ranks)
    assert all(report.redundant(rank) == 0 for rank in report.ranks)
    other = seated_layout(model, max_overlap(held, sizes))
    best = plan_copies(held, other, Nodes()).bytes_report()
    assert sum(best.received(rank) for rank in best.ranks) == sum(
        report.received(rank) for rank in report.ranks
    )


@given(SIZES, SIZES, st.integers(1, 2), SIZES, SIZES, st.integers(2, 9), st.data())
def test_zero_redundancy_holds_where_the_stages_have_unequal_layers(
    stages: int, tensor: int, replicas: int, more_stages: int, more_tensor: int, layers: int, data
) -> None:
    assume(tensor * more_tensor in (1, 2, 4) and stages * more_stages <= layers + 2)
    order = data.draw(st.sampled_from(["hf", "mcore"]))
    grid = Grid(stages * more_stages, tensor * more_tensor, replicas, order)
    sizes = GenerationSizes(stages, tensor, more_stages * more_tensor, replicas)
    model = transformer(layers=layers, heads=4, kv_heads=4)
    listed = None
    if data.draw(st.booleans()):
        ends = data.draw(st.permutations(range(1, layers + 2)).map(lambda p: p[: grid.stages - 1]))
        listed = [b - a for a, b in pairwise([0, *sorted(ends), layers + 2])]
    serving = zero_redundancy(grid, sizes)
    held = seated_layout(model, grid.seating(), stages=listed)
    merged = merged_stages(listed, stages) if listed else None
    served = seated_layout(model, serving, stages=merged)
    for plan in (
        plan_copies(held, served, Nodes()),
        plan_gather(held, served, Nodes(), micro_groups(grid, serving)),
    ):
        report = plan.bytes_report()
        for rank in report.ranks:
            assert report.redundant(rank) == 0
            assert report.ranks[rank].peak == served.num_bytes(rank)


@given(SIZES, SIZES, SIZES, st.randoms(use_true_random=False))
def test_overlap_keeps_at_least_what_any_other_seating_keeps(
    stages: int, tensor: int, replicas: int, random
) -> None:
    assume(stages <= 3 and tensor in (1, 2, 4) and stages * tensor * replicas <= 12)
    world = stages * tensor * replicas
    serving_tensor = random.choice([t for t in (1, 2, 4) if world % t == 0])
    sizes = GenerationSizes(1, serving_tensor, world // serving_tensor, 1)
    model = transformer()
    held = seated_layout(model, Grid(stages, tensor, replicas).seating())

    def kept(seating) -> int:
        report = plan_copies(held, seated_layout(model, seating), Nodes()).bytes_report()
        return sum(counts.received["local"] for counts in report.ranks.values())

    best = max_overlap(held, sizes)
    seats = list(best.seats)
    random.shuffle(seats)
    shuffled = type(best)(best.stages, best.tensor, best.replicas, tuple(seats))
    assert kept(best) >= kept(shuffled)


def test_more_tensor_ranks_than_in_training_keep_their_neighbours() -> None:
    grid = Grid.parse("1-2-4")
    held = seated_layout(even(2), grid.seating())
    serving = max_overlap(held, GenerationSizes(1, 4, 2, 1))
    report = plan_copies(held, seated_layout(even(2), serving), Nodes()).bytes_report()
    assert all(report.received(rank) == 0 for rank in report.ranks)
    assert [sorted(group) for group in serving.tensor_groups()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="training 1-4-2 has 8 ranks, generation 1-2-2-1 has 4"):
        zero_redundancy(Grid.parse("1-4-2"), GenerationSizes.parse("1-2-2-1"))
    with pytest.raises(ValueError, match="1-4-2-1 must divide 1-2-4 in stages and tensor ranks"):
        zero_redundancy(Grid.parse("1-2-4"), GenerationSizes.parse("1-4-2-1"))
    with pytest.raises(ValueError, match="1-4: must be pipeline-tensor-data"):
        Grid.parse("1-4")
    with pytest.raises(ValueError, match="1-0-2: must be at least 1"):
        Grid.parse("1-0-2")
    assert Grid.parse("2-4-1").coordinates(5) == Coordinates(stage=1, tensor=1, replica=0)
