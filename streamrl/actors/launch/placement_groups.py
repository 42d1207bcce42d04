"""Slots in Ray placement groups, for actors that share devices and for the ranks of a model."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    NODE_ID_LABEL_KEY,
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from streamrl.errors import ConfigError, extend_errors
from streamrl.placement.pools import SlotMap
from streamrl.placement.resource_demand import ResourceDemand

CAPACITY_WAIT_S = 60.0
"""Longest wait until the resources for all slots are free."""
RELEASE_TIMEOUT_S = 5.0
"""Longest wait for a cluster to free slots; a lost cluster never replies."""

#: Amount of each Ray resource in a bundle, which becomes a slot.
Bundle = Mapping[str, float]


def reserve_bundles(
    bundles: Sequence[Bundle],
    *,
    strategy: str = "PACK",
    node: str = "",
    timeout_s: float = CAPACITY_WAIT_S,
    waiting: Callable[[str], None] = lambda text: None,
) -> PlacementGroup:
    """Reserve resources on the cluster as a placement group: all bundles or none.

    bundles: amount of each Ray resource, per bundle. strategy: placement strategy of Ray.
    node: node id for all bundles; empty for any nodes.
    waiting: receives a status line every second of waiting.

    Raises ConfigError if the resources are not free within `timeout_s`.
    """
    group = placement_group(
        [dict(bundle) for bundle in bundles],
        strategy=strategy,
        bundle_label_selector=[{NODE_ID_LABEL_KEY: node}] * len(bundles) if node else None,
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not group.wait(max(0.0, min(1.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise _make_capacity_error(bundles, node, timeout_s)
            waiting(f"waiting for room for {len(bundles)} slots")
    except BaseException:
        release_placement_groups(group)
        raise
    return group


def release_placement_groups(*groups: PlacementGroup) -> None:
    """Release placement groups, which kills the actors in them. No effect on a lost cluster."""

    def remove() -> None:
        for group in groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    # Unconnected, remove_placement_group would connect to any cluster it finds.
    if not groups or not ray.is_initialized():
        return
    # remove_placement_group has no timeout.
    removal = threading.Thread(target=remove, daemon=True)
    removal.start()
    removal.join(RELEASE_TIMEOUT_S)


@contextlib.contextmanager
def reserve_large_bundles(
    demands: Iterable[ResourceDemand], *, node: str, waiting: Callable[[str], None]
) -> Iterator[None]:
    """Context that reserves resources for actors that need several devices of a node.

    Without the reservation, single-device actors that are placed first could leave no node with
    enough free devices. For `node` and `waiting` see `reserve_bundles`.
    """
    large = [demand for demand in demands if max(demand.cpus, demand.gpus) > 1]
    bundles = [_make_bundle(demand) for demand in large for _ in range(demand.count)]
    group = reserve_bundles(bundles, node=node, waiting=waiting) if bundles else None
    try:
        yield
    finally:
        if group is not None:
            release_placement_groups(group)


def _make_bundle(demand: ResourceDemand) -> Bundle:
    """Return the resources of an actor, without amounts of 0, which Ray refuses."""
    amounts = {"CPU": float(demand.cpus), "GPU": float(demand.gpus)}
    return {name: amount for name, amount in amounts.items() if amount}


def order_bundles(group: PlacementGroup, bundles: Sequence[Bundle]) -> list[int]:
    """Return the index of a bundle for every slot, so that slots of a node are contiguous."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return order_by_node(bundles, [nodes[i] for i in range(len(bundles))])


def order_by_node(bundles: Sequence[Bundle], nodes: Sequence[str]) -> list[int]:
    """Return the index of a bundle for every slot, so that slots of a node are contiguous.

    bundles: resources of each slot; slot i gets a bundle with the resources of bundles[i].
    nodes: node of each bundle; Ray may place neighboring bundles on different nodes.

    Bundles [a, a, b, b] on nodes [n0, n1, n0, n1] give slots [0, 1, 2, 3]; equal bundles give [0,
    2, 1, 3].
    """
    # Nodes in order of first appearance, so that a single node keeps its order.
    by_node = sorted(range(len(nodes)), key=lambda i: (nodes.index(nodes[i]), i))
    slots: list[int] = []
    for bundle in bundles:
        slots.append(next(i for i in by_node if bundles[i] == bundle))
        by_node.remove(slots[-1])
    return slots


