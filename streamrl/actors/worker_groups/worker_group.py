"""Groups of workers on pools of devices, called by one controller as if each were one object.

The controller is a plain script. A method of a group is called on all its ranks, as the protocol of
the method says; batches go and come as references, so what is in them never passes through the
controller. A call returns at once, and what it returns can be handed on at once: only where rows
have to be counted, or values are asked for, the controller waits, and no longer than the deadline.
"""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from streamrl.actors.launch.placement_groups import order_bundles, reserve_bundles
from streamrl.actors.transport.ray_calls import fetch_reply, unwrap_error
from streamrl.actors.transport.rendezvous import find_rendezvous
from streamrl.controller.batches import (
    Batch,
    BatchRef,
    RowSlice,
    concat_columns,
    count_rows,
    is_batch,
    slice_columns,
)
from streamrl.controller.collect import RankAnswers, RankInput, make_rank_inputs
from streamrl.controller.register import WorkerContext, find_transfer_methods
from streamrl.controller.transfer_protocols import PROTOCOLS, TransferProtocol, WorkerMesh
from streamrl.errors import ActorError, ConfigError, DeadlineError, StreamError

GROUP_CALL_TIMEOUT_S = 600.0
"""Deadline of a call of a group unless it brings its own, s."""
START_TIMEOUT_S = 600.0
"""Deadline of the start of a group's workers: processes are made, and models are loaded, s."""
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
        for name, value in (("slots", slots), ("groups", groups)):
            if value < 1:
                raise ConfigError(f"pool: {name}={value}: must be at least 1")
        if min(cpus, gpus) < 0 or max(cpus, gpus) == 0:
            raise ConfigError(
                f"pool: cpus={cpus:g}, gpus={gpus:g}: must be 0 or more, and not both 0"
            )
        if strategy not in NODE_STRATEGIES:
            known = ", ".join(NODE_STRATEGIES)
            raise ConfigError(f"pool: strategy={strategy}: must be one of {known}")
        self.slots = slots
        self._worker_resources = {"num_cpus": cpus / groups, "num_gpus": gpus / groups}
        self._groups = groups
        self._used_shares = [0] * slots
        bundle = {name: each for name, each in (("CPU", cpus), ("GPU", gpus)) if each}
        bundles = [bundle] * slots
        self._placement = reserve_bundles(bundles, strategy=strategy, timeout_s=timeout_s)
        self._bundles = order_bundles(self._placement, bundles)
        self.is_closed = False

    def acquire_slot(self, slot: int) -> dict[str, Any]:
        """What an actor is made with to have its part of a slot.

        Raises ConfigError if the slot is full, or the pool closed.
        """
        if self.is_closed:
            raise ConfigError("the pool is closed: it has no slots any more")
        if self._used_shares[slot] == self._groups:
            raise ConfigError(f"slot {slot} of the pool has its {self._groups} groups already")
        self._used_shares[slot] += 1
        where = PlacementGroupSchedulingStrategy(self._placement, self._bundles[slot])
        return {**self._worker_resources, "scheduling_strategy": where}

    def release_slot(self, slot: int) -> None:
        """A group has left its part of a slot."""
        self._used_shares[slot] -= 1

    def close(self) -> None:
        """Give the slots back; what runs there is ended."""
        self.is_closed = True
        remove_placement_group(self._placement)


@dataclass(frozen=True)
class WorkerFailure:
    """What a worker raised: an error of streamrl itself, or else what it says, and where.

    It travels as a value. As an error of Ray it would be printed by each reference that is dropped.
    """

    error: StreamError | ConfigError | None
    text: str

    @classmethod
    def from_exception(cls, error: Exception) -> "WorkerFailure":
        """Of what was raised."""
        cause = unwrap_error(error)
        known = cause if isinstance(cause, StreamError | ConfigError) else None
        where = "".join(traceback.format_exception(error)).rstrip()
        return cls(known, f"{type(cause).__name__}: {cause}\n{where}")

    def to_error(self, what: str) -> StreamError | ConfigError:
        """The error to be raised for a call."""
        return self.error or ActorError(f"{what}: {self.text}")


class WorkerHost:
    """The process of one worker."""

    def find_rendezvous(self) -> tuple[str, int]:
        """An address and a free port of this node."""
        return find_rendezvous()

    def build_worker(
        self,
        worker: type,
        rank: int,
        mesh: WorkerMesh,
        slot: int,
        meeting: tuple[str, int],
        arguments: Sequence[Any],
    ) -> WorkerFailure | None:
        """Make the worker."""
        try:
            self._worker = worker(WorkerContext(rank, mesh, *meeting, slot), *arguments)
        except Exception as error:  # noqa: BLE001
            return WorkerFailure.from_exception(error)
        return None

    def call_method(
        self, method: str, arguments: Sequence[Any], named: Mapping[str, int]
    ) -> tuple[Any, int | WorkerFailure | None]:
        """What its method returns, and how many rows that has; None if it is no batch."""
        try:
            given = [
                fetch_rows(value) if isinstance(value, BatchRef) else value for value in arguments
            ]
            answer = methodcaller(method, *given, **named)(self._worker)
            return answer, count_rows(answer) if is_batch(answer) else None
        except Exception as error:  # noqa: BLE001
            return None, WorkerFailure.from_exception(error)


