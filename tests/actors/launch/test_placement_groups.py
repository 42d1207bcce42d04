"""Placement groups: slots reserved together, and errors for lack of room."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from streamrl.actors.launch import placement_groups
from streamrl.actors.launch.placement_groups import (
    order_by_node,
    release_placement_groups,
    reserve_bundles,
    reserve_rank_slots,
    reserve_shared_slots,
)
from streamrl.errors import ConfigError
from streamrl.placement.pools import lay_out_slots
from streamrl.placement.resource_demand import ResourceDemand
from tests.local_ray import CPUS

pytestmark = pytest.mark.xdist_group("ray")

COUNTS = {"policy": 2, "generator": 2, "reference": 1, "reward": 1}
POOLS = [{"policy": 1.0, "generator": 1.0, "reference": 0.5, "reward": 0.5}]


@pytest.fixture(scope="module", autouse=True)
def reserved_group(local_ray: None) -> Iterator[PlacementGroup]:
    """Placement group that leaves three single-CPU slots free."""
    group = reserve_bundles([{"CPU": CPUS - 3.0}], timeout_s=60.0)
    yield group
    release_placement_groups(group)


class SlotReporter:
    """Actor that reports its share of a slot."""

    def share(self) -> dict[str, float]:
        return dict(ray.get_runtime_context().get_assigned_resources())


def indices_of(options: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the bundles of the placement group that the options name."""
    return [words["scheduling_strategy"].placement_group_bundle_index for words in options]


def test_actors_get_their_share_of_a_slot_and_slots_are_released():
    messages: list[str] = []
    slots = reserve_shared_slots(
        lay_out_slots(POOLS, COUNTS), is_hybrid=True, on_gpu=(), waiting=messages.append
    )
    # Policy and generator share a process; each slot has one more process.
    options = [slots.options[role][0] for role in ("policy", "reference", "reward")]
    assert indices_of(options) == [0, 0, 1]
    assert shares(options) == [{"CPU": 0.5}] * 3
    messages.clear()
    with pytest.raises(ConfigError, match=r"no room for 2 slots of 1 CPU each in 2 s; free:"):
        reserve_bundles([{"CPU": 1.0}] * 2, timeout_s=2.0, waiting=messages.append)
    assert set(messages) == {"waiting for room for 2 slots"}
    slots.close()
    remove_placement_group(reserve_bundles([{"CPU": 1.0}] * 3, timeout_s=60.0))


@pytest.mark.slow
def test_only_slots_of_gpu_roles_have_a_gpu_and_only_those_roles_share_it():
    counts = {"policy": 1, "generator": 1, "reference": 1, "reward": 2}
    pools = [{"policy": 1.0, "generator": 1.0, "reference": 1.0, "reward": 1.0}]
    on_gpu = {"policy", "generator", "reference"}
    slots = reserve_shared_slots(
        lay_out_slots(pools, counts), is_hybrid=True, on_gpu=on_gpu, waiting=print
    )
    role_slots = [("policy", 0), ("reference", 0), ("reward", 0), ("reward", 1)]
    third = pytest.approx(1 / 3, abs=1e-3)
    assert shares([slots.options[role][index] for role, index in role_slots]) == [
        {"CPU": third, "GPU": 0.5},
        {"CPU": third, "GPU": 0.5},
        {"CPU": third},
        {"CPU": 1.0},
    ]
    message = "no room for 1 slots of 1 CPU and 1 GPU each and 1 slots of 1 CPU each in 1 s"
    with pytest.raises(ConfigError, match=message):
        reserve_bundles([{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0}], timeout_s=1.0)
    slots.close()


def test_neighboring_slots_share_a_node_where_possible():
    gpu, cpu = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0}
    assert order_by_node([gpu] * 6, ["a", "b", "a", "b", "a", "b"]) == [0, 2, 4, 1, 3, 5]
    assert order_by_node([gpu] * 3, ["a", "a", "a"]) == [0, 1, 2]
    # A GPU slot gets a GPU bundle.
    assert order_by_node([gpu, gpu, gpu, cpu], ["a", "b", "a", "a"]) == [0, 2, 1, 3]
    assert order_by_node([gpu, cpu, gpu], ["b", "a", "b"]) == [0, 1, 2]