def _make_capacity_error(bundles: Sequence[Bundle], node: str, timeout_s: float) -> ConfigError:
    """Make the error of a failed reservation: resources needed, and those free on the cluster."""
    free, total = ray.available_resources(), ray.cluster_resources()
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    free_text = ", ".join(
        f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in names
    )
    kinds = Counter(
        " and ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles
    )
    slots = " and ".join(f"{count} slots of {kind} each" for kind, count in kinds.items())
    where = f" on the node {node}" if node else ""
    free_in = "free in all" if node else "free"
    return ConfigError(f"no room for {slots}{where} in {timeout_s:g} s; {free_in}: {free_text}")


@dataclass
class ReservedSlots:
    """Reserved placement groups, and the Ray options of each actor in them by role."""

    groups: list[PlacementGroup] = field(default_factory=list)
    options: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def close(self) -> None:
        release_placement_groups(*self.groups)


def reserve_shared_slots(
    placement: SlotMap,
    *,
    is_hybrid: bool,
    on_gpu: Collection[str],
    waiting: Callable[[str], None],
) -> ReservedSlots:
    """Reserve the slots of a run whose roles share devices, as one placement group.

    An actor's options are its slot and its share of the slot.

    on_gpu: roles that compute on a GPU. A slot with any of these has a GPU and a core to drive it;
    any other slot is a core.
    is_hybrid: whether a process hosts both a policy rank and a generator.
    waiting: receives a status line while the resources are not free.
    """
    gpus = placement.find_slots(on_gpu)
    bundles: list[Bundle] = [
        {"CPU": 1.0, "GPU": 1.0} if slot in gpus else {"CPU": 1.0}
        for slot in range(placement.num_slots)
    ]
    group = reserve_bundles(bundles, waiting=waiting)
    order = order_bundles(group, bundles)

    def count_processes(slot: int, roles: Collection[str]) -> int:
        on_slot = {*placement.list_roles(slot)} & {*roles}
        return len(on_slot) - (is_hybrid and on_slot >= {"generator", "policy"})

    def make_options(role: str, slot: int) -> dict[str, Any]:
        return {
            "num_cpus": 1 / count_processes(slot, placement.slots),
            "num_gpus": 1 / count_processes(slot, on_gpu) if role in on_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, order[slot]),
        }

    options = {
        role: [make_options(role, slot) for slot in slots]
        for role, slots in placement.slots.items()
    }
    return ReservedSlots([group], options)


def reserve_rank_slots(
    demands: Mapping[str, ResourceDemand], *, node: str, waiting: Callable[[str], None]
) -> ReservedSlots:
    """Reserve devices for the ranks of trained models, a placement group per model.

    A model's ranks get all their slots or none, neighboring ranks on the same node where possible.
    A model with a single rank needs no placement group. Raises ConfigError, after releasing all
    slots, if the devices for a model are not free. For `node` and `waiting` see `reserve_bundles`.
    """
    reserved = ReservedSlots()
    try:
        for role, demand in demands.items():
            bundle = _make_bundle(demand)
            if demand.count == 1 or not bundle:  # Ray refuses empty bundles
                continue
            bundles = [bundle] * demand.count
            group = _reserve_ranks(demand, bundles, node, waiting)
            reserved.groups.append(group)
            resources = {"num_cpus": demand.cpus, "num_gpus": demand.gpus}
            reserved.options[role] = [
                {**resources, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}
                for index in order_bundles(group, bundles)
            ]
    except BaseException:
        reserved.close()
        raise
    return reserved


def _reserve_ranks(
    demand: ResourceDemand, bundles: Sequence[Bundle], node: str, waiting: Callable[[str], None]
) -> PlacementGroup:
    with extend_errors(f"{demand.setting}={demand.count}: "):
        return reserve_bundles(
            bundles,
            node=node,
            timeout_s=CAPACITY_WAIT_S,
            waiting=lambda text: waiting(f"{demand.role}: {text}"),
        )