WORKER_HOST: Any = ray.remote(WorkerHost)


def put(batch: Batch) -> BatchRef:
    """Put a batch where workers can fetch it. Raises ValueError if its columns do not agree."""
    if not is_batch(batch):
        raise ValueError("put: must be columns in a dict by name, lists or arrays with a row each")
    return BatchRef.from_slices(RowSlice(ray.put(dict(batch)), 0, count_rows(batch)))


def fetch_rows(batch: BatchRef) -> dict[str, Any]:
    """The rows themselves, fetched from where they lie. Raises ValueError for a column of two."""
    found: dict[str, Any] = {}
    for strip in batch.blocks:
        wholes = fetch_reply([part.reference for part in strip.slices], "a batch")
        pieces = [
            slice_columns(whole, part.start, part.stop)
            for whole, part in zip(wholes, strip.slices, strict=True)
        ]
        columns = concat_columns(pieces)
        if twice := sorted(found.keys() & columns.keys()):
            raise ValueError(f"columns {', '.join(twice)}: in two batches that were put together")
        found |= columns
    return found


class WorkerGroupReply:
    """What a call of a group will return; nothing is waited for before it is asked for.

    `a | b` is the batch of both, column beside column. Handed to a call, it is its batch.
    """

    def __init__(self, settle: Callable[[], Any]) -> None:
        self._collect = settle
        self._result: tuple[Any] | None = None

    def get(self) -> Any:
        """What the protocol makes of the answers: a BatchRef if they are batches, else values.

        Waits for the workers. Raises DeadlineError, or the error of the first that failed.
        """
        if self._result is None:
            self._result = (self._collect(),)
        return self._result[0]

    def load(self) -> dict[str, Any]:
        """The rows of a batch themselves, brought to the controller; ValueError if it is none."""
        return fetch_rows(_require_batch(self))

    def __or__(self, other: "WorkerGroupReply | BatchRef") -> "WorkerGroupReply":
        return WorkerGroupReply(lambda: _require_batch(self) | _require_batch(other))

    def __ror__(self, other: BatchRef) -> "WorkerGroupReply":
        return WorkerGroupReply(lambda: _require_batch(other) | _require_batch(self))


def resolve_reply(value: Any) -> Any:
    """What a reply will be, waited for; anything else as it is."""
    return value.get() if isinstance(value, WorkerGroupReply) else value


def _require_batch(value: Any) -> BatchRef:
    found = resolve_reply(value)
    if not isinstance(found, BatchRef):
        told = type(found).__name__
        raise ValueError(f"a {told} is no batch: rows are what put(...) and workers give by name")
    return found


