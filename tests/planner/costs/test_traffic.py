"""Bytes and seconds of weight transfers by formula."""

import pytest

from streamrl.engines.models.model_shapes import MODEL_SHAPES
from streamrl.placement.clusters import Cluster
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.traffic import TransferCost, WeightTraffic
from streamrl.resharding.grouping import GenerationSizes, assign_max_overlap
from streamrl.resharding.layouts import create_layout
from streamrl.resharding.plans import NodeTopology, plan_copies
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec
from tests.planner.notations import make_assignment

SHAPE = MODEL_SHAPES["llama-13b"]
MODEL_BYTES = 2 * SHAPE.num_params
MATRIX = ModelSpec((TensorSpec("matrix", (64, 64), (0,), 0),), 1)
FULL_SPEED = CostConstants(link_fraction=1.0, network_fraction=1.0)


def transfer(
    train: str, follow: str, first: int = 0, *, cluster: str = "2x8xA100@200Gb", zero_stage: int = 1
) -> TransferCost:
    """Return the cost of a transfer from devices 0 on to a follower's from `first` on."""
    source = make_assignment(train, zero_stage=zero_stage)
    traffic = WeightTraffic(Cluster.from_text(cluster), FULL_SPEED)
    return traffic.estimate_transfer(SHAPE, source, make_assignment(follow, first))


@pytest.mark.parametrize(
    ("train", "follow", "zero_stage", "fraction"),
    [
        # Table 2 of HybridFlow: a rank holds an eighth, and serves a half or a quarter.
        ("1-8-2", "1-2-8", 1, 1 / 2 - 1 / 8),
        ("1-8-2", "1-4-4", 1, 1 / 4 - 1 / 8),
        ("1-4-4", "1-1-16", 1, 3 / 4),
        ("1-8-2", "1-8-2", 1, 0),
        # Each device already holds all that it serves.
        ("1-2-8", "1-4-4", 1, 0),
        # ZeRO stage 3 over two replicas: half of every shard comes from the other replica.
        ("1-8-2", "1-8-2", 3, 1 / 16),
    ],
)
def test_a_follower_on_the_same_devices_receives_what_it_lacks(
    train: str, follow: str, zero_stage: int, fraction: float
):
    received = transfer(train, follow, zero_stage=zero_stage).extra_bytes
    assert received == pytest.approx(fraction * MODEL_BYTES, abs=1e-3 * MODEL_BYTES)
    if zero_stage == 1:
        # The copy plan of a run moves as many bytes.
        source = create_layout(MATRIX, make_assignment(train).grid.assign_ranks())
        served = make_assignment(follow).grid
        sizes = GenerationSizes(served.pp_size, served.tp_size, served.dp_size, 1)
        target = assign_max_overlap(source, sizes)
        plan = plan_copies(source, create_layout(MATRIX, target), NodeTopology(8))
        assert max(plan.count_received_bytes().values()) == fraction * MATRIX.num_bytes


def test_links_bound_transfers_within_a_node_and_networks_those_between_nodes():
    # Each rank gets another eighth from its neighbor, at 300 GB/s.
    within = transfer("1-8-2", "1-4-4")
    assert within.seconds == pytest.approx(within.extra_bytes / 300e9)
    # Each of 8 devices receives the whole model over the network of its node.
    between = transfer("1-1-8", "1-1-8", 8)
    assert between.extra_bytes == MODEL_BYTES
    assert between.seconds == pytest.approx(8 * MODEL_BYTES / 25e9)
    # On parts of a node, one trained device sends to three others.
    assert transfer("1-1-1", "1-1-3", 1).seconds == pytest.approx(3 * MODEL_BYTES / 300e9)


def test_the_slowest_network_of_a_mesh_bounds_its_transfers():
    fast, slow = (
        transfer("1-1-8", "1-1-16", 8, cluster=f"2x8xA100@200Gb,8xA100@{gigabits}Gb").seconds
        for gigabits in (200, 100)
    )
    assert slow == pytest.approx(2 * fast)
