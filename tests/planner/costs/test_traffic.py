"""Bytes and seconds of weight transfers, from the plan that executors carry out."""

from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from benchmarks.table_2 import compute_table_2, report_plan
from streamrl.engines.models.model_shapes import MODEL_SHAPES, ModelShape
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.traffic import TransferCost, WeightTraffic
from streamrl.resharding.grids import RankGrid
from tests.planner.assignments import make_assignment

SMALL = ModelShape("small", 6, 64, 128, 8, 8, 256, 8)
FULL_SPEED = CostConstants(link_fraction=1.0, network_fraction=1.0)


def make_traffic(cluster: str = "16x8xA100@200Gb") -> WeightTraffic:
    return WeightTraffic(Cluster.from_text(cluster), FULL_SPEED)


def transfer(
    model: ModelShape | str,
    train: str,
    follow: str,
    first: int = 0,
    *,
    cluster: str = "16x8xA100@200Gb",
    zero_stage: int = 1,
) -> TransferCost:
    """Return the transfer from devices 0 on to a follower's."""
    shape = MODEL_SHAPES[model] if isinstance(model, str) else model
    source = make_assignment(train, zero_stage=zero_stage)
    return make_traffic(cluster).estimate_transfer(shape, source, make_assignment(follow, first))


@pytest.mark.parametrize(
    ("train", "follow"), [("1-8-2", "1-2-8"), ("1-8-2", "1-4-4"), ("1-4-4", "1-1-16")]
)
def test_transfer_on_shared_devices_matches_table_2(train: str, follow: str):
    source, target = make_assignment(train), make_assignment(follow)
    plan = make_traffic().plan_transfer(SMALL, source, target)
    report = report_plan(plan, plan.cluster)
    expected = compute_table_2(
        *(source.grid.pp_size, source.grid.tp_size, source.grid.dp_size),
        serving_stages=target.grid.pp_size,
        serving_tensor=target.grid.tp_size,
    )["zero"]
    # Norms are whole on all ranks; the rest of the model divides evenly.
    norms = (2 * 6 + 1) * 64 * 2
    split_bytes = report.model_bytes - norms
    for rank, counts in report.rank_bytes.items():
        assert Fraction(counts.received_bytes) == expected.received * split_bytes
        assert Fraction(report.peak_bytes[rank]) == expected.peak * split_bytes + norms
        assert report.redundant_bytes[rank] == expected.redundant


def test_equal_layouts_transfer_nothing():
    nothing = transfer("llama-7b", "1-8-2", "1-8-2")
    assert (nothing.seconds, nothing.received_bytes, nothing.extra_bytes) == (0.0, 0, 0)


def test_transfer_within_a_node_is_bound_by_links():
    # 13B, 1-8-2 to 1-4-4: each rank gets another eighth from its neighbor, at 300 GB/s.
    within = transfer("llama-13b", "1-8-2", "1-4-4", cluster="2x8xA100@200Gb")
    assert within.seconds == pytest.approx(within.received_bytes / 300e9)
    assert within.received_bytes == pytest.approx(26.03e9 / 8, rel=0.01)
    assert within.extra_bytes == within.received_bytes


def check_equal_transfers(
    traffic: WeightTraffic, source: CallAssignment, target: CallAssignment
) -> None:
    merged = traffic.plan_transfer(SMALL, source, target).report_bytes()
    full = traffic.plan_transfer(SMALL, source, target, full=True).report_bytes()
    if source.mesh != target.mesh or is_nested(source.grid, target.grid):
        for rank, counts in merged.items():
            assert counts.received_by_link == full[rank].received_by_link
            assert counts.memory_bytes == full[rank].memory_bytes
    # Otherwise ranks are assigned by largest overlap, and several assignments may be equally good.
    for total in (lambda c: c.received_by_link["local"], lambda c: c.received_bytes):
        planned, complete = (list(map(total, report.values())) for report in (merged, full))
        # The plan covers one of several equal parts.
        assert sum(planned) * len(complete) == sum(complete) * len(planned)
    largest = [max(c.received_bytes for c in report.values()) for report in (merged, full)]
    assert largest[0] == pytest.approx(largest[1], rel=0.02)
    # Senders may be chosen differently; none then sends much more.
    assert traffic.report_duration_s(merged) == pytest.approx(
        traffic.report_duration_s(full), rel=0.35, abs=1e-9
    )


def is_nested(train: RankGrid, follow: RankGrid) -> bool:
    """Return whether every trained replica turns into whole followers."""
    is_divisible = train.pp_size % follow.pp_size == 0 == train.tp_size % follow.tp_size
    return is_divisible and follow.dp_size % train.dp_size == 0


GRIDS = st.tuples(*[st.sampled_from([1, 2, 4])] * 3).map(lambda sizes: RankGrid(*sizes))


@example(RankGrid(1, 2, 4), RankGrid(4, 1, 2), False)
@given(GRIDS, GRIDS, st.booleans())
def test_merged_plan_receives_the_same_bytes(train: RankGrid, follow: RankGrid, separate: bool):
    source = CallAssignment(Mesh(0, train.num_ranks), train)
    # Separate devices start at the next node, or within the same node.
    first = -(-train.num_ranks // follow.num_ranks) * follow.num_ranks if separate else 0
    assume(separate or follow.num_ranks == train.num_ranks)
    check_equal_transfers(
        make_traffic(), source, CallAssignment(Mesh(first, follow.num_ranks), follow)
    )


def test_overlap_assignment_keeps_shards_in_place():
    # From 2 to 4 tensor ranks each device already holds all it serves.
    assert transfer(SMALL, "1-2-4", "1-4-2").received_bytes == 0


def test_zero_3_shards_are_gathered():
    # ZeRO stage 3 over two replicas: half of every shard comes from the other replica.
    unsharded, sharded = (
        transfer(SMALL, "1-4-2", "1-4-2", cluster="1x8xA100", zero_stage=stage) for stage in (1, 3)
    )
    model_bytes = SMALL.to_model_spec().num_bytes
    assert unsharded.received_bytes == 0
    assert sharded.received_bytes == pytest.approx(model_bytes / 8, rel=0.1)
