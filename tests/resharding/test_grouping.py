"""Assignments of ranks: the paper's, ReaL's, and invariants for any sizes."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.resharding import (
    assign_generation_ranks,
    list_micro_dp_groups,
    parse_generation_sizes,
)
from benchmarks.table_2 import received_fraction, redundant_fraction, report_plan
from streamrl.resharding.grids import RankCoordinates, RankGrid
from streamrl.resharding.grouping import (
    GenerationSizes,
    assign_max_overlap,
    assign_zero_redundancy,
)
from streamrl.resharding.layouts import create_layout
from streamrl.resharding.plans import NodeTopology, plan_copies
from streamrl.resharding.tensor_specs import split_stages_evenly
from tests.resharding.models import even, transformer


def test_training_groups_of_figure_8_of_the_paper():
    assignment = RankGrid.from_text("1-4-2").assign_ranks()
    assert assignment.list_tp_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert assignment.list_dp_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert assignment.group_ranks("dp_rank") == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("order", ["hf", "mcore"])
@given(st.data())
def test_ranks_and_coordinates_are_a_bijection(order: str, data: st.DataObject):
    stages, tensor, replicas = data.draw(st.tuples(*[st.integers(1, 4)] * 3))
    grid = RankGrid(stages, tensor, replicas, order)
    assert len({grid.get_coordinates(rank) for rank in range(grid.num_ranks)}) == grid.num_ranks
    for groups in (
        grid.assign_ranks().list_tp_groups(),
        grid.assign_ranks().group_ranks("dp_rank", "tp_rank"),
        grid.assign_ranks().list_dp_groups(),
        grid.assign_ranks().group_ranks("dp_rank"),
    ):
        assert sorted(rank for group in groups for rank in group) == list(range(grid.num_ranks))


FIGURES = [
    # train, generate, tensor groups, micro-DP groups; zero redundancy
    ("1-4-2", "1-2-2-2", [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("1-2-2", "1-1-2-2", [[0], [1], [2], [3]], [[0, 1], [2, 3]]),
    ("2-4-1", "1-2-4-1", [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("4-2-1", "2-1-4-1", [[rank] for rank in range(8)], [[0, 1, 2, 3], [4, 5, 6, 7]]),
]


@pytest.mark.parametrize("grouping", ["zero", "overlap"])
@pytest.mark.parametrize(("train", "generate", "tensor", "micro"), FIGURES)
def test_zero_redundancy_matches_the_paper_and_overlap_agrees(
    grouping: str, train: str, generate: str, tensor: list[list[int]], micro: list[list[int]]
):
    grid, sizes = RankGrid.from_text(train), parse_generation_sizes(generate)
    training_layout = create_layout(even(4), grid.assign_ranks())
    serving = assign_generation_ranks(grouping, grid, sizes, training_layout)
    assert serving.list_tp_groups() == tensor
    assert list_micro_dp_groups(grid, serving) == micro


SIZES = st.integers(1, 4)


@given(SIZES, SIZES, st.integers(1, 2), SIZES, SIZES, st.sampled_from(["hf", "mcore"]))
def test_zero_redundancy_for_all_dividing_sizes_and_overlap_keeps_as_much(
    stages: int, tensor: int, replicas: int, more_stages: int, more_tensor: int, order: str
):
    assume(stages * more_stages <= 4 and tensor * more_tensor <= 8)
    grid = RankGrid(stages * more_stages, tensor * more_tensor, replicas, order)
    sizes = GenerationSizes(stages, tensor, more_stages * more_tensor, replicas)
    model = even(grid.pp_size, size=840)
    training_layout = create_layout(model, grid.assign_ranks())
    served = create_layout(model, assign_zero_redundancy(grid, sizes))
    report = report_plan(plan_copies(training_layout, served, NodeTopology()), NodeTopology())
    expected = (sizes.micro_dp_size - 1) / (grid.pp_size * grid.tp_size)
    assert all(
        received_fraction(report, rank) == pytest.approx(expected) for rank in report.rank_bytes
    )
    assert all(redundant_fraction(report, rank) == 0 for rank in report.rank_bytes)
    overlap_layout = create_layout(model, assign_max_overlap(training_layout, sizes))
    best_plan = plan_copies(training_layout, overlap_layout, NodeTopology())
    best = report_plan(best_plan, NodeTopology())
    assert sum(received_fraction(best, rank) for rank in best.rank_bytes) == sum(
        received_fraction(report, rank) for rank in report.rank_bytes
    )


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_merged_stages_are_those_of_fewer_stages(stages: int, more: int, extra: int):
    positions = stages * more + extra
    many = split_stages_evenly(positions, stages * more)
    merged = [sum(many[start : start + more]) for start in range(0, stages * more, more)]
    assert tuple(merged) == split_stages_evenly(positions, stages)


@given(SIZES, SIZES, SIZES, st.randoms(use_true_random=False))
def test_overlap_keeps_at_least_as_much_as_any_assignment(
    stages: int, tensor: int, replicas: int, random
):
    assume(stages <= 3 and tensor in (1, 2, 4) and stages * tensor * replicas <= 12)
    world = stages * tensor * replicas
    serving_tensor = random.choice([t for t in (1, 2, 4) if world % t == 0])
    sizes = GenerationSizes(1, serving_tensor, world // serving_tensor, 1)
    model = transformer()
    training_layout = create_layout(model, RankGrid(stages, tensor, replicas).assign_ranks())

    def count_received(assignment) -> int:
        plan = plan_copies(training_layout, create_layout(model, assignment), NodeTopology())
        return sum(plan.count_received_bytes().values())

    best = assign_max_overlap(training_layout, sizes)
    coordinates = list(best.coordinates)
    random.shuffle(coordinates)
    shuffled = type(best)(best.pp_size, best.tp_size, best.dp_size, tuple(coordinates))
    assert count_received(best) <= count_received(shuffled)


def test_incompatible_sizes_are_refused_by_name():
    for train, generate, fault in (
        ("1-4-2", "1-2-2-1", "training 1-4-2 has 8 ranks, generation 1-2-2-1 has 4"),
        ("1-2-4", "1-4-2-1", "1-4-2-1 must divide 1-2-4 in stages and tensor ranks"),
    ):
        grid = RankGrid.from_text(train)
        layout = create_layout(even(2), grid.assign_ranks())
        with pytest.raises(ValueError, match=fault):
            assign_generation_ranks("zero", grid, parse_generation_sizes(generate), layout)
    with pytest.raises(ValueError, match="1-4: must be pipeline-tensor-data"):
        RankGrid.from_text("1-4")
    with pytest.raises(ValueError, match="1-0-2: must be at least 1"):
        RankGrid.from_text("1-0-2")
    assert RankGrid.from_text("2-4-1").get_coordinates(5) == RankCoordinates(
        pp_rank=1, tp_rank=1, dp_rank=0
    )
