"""Slots of Ray placement groups: for actors that share devices, and for the ranks of a model."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

from streamrl.errors import ConfigError
from streamrl.placement import ResourceDemand, SlotMap

CAPACITY_WAIT_S = 60.0
"""Longest wait until a cluster has room for all slots, s."""
RELEASE_TIMEOUT_S = 5.0
"""Longest wait until a cluster has taken slots back, s: one that is lost never does."""

#: What a slot has, by Ray's name of the resource.
Bundle = Mapping[str, float]


def reserve_bundles(
    bundles: Sequence[Bundle],
    *,
    strategy: str = "PACK",
    node: str = "",
    timeout_s: float = CAPACITY_WAIT_S,
    waiting: Callable[[str], None] = lambda text: None,
) -> PlacementGroup:
    """A slot for each of the bundles, all of them or none; only on `node` if one is named.

    `waiting` is told every second what is waited for. Raises ConfigError if the cluster has no room
    for them in time.
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
    """Free the slots of these; what runs there is ended. Of no effect on a cluster that is lost."""

    def remove() -> None:
        for group in groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    # Without a connection Ray would look for a cluster to connect to.
    if not groups or not ray.is_initialized():
        return
    # The call has no deadline of its own.
    removal = threading.Thread(target=remove, daemon=True)
    removal.start()
    removal.join(RELEASE_TIMEOUT_S)


@contextlib.contextmanager
def reserve_large_bundles(
    demands: Iterable[ResourceDemand], *, node: str, waiting: Callable[[str], None]
) -> Iterator[None]:
    """Inside, every actor that asks for several devices has room on a node, which it takes later.

    Who took single devices first could leave no node with as many. For the rest see `reserve`.
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
    """The slot of one of these actors; Ray refuses amounts of nothing."""
    amounts = {"CPU": float(demand.cpus), "GPU": float(demand.gpus)}
    return {name: amount for name, amount in amounts.items() if amount}


def order_bundles(group: PlacementGroup, bundles: Sequence[Bundle]) -> list[int]:
    """Which bundle is each slot, see `order_by_node`."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return order_by_node(bundles, [nodes[i] for i in range(len(bundles))])


def order_by_node(bundles: Sequence[Bundle], nodes: Sequence[str]) -> list[int]:
    """For every slot a bundle that has what it is to have, those of a node one after the other.

    `nodes` are where the bundles lie. Ray does not lay neighbouring bundles on one node.
    """
    # In the order in which nodes first come, so that what is on one node stays as it is.
    by_node = sorted(range(len(nodes)), key=lambda i: (nodes.index(nodes[i]), i))
    found: list[int] = []
    for bundle in bundles:
        found.append(next(i for i in by_node if bundles[i] == bundle))
        by_node.remove(found[-1])
    return found


def _make_capacity_error(bundles: Sequence[Bundle], node: str, timeout_s: float) -> ConfigError:
    free, have = ray.available_resources(), ray.cluster_resources()
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    told = ", ".join(f"{free.get(k, 0):g} of {have.get(k, 0):g} {k}" for k in names)
    kinds = Counter(
        " and ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles
    )
    slots = " and ".join(f"{count} slots of {each} each" for each, count in kinds.items())
    where = f" on the node {node}" if node else ""
    free_in = "free in all" if node else "free"
    return ConfigError(f"{slots} found no room{where} in {timeout_s:g} s; {free_in} are {told}")


class SharedSlots:
    """The places of the actors of a run whose roles share devices.

    on_gpu: the roles that compute on one. A slot that any of these has is a GPU, and a core for who
    feeds it; all others are a core. is_hybrid: whether the policy's trainer and the generators are
    in one process each. For `waiting` see `reserve`.
    """

    def __init__(
        self,
        placement: SlotMap,
        *,
        is_hybrid: bool,
        on_gpu: Collection[str],
        waiting: Callable[[str], None],
    ) -> None:
        self._placement = placement
        self._on_gpu = on_gpu
        self._host_roles = {"generator": "policy"} if is_hybrid else {}
        gpus = placement.find_slots(on_gpu)
        bundles = [
            {"CPU": 1.0, "GPU": 1.0} if slot in gpus else {"CPU": 1.0}
            for slot in range(placement.num_slots)
        ]
        self._group = reserve_bundles(bundles, waiting=waiting)
        self._bundles = order_bundles(self._group, bundles)

    def make_actor_options(self, role: str, index: int) -> dict[str, Any]:
        """What Ray needs to be told to make the actor of this number in its slot."""
        slot = self._placement.slots[role][index]
        there = self._placement.list_roles(slot)
        return {
            "num_cpus": 1 / self._count_processes(there),
            "num_gpus": 1 / self._count_processes(set(there) & set(self._on_gpu))
            if role in self._on_gpu
            else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, self._bundles[slot]
            ),
        }

    def _count_processes(self, roles: Iterable[str]) -> int:
        """How many an actor of each of these roles is."""
        return len({self._host_roles.get(role, role) for role in roles})

    def __contains__(self, role: str) -> bool:
        """Whether the actors of a role have their places here; in such a run all do."""
        return role in self._placement.slots

    def close(self) -> None:
        """Give the slots back; what runs there is ended."""
        release_placement_groups(self._group)


class DedicatedSlots:
    """The places of the ranks of trained models which have slots of their own.

    The ranks of a model get all their slots or none, neighbours on one node as far as can be. One
    rank alone needs nothing of this, and is not in here. For `node` and `waiting` see `reserve`.
    Raises ConfigError if a model finds no room; then none keeps any.
    """

    def __init__(
        self,
        demands: Mapping[str, ResourceDemand],
        *,
        node: str,
        waiting: Callable[[str], None],
    ) -> None:
        self._groups: dict[str, PlacementGroup] = {}
        self._bundles: dict[str, list[int]] = {}
        self._rank_resources: dict[str, dict[str, Any]] = {}
        try:
            for role, demand in demands.items():
                # Ray refuses slots of nothing.
                if demand.count > 1 and (demand.cpus or demand.gpus):
                    self._reserve_role(role, demand, node, waiting)
        except BaseException:
            self.close()
            raise

    def _reserve_role(
        self, role: str, demand: ResourceDemand, node: str, waiting: Callable[[str], None]
    ) -> None:
        bundles = [_make_bundle(demand)] * demand.count
        try:
            group = reserve_bundles(
                bundles,
                node=node,
                timeout_s=CAPACITY_WAIT_S,
                waiting=lambda text: waiting(f"{demand.role}: {text}"),
            )
        except ConfigError as error:
            raise ConfigError(f"{demand.setting}={demand.count}: {error}") from None
        self._groups[role] = group
        self._bundles[role] = order_bundles(group, bundles)
        self._rank_resources[role] = {"num_cpus": demand.cpus, "num_gpus": demand.gpus}

    def __contains__(self, role: str) -> bool:
        """Whether the ranks of a role have their places here."""
        return role in self._groups

    def make_actor_options(self, role: str, index: int) -> dict[str, Any]:
        """What Ray needs to be told to make the rank of this number in its slot."""
        where = PlacementGroupSchedulingStrategy(self._groups[role], self._bundles[role][index])
        return {**self._rank_resources[role], "scheduling_strategy": where}

    def close(self) -> None:
        """Give the slots back; what runs there is ended."""
        release_placement_groups(*self._groups.values())
