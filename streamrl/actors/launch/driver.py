"""The actors of one run: created, wired, watched over, ended."""

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streamrl.actors.actor_context import Wiring
from streamrl.actors.coordination.driver_events import EventReport, Report
from streamrl.actors.coordinator import Cast, CoordinatorActor, Finish, Start
from streamrl.actors.launch.actor_registry import Crew
from streamrl.actors.launch.elastic import Scaling
from streamrl.actors.launch.startup import Starting
from streamrl.actors.launch.transport_plan import plan_travel
from streamrl.actors.liveness import Vigil, naming_silent
from streamrl.actors.protocols import EngineFactory
from streamrl.actors.queue_shard import create_shards
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, fetch, has_died
from streamrl.actors.transport.transport_spec import WeightTravel
from streamrl.buffer import Bounds, Files, Ports, ShardPlan
from streamrl.config import RunConfig
from streamrl.config.preflight import Prepared, largest_group_bytes
from streamrl.dataflow import POLICY, Kind
from streamrl.errors import (
    ActorError,
    ActorLostError,
    DeadlineError,
    GenerationError,
    StreamError,
    WeightsError,
)
from streamrl.placement import WorkerMemory
from streamrl.run_dir.checkpoint import Checkpoint, find_base, journal_dir, read_layout
from streamrl.run_dir.control_requests import Mailbox
from streamrl.run_dir.crash_stacks import CrashWatch
from streamrl.stream.weight_publisher import PUBLISH_ATTEMPTS

POLL_S = 0.2
STOP_TIMEOUT_S = 12.0
"""An interrupted run has this long to finish its micro-batch and to save, s."""


