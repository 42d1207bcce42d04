"""Sets, ratios and meshes as notations of one placement."""

import json
from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement, PlacementMode
from streamrl.resharding.grids import RankGrid
from tests.planner.notations import placement_from_meshes

PPO = build_dataflow(("generator_logprobs", "scores", "ref_logprobs", "values"))
GRPO = build_dataflow(("generator_logprobs", "scores"))


REAL_1X8 = {
    "generate": ("0-7", "2-1-4"),
    "value": ("0-1", "1-1-2"),
    "reward": ("2-3", "2-1-1"),
    "reference": ("4-7", "4-1-1"),
    "train_critic": ("4-7", "2-1-2"),
    "train": ("0-3", "2-1-2"),
}
"""ReaL's documented placement of PPO on one node."""


def test_meshes_per_call_determine_which_calls_overlap():
    placement = placement_from_meshes(REAL_1X8)
    placement.check_valid(PPO, Cluster.from_text("8xA100"))
    concurrent = [("value", "reward"), ("reward", "reference"), ("value", "reference")]
    assert not any(placement.overlaps(*pair) for pair in concurrent)
    assert not placement.overlaps("train", "train_critic")
    assert all(placement.overlaps("generate", stage) for stage in REAL_1X8)


@pytest.mark.parametrize(
    ("train", "staleness", "mode"),
    [
        ("0-7", 0, PlacementMode.COLOCATED),
        ("0-3", 0, PlacementMode.SPLIT),
        ("8-15", 0, PlacementMode.DISAGGREGATED),
        ("8-15", 2, PlacementMode.ASYNCHRONOUS),
    ],
)
def test_the_mode_follows_from_the_devices(train: str, staleness: int, mode: PlacementMode):
    size = Mesh.from_text(train).size
    meshes = {"generate": ("0-7", "1-1-8"), "train": (train, f"1-1-{size}")}
    placement = placement_from_meshes(meshes, max_staleness=staleness)
    assert placement.classify_mode(GRPO) is mode


@pytest.mark.parametrize(
    "placement",
    [
        placement_from_meshes(REAL_1X8, max_staleness=3),
        Placement({"train": CallAssignment(Mesh(0, 16), RankGrid(2, 4, 2, "mcore"), 3, 8)}),
    ],
)
def test_placement_round_trips_through_json(placement: Placement):
    payload = json.loads(json.dumps(placement.to_dict()))
    assert Placement.from_dict(payload, location="plan.json") == placement


def make_grpo_placement(**changes: tuple[str, str]) -> Placement:
    return placement_from_meshes(
        {"generate": ("0-3", "1-1-4"), "train": ("4-7", "1-1-4"), **changes}
    )


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            make_grpo_placement(train=("4-8", "1-1-5")),
            "placement.train: devices 4-8; the cluster has 8",
        ),
        (
            make_grpo_placement(train=("4-6", "1-1-3")),
            "placement.train: devices 4-6: a part of a node of 8",
        ),
        (make_grpo_placement(train=("4-7", "1-1-2")), "1-1-2 is 2 ranks; devices 4-7 are 4"),
        (make_grpo_placement(prune=("4-7", "1-1-4")), "placement.prune: no such call"),
        (placement_from_meshes({"train": ("0-3", "1-1-4")}), "placement.generate: missing"),
        (replace(make_grpo_placement(), max_staleness=-1), "max_staleness=-1"),
    ],
)
def test_check_valid_names_the_invalid_call(placement: Placement, message: str):
    with pytest.raises(ConfigError) as refused:
        placement.check_valid(GRPO, Cluster.from_text("8xA100"))
    assert message in str(refused.value)


def test_tensor_parallelism_stays_within_a_node():
    placement = placement_from_meshes({"generate": ("0-15", "1-16-1"), "train": ("0-15", "1-8-2")})
    with pytest.raises(ConfigError, match="16 tensor-parallel ranks: at most 8 on a node"):
        placement.check_valid(GRPO, Cluster.from_text("2x8xA100"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "plan.calls: missing"),
        ({"calls": {"train": {"devices": "0-3"}}}, "plan.calls.train.grid: missing"),
        ({"calls": {"train": {"devices": "3-0", "grid": "1-1-4"}}}, "mesh '3-0'"),
        ({"calls": {"train": {"devices": "0-3", "grid": "4"}}}, "plan.calls.train.grid: 4: must"),
        ({"calls": {}, "stalenes": 1}, "plan.stalenes=1: unknown"),
    ],
)
def test_from_dict_names_the_wrong_key(entries: dict, message: str):
    with pytest.raises(ConfigError) as refused:
        Placement.from_dict(entries, location="plan")
    assert message in str(refused.value)
