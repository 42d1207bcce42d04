"""Devices that several actors share: slots of a Ray placement group, and a part of one for each."""

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from streamrl.errors import ConfigError
from streamrl.placement import Placement

ROOM_S = 60.0
"""Longest wait until a cluster has room for all slots, s."""


def reserve(
    slots: int, bundle: dict[str, float], *, strategy: str = "PACK", timeout_s: float = ROOM_S
) -> PlacementGroup:
    """So many slots, each with the resources of `bundle`, all of them or none.

    Raises ConfigError if the cluster has no room for them in time.
    """
    group = placement_group([bundle] * slots, strategy=strategy)
    if not group.wait(timeout_s):
        remove_placement_group(group)
        free, have = ray.available_resources(), ray.cluster_resources()
        told = ", ".join(f"{free.get(k, 0):g} of {have.get(k, 0):g} {k}" for k in bundle)
        each = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        raise ConfigError(
            f"{slots} slots of {each} each found no room in {timeout_s:g} s; free are {told}"
        )
    return group


class Seats:
    """The places of the actors of a run whose roles share devices.

    is_hybrid: whether the policy's trainer and the generators are in one process each. on_gpu: a
    slot is a GPU, and a core for who feeds it.
    """

    def __init__(self, placement: Placement, *, is_hybrid: bool, on_gpu: bool) -> None:
        self._placement = placement
        self._within = {"generator": "policy"} if is_hybrid else {}
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if on_gpu else {})}
        self._group = reserve(placement.size, bundle)

    def options(self, role: str, index: int, *, on_gpu: bool) -> dict[str, Any]:
        """What Ray needs to be told to make the actor of this number in its slot."""
        slot = self._placement.slots[role][index]
        part = 1 / len({self._within.get(other, other) for other in self._placement.on(slot)})
        where = PlacementGroupSchedulingStrategy(self._group, slot)
        return {"num_cpus": part, "num_gpus": part * on_gpu, "scheduling_strategy": where}

    def close(self) -> None:
        """Give the slots back; what runs there is ended."""
        remove_placement_group(self._group)