class Session:
    """All actors of a run. Use `start`, then `watch`, and `close` whatever happens.

    `shard_bytes` is what one shard may hold, `memory` what a hybrid worker holds and gives up.
    """

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
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
        self._crew = Crew(config, prepared, on_gpu=on_gpu)
        self._travel: WeightTravel | None = None
        self._loops: dict[Any, str] = {}
        self._shards: set[str] = set()
        self._vigil = Vigil(config.run.silent_s)
        self._irreplaceable: dict[str, Any] = {}
        self._starting = Starting(config.generator.start_timeout_s + CALL_TIMEOUT_S)
        self._mailbox = Mailbox(config.run_dir)
        self.crashes = CrashWatch(config.run_dir)
        self._scaling = Scaling(
            config, self._crew, self._mailbox, loops=self._loops, starting=self._starting
        )

    def start(self, checkpoint: Checkpoint | None, status: Callable[[str], None]) -> list[str]:
        """Create the actors, wait until each is ready, publish the weights, open the stream.

        `status` is told what is being waited for. Returns what could not be read of the journals,
        a line each. Raises the error of an actor that cannot start.
        """
        # They take processes that Ray has ready, which it ends unused once the stages have theirs.
        crew = self._crew
        # Where the data files were opened: their unpacked copies are on this machine.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        coordinator = crew.create(
            "coordinator", CoordinatorActor, options={"scheduling_strategy": here}
        )
        wiring = self._wire(coordinator)
        crew.fill(wiring.travel.node, status)
        for shard in wiring.shards:
            self._starting.add(crew.actors[shard.name].ready.remote(), shard.name)
        status(f"starting {', '.join(sorted(crew.actors))}")
        for reply, name in crew.start(wiring, checkpoint).items():
            self._starting.add(reply, name)
        corrupt = self._await_ready(status)
        start = Start(
            prompts=self._prepared.prompts,
            eval_prompts=self._prepared.eval_prompts,
            state=checkpoint.state if checkpoint else None,
            checkpoint=str(checkpoint.path) if checkpoint else "",
            publisher_node=crew.node_of(POLICY),
        )
        status("publishing the first weights")
        roles = list(crew.roles.values())
        started = coordinator.start.remote(wiring, Cast(crew.cast), start)
        fetch(started, "coordinator.start", self._first_publish_s)
        for role in roles:
            if role.kind is not Kind.TRAIN:
                pairs = zip(role.names, role.actors, strict=True)
                self._loops |= {actor.run.remote(): crew.process_of(name) for name, actor in pairs}
        self._loops[coordinator.run.remote()] = "coordinator"
        self._shards = {shard.name for shard in wiring.shards}
        self._loops |= crew.watch_over(wiring.shards)
        self._irreplaceable = crew.comebacks.others(crew.processes)
        self._mailbox.open()
        return corrupt

    def watch(self, handle: Callable[[Report], None], stopping: Callable[[], bool]) -> Finish:
        """Hand on every report until the run ends; `stopping` turning true ends it early.

        Raises the error of the first actor that fails, and DeadlineError if a run that was told
        to stop does not, or an actor that died does not come back; see `naming_silent`.
        """
        with naming_silent(lambda: self._crew.processes):
            return self._watch(handle, stopping)

    def _watch(self, handle: Callable[[Report], None], stopping: Callable[[], bool]) -> Finish:
        coordinator = self._crew.actors["coordinator"]
        seen, stop_by = 0, float("inf")
        feed = coordinator.reports.remote(seen, 1.0)
        while True:
            if stopping() and stop_by == float("inf"):
                coordinator.request_stop.remote()
                stop_by = time.monotonic() + STOP_TIMEOUT_S
            if stop_by == float("inf"):
                self._scaling.look(handle)
                self._see_to_silent(handle)
            replies = [feed, *self._loops, *self._starting, *self._scaling]
            done, _ = ray.wait(replies, timeout=POLL_S)
            if time.monotonic() > stop_by:
                raise DeadlineError(f"the run did not stop within {STOP_TIMEOUT_S:g} s")
            self._starting.check()
            if not done:
                continue
            finish = None if done[0] == feed else self._ended(done[0], handle)
            if done[0] != feed and not finish:
                continue
            if finish:
                feed = coordinator.reports.remote(seen, 0.0)
            reports = fetch(feed, "coordinator.reports")
            for report in reports:
                handle(report)
            seen += len(reports)
            if finish:
                return finish
            feed = coordinator.reports.remote(seen, 1.0)

    def _see_to_silent(self, handle: Callable[[Report], None]) -> None:
        """End the processes that answer nothing any more, if new ones take their places.

        Of others it is told: they may go on yet, and what waits for them has a deadline. Raises
        ActorError for one that has been started again as often as it may be.
        """
        names = filter(self._crew.comebacks.includes, self._loops.values())
        actors = {name: self._crew.actors[name] for name in names}
        for name in self._vigil.look({**self._irreplaceable, **actors}):
            reason = f"{name} has not answered for {self._config.run.silent_s:g} s (run.silent_s)"
            if name not in actors:
                told = f"{reason}: {_no_other(self._vigil.pid_of(name))}"
                handle(EventReport("silent", {"actor": name, "reason": told}))
                continue
            if not self._crew.comebacks.allows(name):
                raise ActorError(f"{reason}, and was started again as often as it may be")
            handle(EventReport("silent", {"actor": name, "reason": f"{reason}: it is replaced"}))
            self._vigil.end(name, actors[name])

    def _ended(self, loop: Any, handle: Callable[[Report], None]) -> Finish | None:
        """What a reply that has come means: the end of the run, or that an actor is on its way."""
        if loop in self._scaling:
            self._scaling.arrived(loop, handle)
            return None
        if loop in self._starting:
            name = self._starting.pop(loop)
            for text in fetch(loop, f"{name}.start") or ():
                handle(EventReport("corrupt", {"text": text}))
            self._loops[self._crew.actors[name].run.remote()] = name
            handle(EventReport("restarted", {"actor": name}))
            return None
        name = self._loops.pop(loop)
        try:
            finish = fetch(loop, name)
        except StreamError as error:
            if self._scaling.turns_down(name, str(error)):
                return None
            self._replace(name, loop, error, handle)
            return None
        if not isinstance(finish, Finish):
            raise ActorError(f"{name}: its loop ended before the run did")
        return finish

    def _replace(
        self, name: str, loop: Any, error: StreamError, handle: Callable[[Report], None]
    ) -> None:
        """Have an actor's place taken by a new process, or raise `error` if that is of no use."""
        is_dead = isinstance(error, ActorLostError) and has_died(loop)
        # It may live, but nothing it serves can be trusted.
        is_lost = isinstance(error, WeightsError | GenerationError)
        if not self._crew.comebacks.allows(name) or not (is_dead or is_lost):
            raise error
        if not is_dead:
            self._crew.fail(name)
        self._bring_back(name, str(error), handle)

    def _bring_back(self, name: str, reason: str, handle: Callable[[Report], None]) -> None:
        """Ray has started the process of a dead actor again; have it load what it had."""
        handle(EventReport("died", {"actor": name, "reason": reason}))
        for crash in self.crashes.look():
            handle(EventReport("crashed", asdict(crash)))
        if name not in self._shards:
            fetch(self._crew.actors["coordinator"].lost.remote(name), "coordinator.lost")
        self._starting.add(self._crew.comebacks.begin(name), name)

    def close(self) -> None:
        """End every actor; what they had in memory is gone."""
        self._scaling.close()
        self._crew.close()
        self.crashes.close()
        if self._travel is not None:
            self._travel.end()

    def _wire(self, coordinator: Any) -> Wiring:
        run_dir = self._config.run_dir.absolute()
        shards = create_shards(self._shard_plans(), self._crew.create, run_dir=run_dir)
        self._travel = plan_travel(self._config, self._crew.demands, token=uuid.uuid4().hex[:12])
        return Wiring(
            config=self._config,
            dataflow=self._prepared.dataflow,
            components=self._prepared.components,
            max_length=self._prepared.max_length,
            run_dir=run_dir,
            shards=tuple(shards),
            coordinator=coordinator,
            engines=self._engines,
            travel=self._travel,
            memory=self._memory,
        )

    def _shard_plans(self) -> dict[str, ShardPlan]:
        config, run_dir = self._config, self._config.run_dir.absolute()
        ports = {c.stage: Ports(c.needs, c.produces) for c in self._prepared.dataflow.takers}
        group_bytes = largest_group_bytes(config, self._prepared)
        bounds = Bounds(config.capacity_groups, self._shard_bytes, group_bytes)
        session = uuid.uuid4().hex
        plans = {}
        for i, folder in enumerate(read_layout(run_dir, shards=config.queue.shards).names):
            files = Files(journal_dir(run_dir, folder), partial(find_base, run_dir, folder))
            kept = files if config.queue.journal.enabled else None
            plans[f"shard-{i}"] = ShardPlan(ports, config.queue, bounds, session, kept)
        return plans

    @property
    def _first_publish_s(self) -> float:
        """Longest that the books may take to be opened and the first weights to be published, s."""
        config = self._config
        roles = config.dataflow.trained
        publish_s = max(config.trainer_of(role).collective_timeout_s for role in roles)
        return CALL_TIMEOUT_S + PUBLISH_ATTEMPTS * (publish_s + CALL_TIMEOUT_S)

    def _await_ready(self, status: Callable[[str], None]) -> list[str]:
        """Wait for every start; raises DeadlineError naming those that did not come up.

        Returns what the actors that were started have to say.
        """
        said: list[str] = []
        while self._starting:
            status(f"starting {self._starting.names}")
            ready, _ = ray.wait(list(self._starting), timeout=1.0)
            for reply in ready:
                said += fetch(reply, f"{self._starting.pop(reply)}.start") or []
            self._starting.check()
        return said


def _no_other(pid: str) -> str:
    """What becomes of a run one of whose processes is silent and has no other to take its place."""
    process = f"process {pid}" if pid else "its process"
    return (
        f"{process} cannot be replaced, and the run waits for it; if it was stopped, kill -CONT"
        " lets it go on; else end the run, and go on with streamrl train --resume"
    )
