"""Driver session of a run: creates, starts, watches and kills all actors."""

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streamrl.actors.actor_context import ActorContext
from streamrl.actors.coordination.coordinator import CoordinatorActor, RunResult
from streamrl.actors.coordination.driver_events import DriverReport, EventReport
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.actors.launch.actor_registry import ActorRegistry
from streamrl.actors.launch.elastic import PendingStarts, ReplicaScaler
from streamrl.actors.liveness import LivenessMonitor, name_unresponsive
from streamrl.actors.queue_shard import create_shards
from streamrl.actors.rank_calls import get_publish_timeout_s
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, fetch_reply, has_died
from streamrl.buffer import ShardCapacity, ShardFiles, ShardPlan
from streamrl.config.preflight import PreparedRun
from streamrl.config.resume_checks import make_stage_schemas
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import CallKind
from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.errors import (
    ActorError,
    ActorLostError,
    DeadlineError,
    GenerationError,
    StreamError,
    WeightsError,
)
from streamrl.run_dir.checkpoint import Checkpoint, find_snapshot, get_journal_dir, read_layout
from streamrl.run_dir.control_requests import ScaleRequestInbox
from streamrl.run_dir.crash_stacks import CrashWatch
from streamrl.stream.weight_publisher import PUBLISH_ATTEMPTS
from streamrl.telemetry.progress import SHOW_AFTER_S, WorkStatus
from streamrl.weights.transport import TransportSpec

STOP_TIMEOUT_S = 12.0 + SHOW_AFTER_S
"""Longest time of an interrupted run to finish its micro-batch, and to end after its checkpoint.
Work is reported SHOW_AFTER_S after its start."""


class StopDeadline:
    """Time by which a run must have stopped; none before `start`.

    Work that announces a time of its own, such as writing a checkpoint, extends it meanwhile.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = math.inf
        self._reason = ""

    @property
    def is_running(self) -> bool:
        return self._end_s != math.inf

    def start(self) -> None:
        self._end_s = self._clock() + STOP_TIMEOUT_S
        self._reason = f"the run did not stop within {STOP_TIMEOUT_S:g} s"

    def note_status(self, status: WorkStatus) -> None:
        """Extend the deadline for work with a time of its own; count anew once work has ended."""
        if self.is_running and (status.timeout_s or not status.text):
            left_s = max(status.timeout_s - status.elapsed_s, 0.0)
            self._end_s = self._clock() + left_s + STOP_TIMEOUT_S
            work = f" after {status.timeout_s:g} s of {status.text}" if status.text else ""
            self._reason = f"the run did not stop within {STOP_TIMEOUT_S:g} s{work}"

    def check(self) -> None:
        """Raise DeadlineError if the deadline has passed."""
        if self._clock() > self._end_s:
            raise DeadlineError(self._reason)


POLL_INTERVAL_S = 0.2
LEDGER_TIMEOUT_S = 5.0
MAX_COORDINATOR_CALLS = 10_000
"""Calls that wait at the coordinator at once: one per follower of the weights, and the driver's.

