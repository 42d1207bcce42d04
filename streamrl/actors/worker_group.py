"""Groups of workers on pools of devices, called by one controller as if each were one object.

The controller is a plain script. A method of a group is called on all its ranks, as the protocol of
the method says; batches go and come as references, so what is in them never passes through the
controller. A call returns at once, and what it returns can be handed on at once: only where rows
have to be counted, or values are asked for, the controller waits, and no longer than the deadline.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from streamrl.actors.calls import fetch
from streamrl.actors.seats import reserve
from streamrl.actors.trainer import free_port
from streamrl.controller.batches import Batch, BatchRef, Part, concatenate, cut, num_rows
from streamrl.controller.protocols import PROTOCOLS, Handed, Mesh, Protocol, without_padding
from streamrl.controller.workers import Place, transfers_of
from streamrl.errors import ConfigError, DeadlineError

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
        self._placement = reserve(slots, bundle, strategy=strategy, timeout_s=timeout_s)

    def options(self, slot: int) -> dict[str, Any]:
        """What an actor is made with to have its part of a slot; ConfigError if that is full."""
        if self._held[slot] == self._groups:
            raise ConfigError(f"slot {slot} of the pool has its {self._groups} groups already")
        self._held[slot] += 1
        where = PlacementGroupSchedulingStrategy(self._placement, slot)
        return {**self._share, "scheduling_strategy": where}

    def give_back(self, slot: int) -> None:
        """A group has left its part of a slot."""
        self._held[slot] -= 1

    def close(self) -> None:
        """Give the slots back; what runs there is ended."""
        remove_placement_group(self._placement)


class WorkerHost:
    """The process of one worker."""

    def meeting(self) -> tuple[str, int]:
        """An address and a free port of this node."""
        return ray.util.get_node_ip_address(), free_port()

    def build(
        self,
        worker: type,
        rank: int,
        mesh: Mesh,
        slot: int,
        meeting: tuple[str, int],
        arguments: Sequence[Any],
    ) -> None:
        """Make the worker."""
        self._worker = worker(Place(rank, mesh, *meeting, slot), *arguments)

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
    laid out. env: what their processes find in the environment; they compute with one thread unless
    OMP_NUM_THREADS is there. timeout_s: deadline of the start and of every call.

    The workers are made while the caller goes on; `ready`, or the first call, waits for them.
    Raises ConfigError if the pool has too few slots, or a method names a protocol that is unknown.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker: type,
        *arguments: Any,
        mesh: Mesh,
        first_slot: int = 0,
        env: Mapping[str, str] | None = None,
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
        self._pool, self._slots = pool, slots
        runtime_env = {"env_vars": {"OMP_NUM_THREADS": "1", **(env or {})}}
        self._hosts = [
            HOST.options(runtime_env=runtime_env, **pool.options(slot)).remote() for slot in slots
        ]
        meeting = self._hosts[0].meeting.remote()
        self._built: list[Any] | None = [
            host.build.remote(worker, rank, mesh, slot, meeting, arguments)
            for rank, (slot, host) in enumerate(zip(slots, self._hosts, strict=True))
        ]

    def ready(self) -> None:
        """Wait until all workers are made. Raises DeadlineError, or what stopped one of them."""
        if self._built is not None:
            self._fetch(dict(enumerate(self._built)), "start")
            self._built = None

    def __getattr__(self, name: str) -> Callable[..., Reply]:
        """The registered method of that name, as one call of all ranks."""
        if name.startswith("_") or name not in self._protocols:
            known = ", ".join(sorted(vars(self).get("_protocols", {})))
            raise AttributeError(f"{name}: is no method of a group; it has {known}")
        return partial(self._call, name)

    def close(self) -> None:
        """End the workers; others may have their part of the slots."""
        for slot, host in zip(self._slots, self._hosts, strict=True):
            ray.kill(host)
            self._pool.give_back(slot)
        self._slots, self._hosts = range(0), []

    def _call(self, method: str, *arguments: Any) -> Reply:
        self.ready()
        protocol = self._protocols[method]
        handed = protocol.distribute(self._mesh, tuple(settled(value) for value in arguments))
        replies = {
            rank: self._hosts[rank].call.options(num_returns=2).remote(method, given)
            for rank, given in enumerate(handed.calls)
            if given is not None
        }
        return Reply(partial(self._collect, method, protocol, handed, replies))

    def _collect(
        self,
        method: str,
        protocol: Protocol,
        handed: Handed,
        replies: Mapping[int, tuple[Any, Any]],
    ) -> Any:
        counts = self._fetch({rank: count for rank, (_, count) in replies.items()}, method)
        plain = {rank: replies[rank][0] for rank, count in counts.items() if count is None}
        answers = self._fetch(plain, method)
        answers |= {
            rank: BatchRef.of(Part(replies[rank][0], 0, count))
            for rank, count in counts.items()
            if count is not None
        }
        found = protocol.collect(self._mesh, [answers.get(rank) for rank in range(self._mesh.size)])
        return without_padding(found, handed.rows, handed.padding)

    def _fetch(self, replies: Mapping[int, Any], what: str) -> dict[int, Any]:
        """The answers by rank, as they come: one that fails is told at once, whoever is slower."""
        ranks, found = {reply: rank for rank, reply in replies.items()}, {}
        deadline = time.monotonic() + self._timeout_s
        while ranks:
            left_s = max(deadline - time.monotonic(), 0.0)
            done, _ = ray.wait(list(ranks), timeout=left_s)
            if not done:
                late = ", ".join(map(str, sorted(ranks.values())))
                raise DeadlineError(
                    f"{self._name}.{what}: no answer within {self._timeout_s:g} s from rank {late}"
                )
            for reply in done:
                rank = ranks.pop(reply)
                found[rank] = fetch(reply, f"{self._name}-{rank}.{what}")
        return found


def _known(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol {name}: must be one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
