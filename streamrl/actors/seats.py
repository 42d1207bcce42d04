"""Devices that several actors share: slots of a Ray placement group, and a part of one for each."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from streamrl.errors import ConfigError
from streamrl.placement import Placement

ROOM_S = 60.0
"""Longest wait until a cluster has room for all slots, s."""


def reserve(
    slots: int,
    bundle: dict[str, float],
    *,
    strategy: str = "PACK",
    timeout_s: float = ROOM_S,
    waiting: Callable[[str], None] = lambda text: None,
) -> PlacementGroup:
    """So many slots, each with the resources of `bundle`, all of them or none.

    `waiting` is told every second what is waited for. Raises ConfigError if the cluster has no room
    for them in time.
    """
    group = placement_group([bundle] * slots, strategy=strategy)
    deadline = time.monotonic() + timeout_s
    try:
        while not group.wait(max(0.0, min(1.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise _no_room(slots, bundle, timeout_s)
            waiting(f"waiting for room for {slots} slots")
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _no_room(slots: int, bundle: dict[str, float], timeout_s: float) -> ConfigError:
    free, have = ray.available_resources(), ray.cluster_resources()
    told = ", ".join(f"{free.get(k, 0):g} of {have.get(k, 0):g} {k}" for k in bundle)
    each = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    return ConfigError(
        f"{slots} slots of {each} each found no room in {timeout_s:g} s; free are {told}"
    )


class Seats:
    """The places of the actors of a run whose roles share devices.

    is_hybrid: whether the policy's trainer and the generators are in one process each. on_gpu: a
    slot is a GPU, and a core for who feeds it. For `waiting` see `reserve`.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        is_hybrid: bool,
        on_gpu: bool,
        waiting: Callable[[str], None],
    ) -> None:
        self._placement = placement
        self._within = {"generator": "policy"} if is_hybrid else {}
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if on_gpu else {})}
        self._group = reserve(placement.size, bundle, waiting=waiting)

    def options(self, role: str, index: int, *, on_gpu: bool) -> dict[str, Any]:
        """What Ray needs to be told to make the actor of this number in its slot."""
        slot = self._placement.slots[role][index]
        part = 1 / len({self._within.get(other, other) for other in self._placement.on(slot)})
        where = PlacementGroupSchedulingStrategy(self._group, slot)
        return {"num_cpus": part, "num_gpus": part * on_gpu, "scheduling_strategy": where}

    def close(self) -> None:
        """Give the slots back; what runs there is ended."""
        remove_placement_group(self._group)