class WorkerGroup:
    """The workers of one class on a pool, one in each slot from `first_slot` on.

    worker: a class whose constructor takes a Place and then `arguments`, and whose methods say by
    `transfers` how they are called; these are the methods of the group. mesh: how its ranks are
    laid out. env: what their processes find in the environment; they compute with one thread unless
    OMP_NUM_THREADS is there. timeout_s: deadline of every call; the start has START_TIMEOUT_S.

    The workers are made while the caller goes on; `ready`, or the first call, waits for them.
    Raises ConfigError if the pool has too few slots or is closed, a method names a protocol that is
    unknown, or has a name that a group has itself.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker: type,
        *arguments: Any,
        mesh: WorkerMesh,
        first_slot: int = 0,
        env: Mapping[str, str] | None = None,
        timeout_s: float = GROUP_CALL_TIMEOUT_S,
    ) -> None:
        self._name = worker.__name__
        self._mesh, self._timeout_s = mesh, timeout_s
        self._methods = {
            name: (_get_protocol(f"{self._name}.{name}", one.protocol), one.knows_padding)
            for name, one in find_transfer_methods(worker).items()
        }
        slots = range(first_slot, first_slot + mesh.size)
        if first_slot < 0 or slots.stop > pool.slots:
            raise ConfigError(
                f"{self._name}: {mesh.size} ranks from slot {first_slot} on; the pool has"
                f" {pool.slots} slots"
            )
        if timeout_s <= 0:
            raise ConfigError(f"{self._name}: timeout_s={timeout_s:g}: must be more than 0")
        self._pool = pool
        self._slots: list[int] = []
        self._hosts: list[Any] = []
        self._is_closed = False
        runtime_env = {"env_vars": {"OMP_NUM_THREADS": "1", **(env or {})}}
        try:
            for slot in slots:
                options = pool.acquire_slot(slot)
                self._slots.append(slot)
                self._hosts.append(WORKER_HOST.options(runtime_env=runtime_env, **options).remote())
        except BaseException:
            self.close()
            raise
        meeting = self._hosts[0].find_rendezvous.remote()
        self._build_replies: list[Any] | None = [
            host.build_worker.remote(worker, rank, mesh, slot, meeting, arguments)
            for rank, (slot, host) in enumerate(zip(slots, self._hosts, strict=True))
        ]

    def wait_until_ready(self) -> None:
        """Wait until all workers are made. Raises DeadlineError, or what stopped one of them."""
        if self._is_closed or self._pool.is_closed:
            what = "group" if self._is_closed else "pool"
            raise ActorError(f"{self._name}: the {what} is closed: it can be called no more")
        if self._build_replies is not None:
            self._fetch_answers(dict(enumerate(self._build_replies)), "start", START_TIMEOUT_S)
            self._build_replies = None

    def __getattr__(self, name: str) -> Callable[..., WorkerGroupReply]:
        """The registered method of that name, as one call of all ranks."""
        if name.startswith("_") or name not in self._methods:
            known = ", ".join(sorted(vars(self).get("_methods", {})))
            raise AttributeError(f"{name}: is no method of a group; it has {known}")
        return partial(self._call_ranks, name)

    def close(self) -> None:
        """End the workers; others may have their part of the slots."""
        self._is_closed = True
        for host in self._hosts:
            ray.kill(host)
        for slot in self._slots:
            self._pool.release_slot(slot)
        self._slots, self._hosts = [], []

    def _call_ranks(self, method: str, *arguments: Any, **named: Any) -> WorkerGroupReply:
        what = f"{self._name}.{method}"
        if named:
            raise ValueError(f"{what}: {', '.join(named)} by name: arguments go by their places")
        self.wait_until_ready()
        protocol, knows = self._methods[method]
        values = tuple(map(resolve_reply, arguments))
        try:
            handed = protocol.distribute_calls(self._mesh, values)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error
        given = make_rank_inputs(handed, protocol, what, knows=knows)
        replies = {
            rank: self._hosts[rank]
            .call_method.options(num_returns=2)
            .remote(method, call, {"real": given[rank].num_real} if knows else {})
            for rank, call in enumerate(handed.calls)
            if call is not None
        }
        return WorkerGroupReply(partial(self._collect_answers, method, given, replies))

    def _collect_answers(
        self, method: str, given: Sequence[RankInput], replies: Mapping[int, tuple[Any, Any]]
    ) -> Any:
        told = {rank: count for rank, (_, count) in replies.items()}
        counts = self._fetch_answers(told, method, self._timeout_s)
        plain = {rank: replies[rank][0] for rank, count in counts.items() if count is None}
        answers = self._fetch_answers(plain, method, self._timeout_s)
        answers |= {
            rank: BatchRef.from_slices(RowSlice(replies[rank][0], 0, count))
            for rank, count in counts.items()
            if count is not None
        }
        protocol, knows = self._methods[method]
        ranks = range(self._mesh.size)
        names = [f"{self._name}-{rank}.{method}" for rank in ranks]
        in_order = [answers.get(rank) for rank in ranks]
        checked = RankAnswers(in_order, given, protocol.answer_kind, names, knows=knows)
        return protocol.collect(self._mesh, checked)

    def _fetch_answers(
        self, replies: Mapping[int, Any], what: str, within_s: float
    ) -> dict[int, Any]:
        """The answers by rank, as they come: one that fails is told at once, whoever is slower."""
        ranks, found = {reply: rank for rank, reply in replies.items()}, {}
        deadline = time.monotonic() + within_s
        while ranks:
            left_s = max(deadline - time.monotonic(), 0.0)
            done, _ = ray.wait(list(ranks), timeout=left_s)
            if not done:
                late = ", ".join(map(str, sorted(ranks.values())))
                raise DeadlineError(
                    f"{self._name}.{what}: no answer within {within_s:g} s from rank {late}"
                )
            for reply in done:
                rank = ranks.pop(reply)
                name = f"{self._name}-{rank}.{what}"
                found[rank] = answer = fetch_reply(reply, name)
                if isinstance(answer, WorkerFailure):
                    raise answer.to_error(name)
        return found


def _get_protocol(method: str, name: str) -> TransferProtocol:
    if method.rpartition(".")[2] in dir(WorkerGroup):
        raise ConfigError(f"{method}: a group has a method of that name itself: must be another")
    if name not in PROTOCOLS:
        raise ConfigError(f"{method}: protocol {name}: must be one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
