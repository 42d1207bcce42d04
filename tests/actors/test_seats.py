"""Slots that actors share: reserved together, and told of when there is no room."""

from collections.abc import Iterator

import pytest
import ray
from ray.util.placement_group import placement_group_table, remove_placement_group

from streamrl.actors.cluster import cluster, nothing
from streamrl.actors.seats import Seats, reserve
from streamrl.errors import ConfigError
from streamrl.placement import PlacementConfig, lay_out

pytestmark = pytest.mark.slow

COUNTS = {"policy": 2, "generator": 2, "reference": 1, "reward": 1}
POOLS = [{"policy": 1.0, "generator": 1.0, "reference": 0.5, "reward": 0.5}]


@pytest.fixture(scope="module", autouse=True)
def three_slots() -> Iterator[None]:
    with cluster(PlacementConfig(cpus=3, object_store_mb=200), nothing):
        yield


class Where:
    """Says what it has of a slot."""

    def share(self) -> float:
        return float(ray.get_runtime_context().get_assigned_resources()["CPU"])


def test_every_actor_has_its_part_of_its_slot_and_the_slots_are_given_back() -> None:
    said: list[str] = []
    seats = Seats(lay_out(POOLS, COUNTS), is_hybrid=True, on_gpu=False, waiting=said.append)
    # Policy and generator are one process, beside which there is one more in each slot.
    options = {role: seats.options(role, 0, on_gpu=False) for role in ("policy", "reference")}
    options["reward"] = seats.options("reward", 0, on_gpu=False)
    indices = [
        each["scheduling_strategy"].placement_group_bundle_index for each in options.values()
    ]
    assert indices == [0, 0, 1]
    actors = [ray.remote(Where).options(**each).remote() for each in options.values()]
    assert ray.get([actor.share.remote() for actor in actors], timeout=120) == [0.5, 0.5, 0.5]
    assert not said
    with pytest.raises(ConfigError, match=r"2 slots of 1 CPU each found no room in 2 s; free are"):
        reserve(2, {"CPU": 1.0}, timeout_s=2.0, waiting=said.append)
    assert set(said) == {"waiting for room for 2 slots"}
    seats.close()
    remove_placement_group(reserve(3, {"CPU": 1.0}, timeout_s=60.0))


def test_a_wait_for_room_can_be_broken_off_and_leaves_nothing() -> None:
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reserve(4, {"CPU": 1.0}, waiting=stop)
    left = [group["state"] for group in placement_group_table().values()]
    assert set(left) == {"REMOVED"}
