"""Calls that leave their weights on the host while others have the devices."""

from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.errors import ConfigError
from streamrl.placement import Placement
from streamrl.placement.clusters import GB, Cluster
from streamrl.placement.costs import CostConstants, CostModel
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import MODEL_SHAPES
from streamrl.placement.placements import CallAssignment
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.workload import FixedLength, Workload
from streamrl.resharding import RankGrid

GRPO = build_dataflow(("scores", "ref_logprobs", "generator_logprobs"))
SHAPE = MODEL_SHAPES["llama-7b"]
PROBLEM = PlacementProblem(
    GRPO,
    {"policy": SHAPE, "reference": SHAPE},
    Workload(64, 1, 512, FixedLength(512)),
    Cluster.from_text("2x8xA100"),
)
STAYS = CostConstants()
OPTIMIZER = replace(STAYS, offloads_optimizer=True)
RESTS = replace(OPTIMIZER, offloads_weights=True)
HOST = 32 * GB * 0.8
"""Bytes/s of an A100 to its host."""


def placement(reference: int = 0) -> Placement:
    """Trained and generated on the first node, the reference from that device on."""
    one = CallAssignment(Mesh(0, 8), RankGrid(1, 1, 8))
    return Placement(
        {"train": one, "generate": one, "reference": replace(one, mesh=Mesh(reference, 8))}
    )


def test_what_is_trained_comes_from_the_host_and_goes_back_once_a_step() -> None:
    steps = [
        CostModel(PROBLEM, each).predict_timings(placement()).train["policy"].step_s
        for each in (STAYS, OPTIMIZER, RESTS)
    ]
    optimizer, weights = 12 * SHAPE.num_params / 8, 2 * SHAPE.num_params
    assert steps[1] - steps[0] == pytest.approx(2 * optimizer / HOST)
    assert steps[2] - steps[0] == pytest.approx(2 * (optimizer + weights) / HOST)


def test_what_only_scores_comes_from_the_host_once_a_step() -> None:
    found = [
        CostModel(PROBLEM, each).predict_timings(placement()).score["reference"]
        for each in (STAYS, OPTIMIZER, RESTS)
    ]
    assert found[0] == found[1]
    # 64 rollouts of 1024 tokens on 8 replicas, up to 32 at once: one batch.
    assert found[2].batch_s - found[0].batch_s == pytest.approx(2 * SHAPE.num_params / HOST)


def test_what_rests_makes_room_for_keys_and_values() -> None:
    rooms = [
        CostModel(PROBLEM, each).kv_capacity_bytes(placement())
        for each in (STAYS, OPTIMIZER, RESTS)
    ]
    assert rooms[1] - rooms[0] == pytest.approx(12 * SHAPE.num_params / 8)
    # Trained weights and gradients; the reference's weights come while rollouts are still there.
    assert rooms[2] - rooms[1] == pytest.approx((2 + 4) * SHAPE.num_params)
    kept = CostModel(PROBLEM, RESTS).predict_memory(placement())
    assert kept["train"].resident_bytes == kept["reference"].resident_bytes == 0.0


def test_who_is_alone_on_its_devices_does_not_rest() -> None:
    apart = placement(8)
    stays, rests = (CostModel(PROBLEM, each) for each in (STAYS, RESTS))
    assert stays.predict_timings(apart).score == rests.predict_timings(apart).score
    assert stays.predict_memory(apart)["reference"] == rests.predict_memory(apart)["reference"]


def test_a_model_that_does_not_fit_beside_others_fits_in_turn_with_them() -> None:
    shape = MODEL_SHAPES["llama-13b"]
    problem = replace(PROBLEM, models={"policy": shape, "reference": shape})
    four = CallAssignment(Mesh(0, 8), RankGrid(1, 4, 2))
    calls = {
        "train": four,
        "generate": four,
        "reference": CallAssignment(Mesh(0, 8), RankGrid(1, 1, 8)),
    }
    assert "resident" in CostModel(problem, STAYS).explain_infeasible(Placement(calls))
    assert not CostModel(problem, RESTS).explain_infeasible(Placement(calls))


def test_a_device_of_a_file_says_how_fast_its_host_is() -> None:
    entry = {"name": "X", "tflops": 1, "memory_gb": 1, "memory_gbps": 1, "link_gbps": 1}
    node = {"device": entry, "devices": 1}
    found = Cluster.from_dict({"nodes": [node]}, place="c")
    assert found.node_groups[0].device.host_bytes_per_s == 32e9
    node["device"] = entry | {"host_gbps": 64}
    assert (
        Cluster.from_dict({"nodes": [node]}, place="c").node_groups[0].device.host_bytes_per_s
        == 64e9
    )
    node["device"] = entry | {"host_gbps": 0}
    with pytest.raises(ConfigError, match=r"host_gbps=0: must be at least 0\.001"):
        Cluster.from_dict({"nodes": [node]}, place="c")
