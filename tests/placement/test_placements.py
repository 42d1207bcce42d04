"""Sets, ratios and meshes as notations of one placement."""

import json
from dataclasses import replace

import pytest

from streamrl.dataflow import Dataflow, build_dataflow
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import Placement, PlacementMode
from streamrl.placement.pools import POOL_STRATEGIES
from streamrl.resharding.grids import RankGrid
from tests.planner.notations import (
    placement_from_meshes,
    placement_from_ratios,
    placement_from_sets,
)

PPO = build_dataflow(("generator_logprobs", "scores", "ref_logprobs", "values"))
GRPO = build_dataflow(("generator_logprobs", "scores"))
ROLES = ("policy", "critic", "reference", "reward")


def format_meshes(placement: Placement) -> dict[str, str]:
    return {stage: str(assignment.mesh) for stage, assignment in placement.assignments.items()}


def test_one_set_is_a_colocated_placement():
    placement = placement_from_sets(PPO, [ROLES], [8])
    assert set(format_meshes(placement).values()) == {"0-7"}
    assert set(placement.assignments) == {call.stage for call in PPO.calls}
    assert placement.classify_mode(PPO) is PlacementMode.COLOCATED


def test_one_set_per_model_is_a_standalone_placement():
    placement = placement_from_sets(PPO, [[role] for role in ROLES], [64, 32, 16, 16])
    assert format_meshes(placement) == {
        "generate": "0-63",
        "train": "0-63",
        "value": "64-95",
        "train_critic": "64-95",
        "reference": "96-111",
        "reward": "112-127",
    }
    assert placement.classify_mode(PPO) is PlacementMode.SPLIT
    placement.check_valid(PPO, Cluster.from_text("16x8xA100"))


def test_sets_apply_grids_to_the_named_calls():
    grids = {"train": RankGrid(1, 8, 2), "generate": RankGrid(1, 2, 8)}
    placement = placement_from_sets(PPO, [ROLES], [16], grids=grids)
    assert placement.assignments["train"].grid == RankGrid(1, 8, 2)
    assert placement.assignments["generate"].grid == RankGrid(1, 2, 8)
    assert placement.assignments["reference"].grid == RankGrid(1, 1, 16)


def test_interleaving_places_reference_and_reward_on_halves():
    placement = placement_from_ratios(PPO, POOL_STRATEGIES["interleaving"], [8])
    assert format_meshes(placement) == {
        "generate": "0-7",
        "train": "0-7",
        "value": "0-7",
        "train_critic": "0-7",
        "reference": "0-3",
        "reward": "4-7",
    }


def test_ratios_place_actor_and_critic_on_halves():
    half = dict.fromkeys(("policy", "generator", "critic", "value", "reference", "reward"), 0.5)
    placement = placement_from_ratios(PPO, [half], [16])
    meshes = format_meshes(placement)
    assert meshes["train"] == meshes["generate"] == "0-7"
    assert meshes["train_critic"] == meshes["value"] == "8-15"
    assert not placement.overlaps("reference", "reward")


def test_shadow_separates_forward_only_from_trained_roles():
    placement = placement_from_ratios(PPO, POOL_STRATEGIES["shadow"], [8, 8])
    meshes = format_meshes(placement)
    assert meshes["generate"] == meshes["value"] == "0-7"
    assert meshes["train"] == meshes["train_critic"] == "8-15"
    assert placement.classify_mode(PPO) is PlacementMode.DISAGGREGATED
    assert replace(placement, max_staleness=2).classify_mode(PPO) is PlacementMode.ASYNCHRONOUS


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
    "placement",
    [
        placement_from_meshes(REAL_1X8, max_staleness=3),
        placement_from_sets(PPO, [ROLES], [16], grids={"train": RankGrid(2, 4, 2, "mcore")}),
        placement_from_ratios(GRPO, [{"policy": 1}, {"generator": 1}], [4, 12]),
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


def place_sets(sets: list[list[str]], dataflow: Dataflow = PPO) -> Placement:
    return placement_from_sets(dataflow, sets, [4] * len(sets))


def test_impossible_sets_and_ratios_are_refused():
    with pytest.raises(ConfigError, match="policy is in 2 sets"):
        place_sets([["policy"], ["policy", "critic"]])
    with pytest.raises(ConfigError, match="critic: the dataflow has policy, reward"):
        place_sets([["critic"]], GRPO)
    with pytest.raises(ConfigError, match=r"ratio of reward: 0.3 of 8 devices"):
        placement_from_ratios(PPO, [{"reward": 0.3}], [8])
