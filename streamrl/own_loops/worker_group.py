"""Worker groups: workers on a pool of devices, which a controller script calls as one object.

A method of a group runs on all its ranks, as its transfer protocol says. Batches travel as
references, so their data never passes through the controller. Calls return at once, and their
replies can be passed to further calls. The controller blocks only to count rows or to get values,
until the deadline of the call.

    pool = ResourcePool(2)
    policy = WorkerGroup(pool, PolicyWorker, config, max_length, mesh=mesh)
    rollouts = policy.generate_sequences(put({"prompt": prompts}))   # a WorkerGroupReply
"""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from streamrl.actors.launch.placement_groups import order_bundles, reserve_bundles
from streamrl.actors.transport.ray_calls import fetch_reply, find_rendezvous, unwrap_error
from streamrl.engines.trainer_config import LOAD_TIMEOUT_S
from streamrl.errors import ActorError, ConfigError, DeadlineError, StreamError
from streamrl.own_loops import Batch, BatchRef, WorkerContext, WorkerMesh
from streamrl.own_loops.batches import count_rows, is_batch
from streamrl.own_loops.transfer_protocols import RankCalls, find_transfer_methods

GROUP_CALL_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 7200.0
"""Longest turn that the next group waits for; the deadlines of its calls name it earlier."""
BatchShape = tuple[int, tuple[str, ...]]
"""Number of rows and names of the columns of a stored batch."""