def shares(options: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the resources in the options."""
    remote: Any = ray.remote(SlotReporter)
    actors = [remote.options(**actor_options).remote() for actor_options in options]
    resources = ray.get([actor.share.remote() for actor in actors], timeout=120)
    return [
        {k: v for k, v in actor_options.items() if k in ("CPU", "GPU") and v}
        for actor_options in resources
    ]


def test_an_interrupted_wait_for_room_leaves_no_reservation(reserved_group: PlacementGroup):
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reserve_bundles([{"CPU": 1.0}] * 4, waiting=stop)
    groups = placement_group_table()
    del groups[reserved_group.id.hex()]
    assert {group["state"] for group in groups.values()} == {"REMOVED"}


def ranks(count: int, *, role: str = "trainer", cpus: int = 1, gpus: int = 0) -> ResourceDemand:
    """Make the resource demand of the ranks of a model."""
    key = f"{role}.world_size"
    return ResourceDemand((), role=role, setting=key, count=count, cpus=cpus, gpus=gpus)


@pytest.mark.slow
def test_ranks_of_a_model_have_dedicated_slots_which_are_released():
    messages: list[str] = []
    # A single rank needs no group, and a rank without resources gets no slot.
    demands = {"policy": ranks(3), "critic": ranks(1), "cost_critic": ranks(2, cpus=0)}
    node_id = ray.get_runtime_context().get_node_id()
    slots = reserve_rank_slots(demands, node=node_id, waiting=messages.append)
    assert [*slots.options] == ["policy"]
    options = slots.options["policy"]
    assert indices_of(options) == [0, 1, 2]
    assert shares(options) == [{"CPU": 1.0}] * 3
    slots.close()
    remove_placement_group(reserve_bundles([{"CPU": 1.0}] * 3, timeout_s=60.0))


def test_a_model_without_room_is_named_and_all_slots_are_released(monkeypatch: pytest.MonkeyPatch):
    remove_placement_group(reserve_bundles([{"CPU": 1.0}] * 3, timeout_s=60.0))
    monkeypatch.setattr(placement_groups, "CAPACITY_WAIT_S", 2.0)
    messages: list[str] = []
    node_id = ray.get_runtime_context().get_node_id()
    room = f"no room for 2 slots of 1 CPU each on the node {node_id} in 2 s"
    words = rf"^trainer.world_size=2: {room}; free in all: \S+ of 5 CPU$"
    with pytest.raises(ConfigError, match=words):
        demands = {"critic": ranks(2, role="critic"), "policy": ranks(2)}
        reserve_rank_slots(demands, node=node_id, waiting=messages.append)
    assert "trainer: waiting for room for 2 slots" in messages
    remove_placement_group(reserve_bundles([{"CPU": 1.0}] * 3, timeout_s=60.0))

    # A bundle has only the requested resources.
    with pytest.raises(ConfigError, match=r"2 slots of 1 GPU each .* free: \S+ of 1 GPU$"):
        reserve_rank_slots({"policy": ranks(2, cpus=0, gpus=1)}, node="", waiting=messages.append)


def test_releasing_slots_of_a_lost_cluster_does_not_block(monkeypatch: pytest.MonkeyPatch):
    group, called = reserve_bundles([{"CPU": 1.0}]), threading.Event()

    def unanswered(group: Any) -> None:
        called.set()
        threading.Event().wait()

    def refused(group: Any) -> None:
        raise ray.exceptions.RaySystemError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(placement_groups, "RELEASE_TIMEOUT_S", 0.1)
        patch.setattr(placement_groups, "remove_placement_group", unanswered)
        release_placement_groups(group)
        assert called.wait(60.0)
        # Without a connection, a call to Ray would search for a cluster.
        called.clear()
        patch.setattr(ray, "is_initialized", lambda: False)
        release_placement_groups(group)
        assert not called.is_set()
    with monkeypatch.context() as patch:
        patch.setattr(placement_groups, "RELEASE_TIMEOUT_S", 60.0)
        patch.setattr(placement_groups, "remove_placement_group", refused)
        patch.setattr(threading, "excepthook", lambda arguments: called.set())
        release_placement_groups(group)
        assert not called.is_set()
    remove_placement_group(group)
