"""Groups of workers on pools of devices, called by one controller as if each were one object.

The controller is a plain script. A method of a group is called on all its ranks, as the protocol of
the method says; batches go and come as references, so what is in them never passes through the
controller. A call returns at once, and what it returns can be handed on at once: only where rows
have to be counted, or values are asked for, the controller waits, and no longer than the deadline.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from streamrl.actors.calls import fetch
from streamrl.actors.trainer import free_port
from streamrl.controller.batches import Batch, BatchRef, Part, concatenate, cut, num_rows
from streamrl.controller.protocols import PROTOCOLS, Handed, Mesh, Protocol, without_padding
from streamrl.controller.workers import Place, transfers_of
from streamrl.errors import ConfigError

CALL_TIMEOUT_S = 600.0
"""Deadline of a call of a group unless it brings its own, s."""
NODE_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class ResourcePool:
    """So many slots of a cluster, each a bundle of one Ray placement group.

    cpus, gpus: of each slot. groups: how many groups share a slot at most, each with an equal part
    of it. strategy: how Ray lays the slots over nodes, one of NODE_STRATEGIES. Raises ConfigError
    if the cluster has no room for it within timeout_s.
    """

    def __init__(
        self,
        slots: int,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        groups: int = 4,
        strategy: str = "PACK",
        timeout_s: float = 60.0,
    ) -> None:
        if slots < 1 or groups < 1 or strategy not in NODE_STRATEGIES:
            known = ", ".join(NODE_STRATEGIES)
            raise ConfigError(
                f"pool of {slots} slots for {groups} groups, {strategy}: must be at least 1 each,"
                f" and one of {known}"
            )
        self.slots = slots
        self._share = {"num_cpus": cpus / groups, "num_gpus": gpus / groups}
        self._groups = groups
        self._held = [0] * slots
        bundle = {name: each for name, each in (("CPU", cpus), ("GPU", gpus)) if each}
        self._placement = placement_group([bundle] * slots, strategy=strategy)
        if not self._placement.wait(timeout_s):
            remove_placement_group(self._placement)
            have = ray.cluster_resources()
            told = ", ".join(f"{have.get(name, 0):g} {name}" for name in bundle)
            raise ConfigError(
                f"a pool of {slots} slots of {bundle} found no room in {timeout_s:g} s; the cluster"
                f" has {told} in all"
            )

    def options(self, slot: int) -> dict[str, Any]:
        """What an actor is made with to have its part of a slot; ConfigError if that is full."""
        if self._held[slot] == self._groups:
            raise ConfigError(f"slot {slot} of the pool has its {self._groups} groups already")
        self._held[slot] += 1
        where = PlacementGroupSchedulingStrategy(self._placement, slot)
        return {**self._share, "scheduling_strategy": where}

    def close(self) -> None:
        """Give the slots back; what runs there is ended."""
        remove_placement_group(self._placement)


class WorkerHost:
    """The process of one worker."""

    def meeting(self) -> tuple[str, int]:
        """An address and a free port of this node."""
        return ray.util.get_node_ip_address(), free_port()

    def build(self, worker: type, place: Place, arguments: Sequence[Any]) -> None:
        """Make the worker."""
        self._worker = worker(place, *arguments)

    def call(self, method: str, arguments: Sequence[Any]) -> tuple[Any, int | None]:
        """What its method returns, and how many rows that has; None if it is no batch."""
        given = [load(value) if isinstance(value, BatchRef) else value for value in arguments]
        answer = methodcaller(method, *given)(self._worker)
        is_batch = isinstance(answer, Mapping) and all(map(_is_column, answer.values()))
        return answer, num_rows(answer) if is_batch else None


HOST: Any = ray.remote(WorkerHost)


def _is_column(value: Any) -> bool:
    """Whether it has rows: a list, or an array or tensor of at least one dimension."""
    return isinstance(value, list | tuple) or (hasattr(value, "shape") and len(value.shape) > 0)


def put(batch: Batch) -> BatchRef:
    """Put a batch where workers can fetch it. Raises ValueError if its columns do not agree."""
    return BatchRef.of(Part(ray.put(dict(batch)), 0, num_rows(batch)))


def load(batch: BatchRef) -> dict[str, Any]:
    """The rows themselves, fetched from where they lie. Raises ValueError for a column of two."""
    found: dict[str, Any] = {}
    for strip in batch.strips:
        wholes = fetch([part.reference for part in strip.parts], "a batch")
        pieces = [
            cut(whole, part.start, part.stop)
            for whole, part in zip(wholes, strip.parts, strict=True)
        ]
        columns = concatenate(pieces)
        if twice := sorted(found.keys() & columns.keys()):
            raise ValueError(f"columns {', '.join(twice)}: in two batches that were put together")
        found |= columns
    return found


class Reply:
    """What a call of a group will return; nothing is waited for before it is asked for.

    `a | b` is the batch of both, column beside column. Handed to a call, it is its batch.
    """

    def __init__(self, settle: Callable[[], Any]) -> None:
        self._settle = settle
        self._settled: tuple[Any] | None = None

    def get(self) -> Any:
        """What the protocol makes of the answers: a BatchRef if they are batches, else values.

        Waits for the workers. Raises DeadlineError, or the error of the first that failed.
        """
        if self._settled is None:
            self._settled = (self._settle(),)
        return self._settled[0]

    def load(self) -> dict[str, Any]:
        """The rows of a batch themselves, brought to the controller."""
        return load(self.get())

    def __or__(self, other: "Reply | BatchRef") -> "Reply":
        return Reply(lambda: self.get() | settled(other))

    def __ror__(self, other: BatchRef) -> "Reply":
        return Reply(lambda: other | self.get())


def settled(value: Any) -> Any:
    """What a reply will be, waited for; anything else as it is."""
    return value.get() if isinstance(value, Reply) else value


class WorkerGroup:
    """The workers of one class on a pool, one in each slot from `first_slot` on.

    worker: a class whose constructor takes a Place and then `arguments`, and whose methods say by
    `transfers` how they are called; these are the methods of the group. mesh: how its ranks are
    laid out. threads: how many a worker computes with. Raises ConfigError if the pool has too few
    slots, or a method names a protocol that is not known.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker: type,
        *arguments: Any,
        mesh: Mesh,
        first_slot: int = 0,
        threads: int = 1,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._name = worker.__name__
        self._mesh, self._timeout_s = mesh, timeout_s
        self._protocols = {name: _known(p) for name, p in transfers_of(worker).items()}
        slots = range(first_slot, first_slot + mesh.size)
        if slots.stop > pool.slots:
            raise ConfigError(
                f"{self._name}: {mesh.size} ranks from slot {first_slot} on; the pool has"
                f" {pool.slots} slots"
            )
        env = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
        self._hosts = [
            HOST.options(runtime_env=env, **pool.options(slot)).remote() for slot in slots
        ]
        address, port = self._fetch(self._hosts[0].meeting.remote(), "start of rank 0")
        built = [
            host.build.remote(worker, Place(rank, mesh, address, port, slot), arguments)
            for rank, (slot, host) in enumerate(zip(slots, self._hosts, strict=True))
        ]
        self._fetch(built, "start")

    def __getattr__(self, name: str) -> Callable[..., Reply]:
        """The registered method of that name, as one call of all ranks."""
        if name.startswith("_") or name not in self._protocols:
            known = ", ".join(sorted(vars(self).get("_protocols", {})))
            raise AttributeError(f"{name}: is no method of a group; it has {known}")
        return partial(self._call, name)

    def close(self) -> None:
        """End the workers."""
        for host in self._hosts:
            ray.kill(host)

    def _call(self, method: str, *arguments: Any) -> Reply:
        protocol = self._protocols[method]
        handed = protocol.distribute(self._mesh, tuple(settled(value) for value in arguments))
        replies = [
            host.call.options(num_returns=2).remote(method, given) if given is not None else None
            for host, given in zip(self._hosts, handed.calls, strict=True)
        ]
        return Reply(partial(self._collect, method, protocol, handed, replies))

    def _collect(
        self,
        method: str,
        protocol: Protocol,
        handed: Handed,
        replies: Sequence[tuple[Any, Any] | None],
    ) -> Any:
        called = [reply for reply in replies if reply is not None]
        counts = self._fetch([count for _, count in called], method)
        values = [value for (value, _), count in zip(called, counts, strict=True) if count is None]
        plain = iter(self._fetch(values, method))
        given = (
            next(plain) if count is None else BatchRef.of(Part(value, 0, count))
            for (value, _), count in zip(called, counts, strict=True)
        )
        answers = [None if reply is None else next(given) for reply in replies]
        found = protocol.collect(self._mesh, answers)
        return without_padding(found, handed.rows, handed.padding)

    def _fetch(self, replies: Any, what: str) -> Any:
        return fetch(replies, f"{self._name}.{what}", self._timeout_s)


def _known(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol {name}: must be one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
