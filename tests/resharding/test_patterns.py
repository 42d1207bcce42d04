"""Tensors that are cut alike are planned once, and it comes to what the plain way comes to."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.resharding.boxes import Box
from streamrl.resharding.byte_report import Nodes
from streamrl.resharding.grids import Grid, Seating
from streamrl.resharding.layouts import chunked, seated_layout, zero_partitioned
from streamrl.resharding.patterns import patterns
from streamrl.resharding.plans import Copy, CopyPlan, GatherPlan, plan_copies, plan_gather
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec
from tests.resharding import slow_plans
from tests.resharding.models import GRIDS, transformer

SHARING = {
    "plain": lambda layout, groups: layout,
    "zero": zero_partitioned,
    "fsdp": chunked,
}


def odd_model(model: ModelSpec) -> ModelSpec:
    """With elements of two sizes and a scalar."""
    tensors = [
        TensorSpec(s.name, s.shape, s.places, s.split_dim, s.components, 2 + 2 * ("o" in s.name))
        for s in model.tensors
    ]
    return ModelSpec((*tensors, TensorSpec("scale", (), (0,))), model.num_places)


def check_report(
    plan: CopyPlan | GatherPlan, made: Iterable[Copy], *, keeps_copy: bool = False
) -> None:
    expected = slow_plans.report(
        plan.source, plan.target, plan.cluster, made, keeps_copy=keeps_copy
    )
    report = plan.bytes_report()
    assert report.ranks.keys() == expected.keys()
    for rank, counts in report.ranks.items():
        found = (counts.received, counts.sent, counts.peak, counts.redundant)
        assert found == expected[rank], rank


@given(
    GRIDS,
    GRIDS,
    st.sampled_from(sorted(SHARING)),
    st.sampled_from(sorted(SHARING)),
    st.sampled_from([0, 0, 5]),
    st.integers(1, 8),
)
def test_copies_are_those_of_the_plain_way_to_the_last_byte(
    one: Grid, other: Grid, held: str, wanted: str, first: int, per_node: int
) -> None:
    model = odd_model(transformer())
    source = SHARING[held](seated_layout(model, one.seating()), one.seating().data_groups())
    seating = other.seating()
    moved = Seating(seating.stages, seating.tensor, seating.replicas, seating.seats, first)
    target = SHARING[wanted](seated_layout(model, moved), moved.data_groups())
    cluster = Nodes(per_node)
    plan = plan_copies(source, target, cluster)
    made = slow_plans.copies(source, target, cluster)
    assert list(plan.copies) == made
    check_report(plan, made)


@given(GRIDS, st.sampled_from(sorted(SHARING)), st.booleans(), st.integers(1, 8))
def test_gathers_are_those_of_the_plain_way_to_the_last_byte(
    grid: Grid, held: str, everyone: bool, per_node: int
) -> None:
    model = odd_model(transformer())
    plain = seated_layout(model, grid.seating())
    source = SHARING[held](plain, grid.seating().data_groups())
    ranks = list(range(grid.size))
    groups = [ranks] if everyone else grid.seating().data_groups()
    for keeps_copy in (False, True):
        plan = plan_gather(source, plain, Nodes(per_node), groups, keeps_copy=keeps_copy)
        assert plan.gives == slow_plans.gives(source, groups)
        check_report(plan, plan.copies, keeps_copy=keeps_copy)


def test_layers_that_are_cut_alike_are_one_pattern() -> None:
    model = transformer(layers=8)
    whole = seated_layout(model, Grid.parse("1-1-6").seating())
    for divide in (zero_partitioned, chunked):
        found = patterns(divide(whole, [list(range(6))]), whole)
        assert [pattern.tensors[0] for pattern in found] == [
            *("embed", "1.norm", "1.qkv", "1.o", "1.gate_up", "1.down")
        ]
        assert sum(len(pattern.tensors) for pattern in found) == len(model.tensors)
        assert found[1].tensors[-1] == "norm"


def test_planning_grows_with_the_ranks_and_not_with_the_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[Box] = []
    plain = Box.meet

    def noted(box: Box, other: Box) -> Box | None:
        met.append(box)
        return plain(box, other)

    monkeypatch.setattr(Box, "meet", noted)

    def meetings(layers: int, ranks: int) -> int:
        whole = seated_layout(transformer(layers=layers), Grid(1, 1, ranks).seating())
        parts = zero_partitioned(whole, [list(range(ranks))])
        met.clear()
        plan_copies(parts, whole, Nodes()).bytes_report()
        plan_gather(parts, whole, Nodes(), [list(range(ranks))]).bytes_report()
        return len(met)

    assert meetings(4, 8) == meetings(40, 8) > 0
    assert meetings(4, 32) < 2 * (32 / 8) * meetings(4, 8)
