"""Planning by patterns gives the same plans as the straightforward reference."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.grids import RankAssignment, RankGrid
from streamrl.resharding.layouts import create_layout, partition_fsdp2, partition_zero3
from streamrl.resharding.plans import (
    BoxCopy,
    CopyPlan,
    GatherPlan,
    NodeTopology,
    find_patterns,
    plan_copies,
    plan_gather,
)
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec
from tests.resharding import slow_plans
from tests.resharding.models import GRIDS, transformer

PARTITIONS = {
    "plain": lambda layout, groups: layout,
    "zero": partition_zero3,
    "fsdp": partition_fsdp2,
}


def odd_model(model: ModelSpec) -> ModelSpec:
    """Return a model with two itemsizes and a scalar."""
    tensors = [
        TensorSpec(
            s.name,
            s.shape,
            s.pipeline_positions,
            s.split_dim,
            s.components,
            2 + 2 * ("o" in s.name),
        )
        for s in model.tensors
    ]
    return ModelSpec((*tensors, TensorSpec("scale", (), (0,))), model.num_pipeline_positions)


def assert_report(
    plan: CopyPlan | GatherPlan, planned: Iterable[BoxCopy], *, keeps_copy: bool = False
) -> None:
    expected = slow_plans.report_bytes(
        plan.source, plan.target, plan.cluster, planned, keeps_copy=keeps_copy
    )
    report = plan.report_bytes()
    assert report.rank_bytes.keys() == expected.keys()
    for rank, counts in report.rank_bytes.items():
        actual = (
            counts.received_by_link,
            counts.sent_by_link,
            counts.peak_bytes,
            counts.redundant_bytes,
        )
        assert actual == expected[rank], rank


@given(
    GRIDS,
    GRIDS,
    st.sampled_from(sorted(PARTITIONS)),
    st.sampled_from(sorted(PARTITIONS)),
    st.sampled_from([0, 0, 5]),
    st.integers(1, 8),
)
def test_copy_plans_equal_the_reference_to_the_byte(
    source_grid: RankGrid,
    target_grid: RankGrid,
    source_sharing: str,
    target_sharing: str,
    first: int,
    per_node: int,
):
    model = odd_model(transformer())
    source = PARTITIONS[source_sharing](
        create_layout(model, source_grid.assign_ranks()),
        source_grid.assign_ranks().list_dp_groups(),
    )
    assignment = target_grid.assign_ranks()
    moved = RankAssignment(
        assignment.pp_size, assignment.tp_size, assignment.dp_size, assignment.coordinates, first
    )
    target = PARTITIONS[target_sharing](create_layout(model, moved), moved.list_dp_groups())
    cluster = NodeTopology(per_node)
    plan = plan_copies(source, target, cluster)
    planned = slow_plans.plan_copies(source, target, cluster)
    assert list(plan.copies) == planned
    assert_report(plan, planned)


@given(GRIDS, st.sampled_from(sorted(PARTITIONS)), st.booleans(), st.integers(1, 8))
def test_gather_plans_equal_the_reference_to_the_byte(
    grid: RankGrid, sharing: str, gathers_all: bool, per_node: int
):
    model = odd_model(transformer())
    plain = create_layout(model, grid.assign_ranks())
    source = PARTITIONS[sharing](plain, grid.assign_ranks().list_dp_groups())
    ranks = list(range(grid.num_ranks))
    groups = [ranks] if gathers_all else grid.assign_ranks().list_dp_groups()
    for keeps_copy in (False, True):
        plan = plan_gather(source, plain, NodeTopology(per_node), groups, keeps_copy=keeps_copy)
        assert plan.contributions == slow_plans.plan_contributions(source, groups)
        # Every rank of a group gets all that the group holds, needed or not.
        copies = [
            BoxCopy(named_box, sender, receiver)
            for group in groups
            for sender, receiver in itertools.product(group, repeat=2)
            for named_box in plan.contributions[sender]
        ]
        assert_report(plan, copies, keeps_copy=keeps_copy)


def test_equally_sharded_layers_form_one_pattern():
    model = transformer(layers=8)
    full = create_layout(model, RankGrid.from_text("1-1-6").assign_ranks())
    for divide in (partition_zero3, partition_fsdp2):
        patterns = find_patterns(divide(full, [list(range(6))]), full)
        assert [pattern.tensors[0] for pattern in patterns] == [
            *("embed", "1.norm", "1.qkv", "1.o", "1.gate_up", "1.down")
        ]
        assert sum(len(pattern.tensors) for pattern in patterns) == len(model.tensors)
        assert patterns[1].tensors[-1] == "norm"


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
        plan_copies(parts, full, NodeTopology()).report_bytes()
        plan_gather(parts, full, NodeTopology(), [list(range(ranks))]).report_bytes()
        return len(intersected)

    assert count_intersections(4, 8) == count_intersections(40, 8) > 0
    assert count_intersections(4, 32) < 2 * (32 / 8) * count_intersections(4, 8)
