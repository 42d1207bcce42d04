"""The actors of one run: created, wired, watched over, ended."""

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from streamrl.actors.calls import CALL_TIMEOUT_S, fetch, has_died
from streamrl.actors.coordinator import Cast, CoordinatorActor, Finish, Start
from streamrl.actors.engine_factory import EngineFactory
from streamrl.actors.feed import EventReport, Report
from streamrl.actors.generator import GeneratorActor
from streamrl.actors.reporting import RoleActors
from streamrl.actors.scorer import ScorerActor
from streamrl.actors.shard import create_shards
from streamrl.actors.starting import Starting
from streamrl.actors.trainer import Meeting, TrainerActor
from streamrl.actors.wiring import Wiring
from streamrl.buffer import Bounds, Files, Ports, ShardPlan
from streamrl.checkpoint import Checkpoint, find_base, journal_dir
from streamrl.config import RunConfig
from streamrl.dataflow import Call, Kind
from streamrl.engines.generator_config import generation_env
from streamrl.errors import ActorError, ActorLostError, DeadlineError
from streamrl.placement import Demand
from streamrl.preflight import Prepared, demands, largest_group_bytes

POLL_S = 0.2
STOP_TIMEOUT_S = 12.0
"""An interrupted run has this long to finish its micro-batch and to save, s."""

