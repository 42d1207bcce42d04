"""The actors of one run: created, wired, watched over, ended."""

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streamrl.actors.actor_context import ActorContext
from streamrl.actors.coordination.driver_events import DriverReport, EventReport
from streamrl.actors.coordinator import CoordinatorActor, RoleActorMap, RunResult, RunStart
from streamrl.actors.launch.actor_registry import ActorRegistry
from streamrl.actors.launch.elastic import ReplicaScaler
from streamrl.actors.launch.startup import PendingStarts
from streamrl.actors.launch.transport_plan import plan_transport
from streamrl.actors.liveness import LivenessMonitor, name_unresponsive
from streamrl.actors.protocols import EngineFactory
from streamrl.actors.queue_shard import create_shards
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, fetch_reply, has_died
from streamrl.actors.transport.transport_spec import TransportSpec
from streamrl.buffer import ShardCapacity, ShardFiles, ShardPlan, StageSchema
from streamrl.config import RunConfig
from streamrl.config.preflight import PreparedRun, compute_max_group_bytes
from streamrl.dataflow import POLICY, CallKind
from streamrl.errors import (
    ActorError,
    ActorLostError,
    DeadlineError,
    GenerationError,
    StreamError,
    WeightsError,
)
from streamrl.placement import WorkerMemory
from streamrl.run_dir.checkpoint import Checkpoint, find_snapshot, get_journal_dir, read_layout
from streamrl.run_dir.control_requests import ScaleRequestInbox
from streamrl.run_dir.crash_stacks import CrashWatch
from streamrl.stream.weight_publisher import PUBLISH_ATTEMPTS

POLL_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 12.0
"""An interrupted run has this long to finish its micro-batch and to save, s."""