A call beyond the limit, such as a stop request, would wait for one of the others; Ray's default is
1,000.
"""


class RunSession:
    """Owner of all actors of a run, in the driver. Call `start`, then `watch_actors`, then `close`.

    Call `close` also after an error.

    shard_bytes: capacity of a shard of the queue, bytes.
    memory: memory budget of a hybrid worker; None without hybrid workers.
    """

    def __init__(
        self,
        config: RunConfig,
        prepared: PreparedRun,
        *,
        on_gpu: bool,
        shard_bytes: int,
        memory: WorkerMemory | None = None,
        engines: RealEngineFactory,
    ) -> None:
        self._config = config
        self._shard_bytes = shard_bytes
        self._memory = memory
        self._prepared = prepared
        self._engines = engines
        self._registry = ActorRegistry(config, prepared, on_gpu=on_gpu)
        self._transport: TransportSpec | None = None
        self._loop_replies: dict[Any, str] = {}
        self._shard_names: set[str] = set()
        self._liveness = LivenessMonitor(config.run.silent_s)
        self._irreplaceable: dict[str, Any] = {}
        self._pending_starts = PendingStarts(config.generator.start_timeout_s + CALL_TIMEOUT_S)
        self._request_inbox = ScaleRequestInbox(config.run_dir)
        self.crash_watch = CrashWatch(config.run_dir)
        self._scaler = ReplicaScaler(
            config,
            self._registry,
            self._request_inbox,
            loops=self._loop_replies,
            starting=self._pending_starts,
            model_bytes=max(prepared.model_bytes.values()),
        )

    def start(
        self,
        checkpoint: Checkpoint | None,
        transport: TransportSpec,
        status: Callable[[str], None],
    ) -> list[str]:
        """Create all actors, wait until they are ready, publish the weights and run the stages.

        checkpoint: checkpoint to resume from; None for a new run. transport: that of the weights.
        status: receives a line about the current wait.

        Returns a line for each unreadable journal record. Raises the error of an actor that cannot
        start.
        """
        # First, to use Ray's prestarted workers: Ray kills idle ones once the stages have theirs.
        registry = self._registry
        # On the driver's node, which has the unpacked copies of the data files.
        affinity = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        coordinator = registry.create_actor(
            "coordinator",
            CoordinatorActor,
            options={"scheduling_strategy": affinity, "max_concurrency": MAX_COORDINATOR_CALLS},
        )
        self._transport, registry.token = transport, transport.token
        context = self._make_context(coordinator, transport)
        registry.create_roles(context.transport.node, status)
        for shard in context.shards:
            self._pending_starts.add_actor(
                registry.actors[shard.name].open_shard.remote(), shard.name
            )
        status(f"starting {', '.join(sorted(registry.actors))}")
        for reply, name in registry.start_actors(context, checkpoint).items():
            self._pending_starts.add_actor(reply, name)
        corrupt = self._wait_until_ready(status)
        status("publishing the first weights")
        roles = list(registry.roles.values())
        data = (self._prepared.prompts, self._prepared.eval_prompts)
        start_reply = coordinator.start.remote(context, registry.stream_roles, *data, checkpoint)
        publish_s = get_publish_timeout_s(self._config, self._prepared.model_bytes)
        timeout_s = CALL_TIMEOUT_S + PUBLISH_ATTEMPTS * publish_s
        fetch_reply(start_reply, "coordinator.start", timeout_s)
        for role in roles:
            if role.kind is not CallKind.TRAIN:
                pairs = zip(role.names, role.actors, strict=True)
                self._loop_replies |= {
                    actor.run.remote(): registry.get_process_name(name) for name, actor in pairs
                }
        self._loop_replies[coordinator.run.remote()] = "coordinator"
        self._shard_names = {shard.name for shard in context.shards}
        self._loop_replies |= registry.watch_shards(context.shards)
        self._irreplaceable = registry.irreplaceable
        self._request_inbox.open()
        status("")
        return corrupt

    def watch_actors(
        self, handle: Callable[[DriverReport], None], stopping: Callable[[], bool]
    ) -> RunResult:
        """Watch the actors until the run ends; return its result.

        handle: receives every report of the coordinator and every event of an actor.
        stopping: returns true to stop the run early.

        Restarts actors that die. Raises the error of an actor that cannot be restarted, and
        DeadlineError if the run does not stop or an actor does not restart in time; the message
        then names unresponsive processes.
        """
        with name_unresponsive(lambda: self._registry.processes):
            return self._watch_actors(handle, stopping)

    def _watch_actors(
        self, handle: Callable[[DriverReport], None], stopping: Callable[[], bool]
    ) -> RunResult:
        coordinator = self._registry.actors["coordinator"]
        num_seen, deadline = 0, StopDeadline()
        reports_reply = coordinator.read_reports.remote(num_seen, 1.0)
        while True:
            if stopping() and not deadline.is_running:
                coordinator.request_stop.remote()
                handle(WorkStatus("stopping after the current micro-batch"))
                deadline.start()
            if not deadline.is_running:
                self._scaler.poll_requests(handle)
            self._replace_unresponsive(handle, restart=not deadline.is_running)
            replies = [reports_reply, *self._loop_replies, *self._pending_starts, *self._scaler]
            done, _ = ray.wait(replies, timeout=POLL_INTERVAL_S)
            deadline.check()
            self._pending_starts.raise_if_late()
            if not done:
                continue
            result = None if done[0] == reports_reply else self._handle_reply(done[0], handle)
            if done[0] != reports_reply and not result:
                continue
            if result:
                reports_reply = coordinator.read_reports.remote(num_seen, 0.0)
            reports = fetch_reply(reports_reply, "coordinator.read_reports")
            for report in reports:
                if isinstance(report, WorkStatus):
                    deadline.note_status(report)
                handle(report)
            num_seen += len(reports)
            if result:
                return result
            reports_reply = coordinator.read_reports.remote(num_seen, 1.0)

    def format_ledger(self) -> str:
        """Return the ledger's counts as text, also after a failure; empty without coordinator."""
        try:
            reply = self._registry.actors["coordinator"].format_ledger.remote()
            return str(fetch_reply(reply, "coordinator.format_ledger", LEDGER_TIMEOUT_S))
        except StreamError:
            return ""

    def _replace_unresponsive(
        self, handle: Callable[[DriverReport], None], *, restart: bool
    ) -> None:
        """Kill processes that no longer reply and that Ray can restart; report other silent ones.

        Without `restart`, only those that Ray cannot restart are pinged.

        A process that Ray cannot restart may still recover, and the calls to it have deadlines.
        Raises ActorError if an unresponsive actor has no restarts left.
        """
        running = self._loop_replies.values() if restart else ()
        restarts = self._registry.restarts
        actors = {name: self._registry.actors[name] for name in running if name in restarts}
        for name in self._liveness.ping_actors({**self._irreplaceable, **actors}):
            reason = f"{name} has not answered for {self._config.run.silent_s:g} s (run.silent_s)"
            if name not in actors:
                pid = self._liveness.find_pid(name)
                explanation = (
                    f"{reason}: {f'process {pid}' if pid else 'its process'} cannot be restarted,"
                    " so the run waits for it. If it was stopped, kill -CONT continues it;"
                    " otherwise stop the run and use streamrl train --resume"
                )
                handle(EventReport("silent", {"actor": name, "reason": explanation}))
                continue
            if not restarts[name].can_restart:
                raise ActorError(f"{reason} and has no restarts left")
            handle(
                EventReport(
                    "silent", {"actor": name, "reason": f"{reason}; it is killed and restarted"}
                )
            )
            self._liveness.kill_actor(name, actors[name])

    def _handle_reply(self, reply: Any, handle: Callable[[DriverReport], None]) -> RunResult | None:
        """Handle the finished reply of an actor; return the result of the run if it has ended.

        The reply is a milestone of a joining or leaving replica, a restart, or the end of an
        actor's loops.
        """
        if reply in self._scaler:
            self._scaler.handle_reply(reply, handle)
            return None
        if reply in self._pending_starts:
            name = self._pending_starts.pop_actor(reply)
            try:
                corrupt = fetch_reply(reply, f"{name}.start") or ()
            except StreamError as error:
                has_died_again = isinstance(error, ActorLostError)
                raise self._add_restarts(error, name, has_died_again) from error.__cause__
            for text in corrupt:
                handle(EventReport("corrupt", {"text": text}))
            self._loop_replies[self._registry.actors[name].run.remote()] = name
            handle(EventReport("restarted", {"actor": name}))
            return None
        name = self._loop_replies.pop(reply)
        try:
            result = fetch_reply(reply, name)
        except StreamError as error:
            if self._scaler.reject_if_joining(name, str(error)):
                return None
            self._replace_actor(name, reply, error, handle)
            return None
        if not isinstance(result, RunResult):
            raise ActorError(f"{name}: the actor's loop ended before the run")
        return result

    def _replace_actor(
        self, name: str, reply: Any, error: StreamError, handle: Callable[[DriverReport], None]
    ) -> None:
        """Restart an actor whose loops failed with `error`; raise the error if that cannot help.

        reply: failed reply of the loops.
        """
        is_dead = isinstance(error, ActorLostError) and has_died(reply)
        # The process may live, but its weights or its engine are broken.
        is_lost = isinstance(error, WeightsError | GenerationError)
        restarts = self._registry.restarts.get(name)
        if not (restarts and restarts.can_restart and (is_dead or is_lost)):
            raise self._add_restarts(error, name) from error.__cause__
        if not is_dead:
            self._registry.crash_actor(name)
        self._restart_actor(name, str(error), handle)

    def _add_restarts(
        self, error: StreamError, name: str, has_died_again: bool = False
    ) -> StreamError:
        restarts = self._registry.restarts.get(name)
        text = restarts.describe(name, has_died_again=has_died_again) if restarts else ""
        return type(error)(f"{error}{text}")

    def _restart_actor(
        self, name: str, reason: str, handle: Callable[[DriverReport], None]
    ) -> None:
        """Report the death of an actor, requeue its groups and initialize its restarted process."""
        handle(EventReport("died", {"actor": name, "reason": reason}))
        for crash in self.crash_watch.find_new_crashes():
            handle(EventReport("crashed", asdict(crash)))
        if name not in self._shard_names:
            self._registry.notify_coordinator("release_actor", name, died=True)
        self._pending_starts.add_actor(self._registry.restarts[name].restart(), name)

    def close(self) -> None:
        self._scaler.close()
        self._registry.close()
        self.crash_watch.close()
        if self._transport is not None:
            self._transport.clean_up()
            # Loads torch, as the choice of the transport has.
            from streamrl.weights.shared_copies import remove_run_copies

            remove_run_copies(self._registry.token)

    def _make_context(self, coordinator: Any, transport: TransportSpec) -> ActorContext:
        """Create the shards and return the context for all actors."""
        run_dir = self._config.run_dir.absolute()
        shards = create_shards(
            self._make_shard_plans(), self._registry.create_actor, run_dir=run_dir
        )
        return ActorContext(
            config=self._config,
            max_length=self._prepared.max_length,
            model_bytes=self._prepared.model_bytes,
            run_dir=run_dir,
            shards=tuple(shards),
            coordinator=coordinator,
            engines=self._engines,
            transport=transport,
            memory=self._memory,
        )

    def _make_shard_plans(self) -> dict[str, ShardPlan]:
        """Return for each shard of the queue its stages, capacity and files, by shard name."""
        config, run_dir = self._config, self._config.run_dir.absolute()
        schemas = make_stage_schemas(config.dataflow)
        group_bytes = config.bound_group_bytes(self._prepared.max_length)
        capacity = ShardCapacity(config.capacity_groups, self._shard_bytes, group_bytes)
        session = uuid.uuid4().hex
        plans = {}
        for i, folder in enumerate(read_layout(run_dir, shards=config.queue.shards).shard_names):
            files = ShardFiles(
                get_journal_dir(run_dir, folder), partial(find_snapshot, run_dir, folder)
            )
            journal_files = files if config.queue.journal.enabled else None
            plans[f"shard-{i}"] = ShardPlan(schemas, config.queue, capacity, session, journal_files)
        return plans

    def _wait_until_ready(self, status: Callable[[str], None]) -> list[str]:
        """Wait until all actors have started; DeadlineError names the actors that are late.

        Returns a line for each unreadable journal record, as `ShardActor.open_shard` reports them.
        """
        corrupt_lines: list[str] = []
        while self._pending_starts:
            status(f"starting {self._pending_starts.actor_names}")
            ready, _ = ray.wait(list(self._pending_starts), timeout=1.0)
            for reply in ready:
                corrupt_lines += (
                    fetch_reply(reply, f"{self._pending_starts.pop_actor(reply)}.start") or []
                )
            self._pending_starts.raise_if_late()
        return corrupt_lines