STAGE_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""For the libraries of models and tokenizers, which coordinator and shards do not use."""
RETURNING = (Kind.GENERATE, Kind.SCORE)
"""Kinds of stages whose actors are started again when they die: they hold nothing that is lost."""
HOSTS = {Kind.GENERATE: GeneratorActor, Kind.SCORE: ScorerActor, Kind.TRAIN: TrainerActor}


class Session:
    """All actors of a run. Use `start`, then `watch`, and `close` whatever happens.

    `shard_bytes` is what one shard may hold.
    """

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        *,
        on_gpu: bool,
        shard_bytes: int,
        engines: EngineFactory,
    ) -> None:
        self._config = config
        self._shard_bytes = shard_bytes
        self._prepared = prepared
        self._on_gpu = on_gpu
        self._engines = engines
        self._actors: dict[str, Any] = {}
        self._roles: list[RoleActors] = []
        self._loops: dict[Any, str] = {}
        self._starting = Starting(config.generator.start_timeout_s + CALL_TIMEOUT_S)
        self._starts: dict[str, Callable[[], Any]] = {}
        self._deaths: Counter[str] = Counter()

    def start(self, checkpoint: Checkpoint | None, status: Callable[[str], None]) -> list[str]:
        """Create the actors, wait until each is ready, publish the weights, open the stream.

        `status` is told what is being waited for. Returns what could not be read of the journals,
        a line each. Raises the error of an actor that cannot start.
        """
        # They take processes that Ray has ready, which it ends unused once the stages have theirs.
        coordinator = self._create("coordinator", CoordinatorActor)
        wiring = self._wire(coordinator)
        needed = demands(self._config, self._prepared, self._on_gpu)
        self._roles = [self._create_actors(demand) for demand in needed]
        for shard in wiring.shards:
            self._starting.add(self._actors[shard.name].ready.remote(), shard.name)
        status(f"starting {', '.join(sorted(self._actors))}")
        for role in self._roles:
            self._start_actors(role, wiring, checkpoint)
        corrupt = self._await_ready(status)
        start = Start(
            prompts=self._prepared.prompts,
            eval_prompts=self._prepared.eval_prompts,
            state=checkpoint.state if checkpoint else None,
            checkpoint=str(checkpoint.path) if checkpoint else "",
        )
        status("publishing the first weights")
        fetch(coordinator.start.remote(wiring, Cast(self._roles), start), "coordinator.start")
        for role in self._roles:
            if role.kind is not Kind.TRAIN:
                pairs = zip(role.names, role.actors, strict=True)
                self._loops |= {actor.run.remote(): name for name, actor in pairs}
        self._loops[coordinator.run.remote()] = "coordinator"
        return corrupt

    def watch(self, handle: Callable[[Report], None], stopping: Callable[[], bool]) -> Finish:
        """Hand on every report until the run ends; `stopping` turning true ends it early.

        Raises the error of the first actor that fails, and DeadlineError if a run that was told
        to stop does not, or an actor that died does not come back.
        """
        coordinator = self._actors["coordinator"]
        seen, stop_by = 0, float("inf")
        feed = coordinator.reports.remote(seen, 1.0)
        while True:
            if stopping() and stop_by == float("inf"):
                coordinator.request_stop.remote()
                stop_by = time.monotonic() + STOP_TIMEOUT_S
            done, _ = ray.wait([feed, *self._loops, *self._starting], timeout=POLL_S)
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

    def _ended(self, loop: Any, handle: Callable[[Report], None]) -> Finish | None:
        """What a reply that has come means: the end of the run, or that an actor is on its way."""
        if loop in self._starting:
            name = self._starting.pop(loop)
            fetch(loop, f"{name}.start")
            self._loops[self._actors[name].run.remote()] = name
            handle(EventReport("restarted", {"actor": name}))
            return None
        name = self._loops.pop(loop)
        try:
            finish = fetch(loop, name)
        except ActorLostError as error:
            returns = name in self._starts and has_died(loop)
            if not returns or self._deaths[name] >= self._config.run.max_restarts:
                raise
            self._bring_back(name, str(error), handle)
            return None
        if not isinstance(finish, Finish):
            raise ActorError(f"{name}: its loop ended before the run did")
        return finish

    def _bring_back(self, name: str, reason: str, handle: Callable[[Report], None]) -> None:
        """Ray has started the process of a dead actor again; have it load what it had."""
        self._deaths[name] += 1
        handle(EventReport("died", {"actor": name, "reason": reason}))
        fetch(self._actors["coordinator"].lost.remote(name), "coordinator.lost")
        self._starting.add(self._starts[name](), name)

    def close(self) -> None:
        """End every actor; what they had in memory is gone."""
        for actor in self._actors.values():
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor)

    def _wire(self, coordinator: Any) -> Wiring:
        shards = create_shards(self._shard_plans(), self._create)
        return Wiring(
            config=self._config,
            dataflow=self._prepared.dataflow,
            components=self._prepared.components,
            max_length=self._prepared.max_length,
            run_dir=self._config.run_dir.absolute(),
            shards=tuple(shards),
            coordinator=coordinator,
            engines=self._engines,
        )

    def _shard_plans(self) -> dict[str, ShardPlan]:
        config, run_dir = self._config, self._config.run_dir.absolute()
        ports = {c.stage: Ports(c.needs, c.produces) for c in self._prepared.dataflow.takers}
        group_bytes = largest_group_bytes(config, self._prepared)
        bounds = Bounds(config.capacity_groups, self._shard_bytes, group_bytes)
        session = uuid.uuid4().hex
        plans = {}
        for name in (f"shard-{i}" for i in range(config.queue.shards)):
            files = Files(journal_dir(run_dir, name), partial(find_base, run_dir, name))
            kept = files if config.queue.journal.enabled else None
            plans[name] = ShardPlan(ports, config.queue, bounds, session, kept)
        return plans

    def _create_actors(self, demand: Demand) -> RoleActors:
        call = demand.calls[0]
        env = {"env_vars": {**STAGE_ENV, **self._env(call)}}
        options = {"num_cpus": demand.cpus, "num_gpus": demand.gpus, "runtime_env": env}
        if call.kind in RETURNING:
            options["max_restarts"] = self._config.run.max_restarts
        names = [f"{demand.role}-{i}" for i in range(demand.count)]
        actors = [self._create(name, HOSTS[call.kind], options=options) for name in names]
        return RoleActors(demand.calls, names, actors)

    def _start_actors(
        self, role: RoleActors, wiring: Wiring, checkpoint: Checkpoint | None
    ) -> None:
        """Let the actors of one role start."""
        arguments: tuple[Any, ...] = (role.calls,)
        if role.kind is Kind.TRAIN:
            name, (call,) = role.names[0], role.calls
            place = fetch(role.actors[0].rendezvous.remote(), f"{name}.rendezvous")
            meeting = Meeting(call, name.rpartition("-")[0], *place)
            saved = checkpoint.dirs(call.role)[1].absolute() if checkpoint else None
            arguments = (meeting, saved)
        for i, (actor, name) in enumerate(zip(role.actors, role.names, strict=True)):
            self._starting.add(actor.start.remote(wiring, i, *arguments), name)
            if role.kind in RETURNING:
                # Waits for the new process, and dies with it like the first call.
                again = actor.start.options(max_task_retries=-1)
                self._starts[name] = partial(again.remote, wiring, i, *arguments)

    def _env(self, call: Call) -> dict[str, str]:
        """What a process must have in its environment before it imports its engine."""
        if call.kind is Kind.GENERATE:
            device = "cuda" if self._on_gpu else "cpu"
            return generation_env(device, threads=self._config.generator.threads)
        if call.kind is Kind.TRAIN:
            env = {"OMP_NUM_THREADS": str(self._config.trainer_of(call.role).threads)}
            return env if self._on_gpu else {**env, "DS_ACCELERATOR": "cpu"}
        return {}

    def _create(
        self,
        name: str,
        actor_class: Any,
        arguments: Sequence[Any] = (),
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        actor = actor_class.options(**{"num_cpus": 0, **(options or {})}).remote(*arguments)
        self._actors[name] = actor
        return actor

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