class ResourcePool:
    """Devices for worker groups: slots of a cluster, reserved as one Ray placement group.

    cpus, gpus: resources of a slot.
    groups: how many worker groups may share a slot, each with an equal fraction.
    takes_turns: the groups compute one after the other, in the order of the calls; by default all
        at once.
    Raises ConfigError if the resources are not free within timeout_s.
    """

    def __init__(
        self,
        slots: int,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        groups: int = 4,
        takes_turns: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        if min(slots, groups) < 1 or min(cpus, gpus) < 0 or max(cpus, gpus) == 0:
            raise ConfigError(
                f"pool: slots={slots}, groups={groups}, cpus={cpus:g}, gpus={gpus:g}: slots and"
                " groups must be at least 1, cpus and gpus 0 or more, and not both 0"
            )
        self.slots, self.takes_turns = slots, takes_turns
        self._turn_holder: WorkerGroup | None = None
        self._previous_turn = EndedTurn()
        self._worker_resources = {"num_cpus": cpus / groups, "num_gpus": gpus / groups}
        self._groups = groups
        self._used_shares = [0] * slots
        bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
        bundles = [bundle] * slots
        self._placement = reserve_bundles(bundles, timeout_s=timeout_s)
        self._bundles = order_bundles(self._placement, bundles)
        self.is_closed = False

    def acquire_slot(self, slot: int) -> dict[str, Any]:
        """Take a group's fraction of a slot; return the Ray options of the worker there.

        Raises ConfigError if the slot is full.
        """
        if self._used_shares[slot] == self._groups:
            raise ConfigError(
                f"slot {slot} of the pool is full: groups={self._groups} share it already"
            )
        self._used_shares[slot] += 1
        strategy = PlacementGroupSchedulingStrategy(self._placement, self._bundles[slot])
        return {**self._worker_resources, "scheduling_strategy": strategy}

    def release_slot(self, slot: int) -> None:
        """Give back a fraction of a slot that `acquire_slot` took."""
        self._used_shares[slot] -= 1

    def begin_turn(self, group: "WorkerGroup") -> "EndedTurn":
        """Give a group the devices; return the turn before, which its calls must wait for.

        All of a group's ranks change together and in one order, so no ranks wait for each other in
        a circle, as they could if each took a lease of its device.
        """
        if self.takes_turns and group is not self._turn_holder:
            if self._turn_holder is not None:
                self._previous_turn = self._turn_holder.end_turn(self._previous_turn)
            self._turn_holder = group
        return self._previous_turn

    def close(self) -> None:
        self.is_closed = True
        remove_placement_group(self._placement)


@dataclass(frozen=True)
class EndedTurn:
    """Turn of a group on a pool after its last call.

    replies: references that are ready once each rank has ended the turn.
    wait: waits for the ranks, on the controller.
    """

    replies: Sequence[Any] = ()
    wait: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class WorkerFailure:
    """Error of a worker, returned as a value: a streamrl error, or the traceback of any other.

    If a worker raised its errors, Ray would print a message for each unread reply.
    """

    error: StreamError | ConfigError | None
    text: str

    @classmethod
    def from_exception(cls, error: Exception) -> "WorkerFailure":
        cause = unwrap_error(error)
        streamrl_error = cause if isinstance(cause, StreamError | ConfigError) else None
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls(streamrl_error, f"{type(cause).__name__}: {cause}\n{trace}")


class WorkerHost:
    """Ray actor that hosts a worker of a group and calls its methods."""

    def find_rendezvous(self) -> tuple[str, int]:
        return find_rendezvous()

    def build_worker(
        self,
        worker: type,
        rank: int,
        mesh: WorkerMesh,
        rendezvous: tuple[str, int],
        arguments: Sequence[Any],
    ) -> WorkerFailure | None:
        """Construct the worker of a rank; return its error, if any."""
        try:
            self._worker = worker(WorkerContext(rank, mesh, *rendezvous), *arguments)
        except Exception as error:  # noqa: BLE001
            return WorkerFailure.from_exception(error)
        return None

    def end_turn(self, should_offload: bool) -> WorkerFailure | None:
        """Reply after all earlier calls; let the worker offload its models first if it should."""
        try:
            if should_offload:
                self._worker.offload()
        except Exception as error:  # noqa: BLE001
            return WorkerFailure.from_exception(error)
        return None

    def call_method(
        self, method: str, arguments: Sequence[Any], after: Sequence[Any] = ()
    ) -> tuple[Any, BatchShape | WorkerFailure | None]:
        """Call a method of the worker; return the result and its shape, None if it is no batch.

        after: replies to wait for; one whose actor has died counts as arrived.

        Batches among the arguments are fetched first. If the method fails, a WorkerFailure takes
        the place of the shape.
        """
        try:
            if after and ray.wait([*after], num_returns=len(after), timeout=TURN_TIMEOUT_S)[1]:
                raise DeadlineError(f"the turn of the group before took over {TURN_TIMEOUT_S:g} s")
            inputs = [
                fetch_rows(value) if isinstance(value, BatchRef) else value for value in arguments
            ]
            result = methodcaller(method, *inputs)(self._worker)
            return result, (count_rows(result), tuple(result)) if is_batch(result) else None
        except Exception as error:  # noqa: BLE001
            return None, WorkerFailure.from_exception(error)


def put(batch: Batch) -> BatchRef:
    """Store a batch in Ray's object store, where workers can fetch its rows; return a reference.

    Raises ValueError if columns differ in length.
    """
    if not is_batch(batch):
        raise ValueError(
            "put: a batch must be a dict of columns: lists, arrays or tensors with a row per sample"
        )
    return BatchRef.from_stored(ray.put(dict(batch)), batch, count_rows(batch))


def fetch_rows(batch: BatchRef) -> dict[str, Any]:
    """Fetch all columns of a batch."""
    references = batch.references
    stored = fetch_reply(references, "a batch")
    return batch.resolve_columns(dict(zip(references, stored, strict=True)))


class WorkerGroupReply:
    """Reply of a worker group's call, usable as an argument of further calls before it arrives.

    `a | b` is the batch with the columns of both; drop and rename are those of a BatchRef.
    """

    def __init__(self, collect: Callable[[], Any]) -> None:
        self._collect = collect
        self._result: tuple[Any] | None = None

    def get(self) -> Any:
        """Wait for the workers and return the result of the call.

        A BatchRef if the method returns batches, else the values that the transfer protocol
        collects. Raises DeadlineError, or the error of the first worker that failed.
        """
        if self._result is None:
            self._result = (self._collect(),)
            self._collect = lambda: None  # frees the chain of turns before
        return self._result[0]

    def load(self) -> dict[str, Any]:
        """Fetch the columns of the resulting batch into this process; ValueError if not a batch."""
        return fetch_rows(_require_batch(self))

    def __or__(self, other: "WorkerGroupReply | BatchRef") -> "WorkerGroupReply":
        return WorkerGroupReply(lambda: _require_batch(self) | _require_batch(other))

    def __ror__(self, other: BatchRef) -> "WorkerGroupReply":
        return WorkerGroupReply(lambda: _require_batch(other) | _require_batch(self))

    def drop(self, *names: str) -> "WorkerGroupReply":
        return WorkerGroupReply(lambda: _require_batch(self).drop(*names))

    def rename(self, new_names: Mapping[str, str]) -> "WorkerGroupReply":
        return WorkerGroupReply(lambda: _require_batch(self).rename(new_names))


def unwrap_reply(value: Any) -> Any:
    """Return the result of a WorkerGroupReply, or any other value unchanged."""
    return value.get() if isinstance(value, WorkerGroupReply) else value


def _require_batch(value: Any) -> BatchRef:
    """Return the batch of a worker group's reply, or a batch itself; else raise ValueError."""
    batch = unwrap_reply(value)
    if not isinstance(batch, BatchRef):
        type_name = type(batch).__name__
        raise ValueError(
            f"expected a batch, got {type_name}: use put(...), or a method that returns columns"
        )
    return batch


class WorkerGroup:
    """Workers of a class on a pool, a worker in each of its first slots.

    worker: class whose constructor takes a WorkerContext and then `arguments`. Its methods with
    `@transfers` become methods of the group.
    mesh: layout of the ranks.
    env: environment variables of the processes; OMP_NUM_THREADS defaults to 1.
    timeout_s: deadline of a call, without the time that it waits for the group's turn. The start
        has LOAD_TIMEOUT_S.
    offloads: at the end of each turn, the worker's method `offload` frees device memory. The worker
        loads back what its next call needs.

    The constructor does not wait for the workers; `wait_until_ready` or the first call does. Raises
    ConfigError if the pool is too small, or if a method has the name of a method of
    WorkerGroup.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker: type,
        *arguments: Any,
        mesh: WorkerMesh,
        env: Mapping[str, str] | None = None,
        timeout_s: float = GROUP_CALL_TIMEOUT_S,
        offloads: bool = False,
    ) -> None:
        self._name = worker.__name__
        self._offloads, self._last_method = offloads, ""
        self._mesh, self._timeout_s = mesh, timeout_s
        self._methods = find_transfer_methods(worker)
        for method in self._methods.keys() & set(dir(WorkerGroup)):
            raise ConfigError(
                f"{self._name}.{method}: WorkerGroup itself has a method of this name; rename the"
                " worker's"
            )
        if offloads and not (pool.takes_turns and hasattr(worker, "offload")):
            missing = "a method offload" if pool.takes_turns else "a pool with takes_turns=True"
            raise ConfigError(f"{self._name}: offloads=True: needs {missing}")
        if mesh.size > pool.slots:
            raise ConfigError(f"{self._name}: {mesh.size} ranks; the pool has {pool.slots} slots")
        self._pool = pool
        self._slots: list[int] = []
        self._hosts: list[Any] = []
        self._is_closed = False
        # Not a decorator of the class: ray.remote draws an id, see fork_server._draws_unique_ids.
        make_host: Any = ray.remote(WorkerHost)
        runtime_env = {"env_vars": {"OMP_NUM_THREADS": "1", **(env or {})}}
        try:
            for slot in range(mesh.size):
                options = pool.acquire_slot(slot)
                self._slots.append(slot)
                self._hosts.append(make_host.options(runtime_env=runtime_env, **options).remote())
        except BaseException:
            self.close()
            raise
        rendezvous = self._hosts[0].find_rendezvous.remote()
        self._build_replies: list[Any] | None = [
            host.build_worker.remote(worker, rank, mesh, rendezvous, arguments)
            for rank, host in enumerate(self._hosts)
        ]

    def wait_until_ready(self) -> None:
        """Wait until all workers of the group are constructed.

        Raises DeadlineError, or the error of a worker's constructor.
        """
        if self._is_closed or self._pool.is_closed:
            closed_object = "group" if self._is_closed else "pool"
            raise ActorError(f"{self._name}: the {closed_object} is closed and cannot be called")
        if self._build_replies is not None:
            self._fetch_answers(dict(enumerate(self._build_replies)), "start", LOAD_TIMEOUT_S)
            self._build_replies = None

    def __getattr__(self, name: str) -> Callable[..., WorkerGroupReply]:
        if name.startswith("_") or name not in self._methods:
            methods = ", ".join(sorted(vars(self).get("_methods", {})))
            raise AttributeError(f"{name} is not a method of the group; its methods: {methods}")
        return partial(self._call_ranks, name)

    def close(self) -> None:
        self._is_closed = True
        for host in self._hosts:
            ray.kill(host)
        for slot in self._slots:
            self._pool.release_slot(slot)
        self._slots, self._hosts = [], []

    def _call_ranks(self, method: str, *arguments: Any) -> WorkerGroupReply:
        """Call a method on the ranks that its transfer protocol selects; return a lazy reply."""
        self.wait_until_ready()
        values = tuple(map(unwrap_reply, arguments))
        with self._name_call(method):
            calls = self._methods[method].distribute(self._mesh, values)
            if len(calls) != len(self._hosts):
                raise ValueError(
                    f"the protocol distributed {len(calls)} calls to {len(self._hosts)} ranks: must"
                    " be arguments or None for each"
                )
        before, self._last_method = self._pool.begin_turn(self), method
        replies = {
            rank: self._hosts[rank]
            .call_method.options(num_returns=2)
            .remote(method, call, before.replies)
            for rank, call in enumerate(calls)
            if call is not None
        }

        def collect() -> Any:
            before.wait()
            return self._collect_answers(method, calls, replies)

        return WorkerGroupReply(collect)

    def end_turn(self, before: EndedTurn) -> EndedTurn:
        """End the turn on all ranks after their last call.

        before: turn before this one.
        """
        if self._is_closed:
            return before
        replies = [host.end_turn.remote(self._offloads) for host in self._hosts]

        def collect() -> None:
            before.wait()
            if not self._is_closed:
                name = f"{self._last_method} and the end of its turn"
                self._fetch_answers(dict(enumerate(replies)), name, self._timeout_s)

        return EndedTurn(replies, WorkerGroupReply(collect).get)

    @contextmanager
    def _name_call(self, method: str) -> Iterator[None]:
        """Name the call in a ValueError of its transfer protocol."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self._name}.{method}: {error}") from error

    def _collect_answers(
        self, method: str, calls: RankCalls, replies: Mapping[int, tuple[Any, Any]]
    ) -> Any:
        """Wait for the answers of a method and combine them by its transfer protocol.

        replies: by rank, references to the value and to its shape.
        """
        shape_replies = {rank: shape for rank, (_, shape) in replies.items()}
        timeout_s = max(self._timeout_s, self._methods[method].timeout_s)
        shapes = self._fetch_answers(shape_replies, method, timeout_s)
        value_replies = {rank: replies[rank][0] for rank, shape in shapes.items() if shape is None}
        answers = self._fetch_answers(value_replies, method, timeout_s)
        for rank, shape in shapes.items():
            if shape is not None:
                num_rows, names = shape
                answers[rank] = BatchRef.from_stored(replies[rank][0], names, num_rows)
        in_order = [answers.get(rank) for rank in range(self._mesh.size)]
        with self._name_call(method):
            self._methods[method].check_rows(calls, in_order)
            return self._methods[method].collect(self._mesh, in_order)

    def _fetch_answers(
        self, replies: Mapping[int, Any], method: str, timeout_s: float
    ) -> dict[int, Any]:
        """Wait for replies of a method; return the answers by rank.

        The first failure is raised without waiting for slower ranks.
        """
        ranks, answers = {reply: rank for rank, reply in replies.items()}, {}
        deadline = time.monotonic() + timeout_s
        while ranks:
            left_s = max(deadline - time.monotonic(), 0.0)
            done, _ = ray.wait(list(ranks), timeout=left_s)
            if not done:
                late = ", ".join(map(str, sorted(ranks.values())))
                raise DeadlineError(
                    f"{self._name}.{method}: no answer within {timeout_s:g} s from rank {late}"
                )
            for reply in done:
                rank = ranks.pop(reply)
                name = f"{self._name}-{rank}.{method}"
                answers[rank] = answer = fetch_reply(reply, name)
                if isinstance(answer, WorkerFailure):
                    raise answer.error or ActorError(f"{name}: {answer.text}")
        return answers