class RunSession:
    """All actors of a run. Use `start`, then `watch`, and `close` whatever happens.

    `shard_bytes` is what one shard may hold, `memory` what a hybrid worker holds and gives up.
    """

    def __init__(
        self,
        config: RunConfig,
        prepared: PreparedRun,
        *,
        on_gpu: bool,
        shard_bytes: int,
        memory: WorkerMemory | None = None,
        engines: EngineFactory,
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
        )

    def start(self, checkpoint: Checkpoint | None, status: Callable[[str], None]) -> list[str]:
        """Create the actors, wait until each is ready, publish the weights, open the stream.

        `status` is told what is being waited for. Returns what could not be read of the journals,
        a line each. Raises the error of an actor that cannot start.
        """
        # They take processes that Ray has ready, which it ends unused once the stages have theirs.
        crew = self._registry
        # Where the data files were opened: their unpacked copies are on this machine.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        coordinator = crew.create_actor(
            "coordinator", CoordinatorActor, options={"scheduling_strategy": here}
        )
        wiring = self._make_context(coordinator)
        crew.create_roles(wiring.transport.node, status)
        for shard in wiring.shards:
            self._pending_starts.add_actor(crew.actors[shard.name].open_shard.remote(), shard.name)
        status(f"starting {', '.join(sorted(crew.actors))}")
        for reply, name in crew.start_actors(wiring, checkpoint).items():
            self._pending_starts.add_actor(reply, name)
        corrupt = self._wait_until_ready(status)
        start = RunStart(
            prompts=self._prepared.prompts,
            eval_prompts=self._prepared.eval_prompts,
            state=checkpoint.state if checkpoint else None,
            checkpoint=str(checkpoint.path) if checkpoint else "",
            publisher_node=crew.find_node(POLICY),
        )
        status("publishing the first weights")
        roles = list(crew.roles.values())
        started = coordinator.start.remote(wiring, RoleActorMap(crew.stream_roles), start)
        fetch_reply(started, "coordinator.start", self._first_publish_timeout_s)
        for role in roles:
            if role.kind is not CallKind.TRAIN:
                pairs = zip(role.names, role.actors, strict=True)
                self._loop_replies |= {
                    actor.run.remote(): crew.get_process_name(name) for name, actor in pairs
                }
        self._loop_replies[coordinator.run.remote()] = "coordinator"
        self._shard_names = {shard.name for shard in wiring.shards}
        self._loop_replies |= crew.watch_shards(wiring.shards)
        self._irreplaceable = crew.restarts.select_irreplaceable(crew.processes)
        self._request_inbox.open()
        return corrupt

    def watch_actors(
        self, handle: Callable[[DriverReport], None], stopping: Callable[[], bool]
    ) -> RunResult:
        """Hand on every report until the run ends; `stopping` turning true ends it early.

        Raises the error of the first actor that fails, and DeadlineError if a run that was told
        to stop does not, or an actor that died does not come back; see `name_unresponsive`.
        """
        with name_unresponsive(lambda: self._registry.processes):
            return self._watch_actors(handle, stopping)

    def _watch_actors(
        self, handle: Callable[[DriverReport], None], stopping: Callable[[], bool]
    ) -> RunResult:
        coordinator = self._registry.actors["coordinator"]
        seen, stop_by = 0, float("inf")
        feed = coordinator.read_reports.remote(seen, 1.0)
        while True:
            if stopping() and stop_by == float("inf"):
                coordinator.request_stop.remote()
                stop_by = time.monotonic() + STOP_TIMEOUT_S
            if stop_by == float("inf"):
                self._scaler.poll_requests(handle)
                self._replace_unresponsive(handle)
            replies = [feed, *self._loop_replies, *self._pending_starts, *self._scaler]
            done, _ = ray.wait(replies, timeout=POLL_INTERVAL_S)
            if time.monotonic() > stop_by:
                raise DeadlineError(f"the run did not stop within {STOP_TIMEOUT_S:g} s")
            self._pending_starts.raise_if_late()
            if not done:
                continue
            finish = None if done[0] == feed else self._handle_reply(done[0], handle)
            if done[0] != feed and not finish:
                continue
            if finish:
                feed = coordinator.read_reports.remote(seen, 0.0)
            reports = fetch_reply(feed, "coordinator.reports")
            for report in reports:
                handle(report)
            seen += len(reports)
            if finish:
                return finish
            feed = coordinator.read_reports.remote(seen, 1.0)

    def _replace_unresponsive(self, handle: Callable[[DriverReport], None]) -> None:
        """End the processes that answer nothing any more, if new ones take their places.

        Of others it is told: they may go on yet, and what waits for them has a deadline. Raises
        ActorError for one that has been started again as often as it may be.
        """
        names = filter(self._registry.restarts.is_restartable, self._loop_replies.values())
        actors = {name: self._registry.actors[name] for name in names}
        for name in self._liveness.ping_actors({**self._irreplaceable, **actors}):
            reason = f"{name} has not answered for {self._config.run.silent_s:g} s (run.silent_s)"
            if name not in actors:
                told = f"{reason}: {_explain_irreplaceable(self._liveness.find_pid(name))}"
                handle(EventReport("silent", {"actor": name, "reason": told}))
                continue
            if not self._registry.restarts.can_restart(name):
                raise ActorError(f"{reason}, and was started again as often as it may be")
            handle(EventReport("silent", {"actor": name, "reason": f"{reason}: it is replaced"}))
            self._liveness.kill_actor(name, actors[name])

    def _handle_reply(self, loop: Any, handle: Callable[[DriverReport], None]) -> RunResult | None:
        """What a reply that has come means: the end of the run, or that an actor is on its way."""
        if loop in self._scaler:
            self._scaler.handle_reply(loop, handle)
            return None
        if loop in self._pending_starts:
            name = self._pending_starts.pop_actor(loop)
            for text in fetch_reply(loop, f"{name}.start") or ():
                handle(EventReport("corrupt", {"text": text}))
            self._loop_replies[self._registry.actors[name].run.remote()] = name
            handle(EventReport("restarted", {"actor": name}))
            return None
        name = self._loop_replies.pop(loop)
        try:
            finish = fetch_reply(loop, name)
        except StreamError as error:
            if self._scaler.reject_if_unserved(name, str(error)):
                return None
            self._replace_actor(name, loop, error, handle)
            return None
        if not isinstance(finish, RunResult):
            raise ActorError(f"{name}: its loop ended before the run did")
        return finish

    def _replace_actor(
        self, name: str, loop: Any, error: StreamError, handle: Callable[[DriverReport], None]
    ) -> None:
        """Have an actor's place taken by a new process, or raise `error` if that is of no use."""
        is_dead = isinstance(error, ActorLostError) and has_died(loop)
        # It may live, but nothing it serves can be trusted.
        is_lost = isinstance(error, WeightsError | GenerationError)
        if not self._registry.restarts.can_restart(name) or not (is_dead or is_lost):
            raise error
        if not is_dead:
            self._registry.crash_actor(name)
        self._restart_actor(name, str(error), handle)

    def _restart_actor(
        self, name: str, reason: str, handle: Callable[[DriverReport], None]
    ) -> None:
        """Ray has started the process of a dead actor again; have it load what it had."""
        handle(EventReport("died", {"actor": name, "reason": reason}))
        for crash in self.crash_watch.find_new_crashes():
            handle(EventReport("crashed", asdict(crash)))
        if name not in self._shard_names:
            fetch_reply(
                self._registry.actors["coordinator"].handle_actor_death.remote(name),
                "coordinator.lost",
            )
        self._pending_starts.add_actor(self._registry.restarts.restart_actor(name), name)

    def close(self) -> None:
        """End every actor; what they had in memory is gone."""
        self._scaler.close()
        self._registry.close()
        self.crash_watch.close()
        if self._transport is not None:
            self._transport.clean_up()

    def _make_context(self, coordinator: Any) -> ActorContext:
        run_dir = self._config.run_dir.absolute()
        shards = create_shards(
            self._make_shard_plans(), self._registry.create_actor, run_dir=run_dir
        )
        self._transport = plan_transport(
            self._config, self._registry.demands, token=uuid.uuid4().hex[:12]
        )
        return ActorContext(
            config=self._config,
            dataflow=self._prepared.dataflow,
            components=self._prepared.component_columns,
            max_length=self._prepared.max_length,
            run_dir=run_dir,
            shards=tuple(shards),
            coordinator=coordinator,
            engines=self._engines,
            transport=self._transport,
            memory=self._memory,
        )

    def _make_shard_plans(self) -> dict[str, ShardPlan]:
        config, run_dir = self._config, self._config.run_dir.absolute()
        ports = {
            c.stage: StageSchema(c.needs, c.produces) for c in self._prepared.dataflow.queue_calls
        }
        group_bytes = compute_max_group_bytes(config, self._prepared)
        bounds = ShardCapacity(config.capacity_groups, self._shard_bytes, group_bytes)
        session = uuid.uuid4().hex
        plans = {}
        for i, folder in enumerate(read_layout(run_dir, shards=config.queue.shards).shard_names):
            files = ShardFiles(
                get_journal_dir(run_dir, folder), partial(find_snapshot, run_dir, folder)
            )
            kept = files if config.queue.journal.enabled else None
            plans[f"shard-{i}"] = ShardPlan(ports, config.queue, bounds, session, kept)
        return plans

    @property
    def _first_publish_timeout_s(self) -> float:
        """Longest that the books may take to be opened and the first weights to be published, s."""
        config = self._config
        roles = config.dataflow.trained_roles
        publish_s = max(config.get_trainer_config(role).collective_timeout_s for role in roles)
        return CALL_TIMEOUT_S + PUBLISH_ATTEMPTS * (publish_s + CALL_TIMEOUT_S)

    def _wait_until_ready(self, status: Callable[[str], None]) -> list[str]:
        """Wait for every start; raises DeadlineError naming those that did not come up.

        Returns what the actors that were started have to say.
        """
        said: list[str] = []
        while self._pending_starts:
            status(f"starting {self._pending_starts.actor_names}")
            ready, _ = ray.wait(list(self._pending_starts), timeout=1.0)
            for reply in ready:
                said += fetch_reply(reply, f"{self._pending_starts.pop_actor(reply)}.start") or []
            self._pending_starts.raise_if_late()
        return said


def _explain_irreplaceable(pid: str) -> str:
    """What becomes of a run one of whose processes is silent and has no other to take its place."""
    process = f"process {pid}" if pid else "its process"
    return (
        f"{process} cannot be replaced, and the run waits for it; if it was stopped, kill -CONT"
        " lets it go on; else end the run, and go on with streamrl train --resume"
    )
