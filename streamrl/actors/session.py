"""The actors of one run: created, wired, watched over, ended."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from streamrl.actors.calls import CALL_TIMEOUT_S, fetch
from streamrl.actors.coordinator import Cast, CoordinatorActor, Finish, Start
from streamrl.actors.engine_factory import EngineFactory
from streamrl.actors.feed import Report
from streamrl.actors.generator import GeneratorActor
from streamrl.actors.reporting import StageActors
from streamrl.actors.scorer import ScorerActor
from streamrl.actors.shard import RemoteShard, ShardActor
from streamrl.actors.trainer import TrainerActor
from streamrl.actors.wiring import Wiring
from streamrl.buffer import Ports
from streamrl.checkpoint import Checkpoint
from streamrl.config import RunConfig
from streamrl.dataflow import Call, Kind
from streamrl.engines.generator_config import generation_env
from streamrl.errors import ActorError, DeadlineError
from streamrl.placement import Demand
from streamrl.preflight import Prepared, demands

POLL_S = 0.2
STOP_TIMEOUT_S = 12.0
"""An interrupted run has this long to finish its micro-batch and to save, s."""

ACTOR_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
HOSTS = {Kind.GENERATE: GeneratorActor, Kind.SCORE: ScorerActor, Kind.TRAIN: TrainerActor}


class Session:
    """All actors of a run. Use `start`, then `watch`, and `close` whatever happens."""

    def __init__(
        self, config: RunConfig, prepared: Prepared, *, on_gpu: bool, engines: EngineFactory
    ) -> None:
        self._config = config
        self._prepared = prepared
        self._on_gpu = on_gpu
        self._engines = engines
        self._actors: dict[str, Any] = {}
        self._stages: list[StageActors] = []
        self._loops: dict[Any, str] = {}

    def start(self, checkpoint: Checkpoint | None, status: Callable[[str], None]) -> None:
        """Create the actors, wait until each is ready, publish the weights, open the stream.

        `status` is told what is being waited for. Raises the error of an actor that cannot start.
        """
        # Engines take longest to come up: their processes first.
        needed = demands(self._config, self._prepared, self._on_gpu)
        self._stages = [self._create_stage(demand) for demand in needed]
        coordinator = self._create("coordinator", CoordinatorActor)
        wiring = self._wire(coordinator)
        waits = self._start_shards(wiring)
        status(f"starting {', '.join(sorted(self._actors))}")
        for demand, stage in zip(needed, self._stages, strict=True):
            waits |= self._start_stage(demand.call, stage, wiring, checkpoint)
        self._await_ready(waits, status)
        start = Start(
            prompts=self._prepared.prompts,
            eval_prompts=self._prepared.eval_prompts,
            state=checkpoint.state if checkpoint else None,
        )
        status("publishing the first weights")
        fetch(coordinator.start.remote(wiring, Cast(self._stages), start), "coordinator.start")
        for stage in self._stages:
            if stage.kind is not Kind.TRAIN:
                pairs = zip(stage.names, stage.actors, strict=True)
                self._loops |= {actor.run.remote(): name for name, actor in pairs}
        self._loops[coordinator.run.remote()] = "coordinator"

    def watch(self, handle: Callable[[Report], None], stopping: Callable[[], bool]) -> Finish:
        """Hand on every report until the run ends; `stopping` turning true ends it early.

        Raises the error of the first actor that fails, and DeadlineError if a run that was told
        to stop does not.
        """
        coordinator = self._actors["coordinator"]
        seen, stop_by = 0, float("inf")
        feed = coordinator.reports.remote(seen, 1.0)
        while True:
            if stopping() and stop_by == float("inf"):
                coordinator.request_stop.remote()
                stop_by = time.monotonic() + STOP_TIMEOUT_S
            done, _ = ray.wait([feed, *self._loops], timeout=POLL_S)
            if time.monotonic() > stop_by:
                raise DeadlineError(f"the run did not stop within {STOP_TIMEOUT_S:g} s")
            if not done:
                continue
            finish = None if done[0] == feed else self._ended(done[0])
            if finish:
                feed = coordinator.reports.remote(seen, 0.0)
            reports = fetch(feed, "coordinator.reports")
            for report in reports:
                handle(report)
            seen += len(reports)
            if finish:
                return finish
            feed = coordinator.reports.remote(seen, 1.0)

    def _ended(self, loop: Any) -> Finish:
        """What a loop that has ended says: the coordinator's result, or an error."""
        finish = fetch(loop, self._loops[loop])
        if not isinstance(finish, Finish):
            raise ActorError(f"{self._loops[loop]}: its loop ended before the run did")
        return finish

    def close(self) -> None:
        """End every actor; what they had in memory is gone."""
        for actor in self._actors.values():
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor)

    def _wire(self, coordinator: Any) -> Wiring:
        shards = tuple(
            RemoteShard(f"shard-{i}", self._create(f"shard-{i}", ShardActor))
            for i in range(self._config.queue.shards)
        )
        return Wiring(
            config=self._config,
            dataflow=self._prepared.dataflow,
            components=self._prepared.components,
            max_length=self._prepared.max_length,
            run_dir=self._config.run_dir.absolute(),
            shards=shards,
            coordinator=coordinator,
            engines=self._engines,
        )

    def _start_shards(self, wiring: Wiring) -> dict[Any, str]:
        ports = {c.stage: Ports(c.needs, c.produces) for c in wiring.dataflow.calls}
        config = self._config
        names = [f"shard-{i}" for i in range(config.queue.shards)]
        return {
            self._actors[name].start.remote(ports, config.queue, config.capacity_groups): name
            for name in names
        }

    def _create_stage(self, demand: Demand) -> StageActors:
        kind = demand.call.kind
        names = [f"{demand.role}-{i}" for i in range(demand.count)]
        actors = [
            self._create(name, HOSTS[kind], self._env(kind), cpus=demand.cpus, gpus=demand.gpus)
            for name in names
        ]
        return StageActors(demand.call.stage, kind, names, actors)

    def _start_stage(
        self, call: Call, stage: StageActors, wiring: Wiring, checkpoint: Checkpoint | None
    ) -> dict[Any, str]:
        """Let the actors of one stage start: replies to wait for, with the names behind them."""
        arguments: tuple[Any, ...] = ()
        if stage.kind is Kind.SCORE:
            arguments = (call,)
        elif stage.kind is Kind.TRAIN:
            meeting = fetch(stage.actors[0].rendezvous.remote(), f"{stage.names[0]}.rendezvous")
            arguments = (meeting, checkpoint.trainer_dir.absolute() if checkpoint else None)
        return {
            actor.start.remote(wiring, i, *arguments): name
            for i, (actor, name) in enumerate(zip(stage.actors, stage.names, strict=True))
        }

    def _env(self, kind: Kind) -> dict[str, str]:
        """What a process must have in its environment before it imports its engine."""
        if kind is Kind.GENERATE:
            device = "cuda" if self._on_gpu else "cpu"
            return generation_env(device, threads=self._config.generator.threads)
        if kind is Kind.TRAIN:
            env = {"OMP_NUM_THREADS": str(self._config.trainer.threads)}
            return env if self._on_gpu else {**env, "DS_ACCELERATOR": "cpu"}
        return {}

    def _create(
        self,
        name: str,
        actor_class: Any,
        env: Mapping[str, str] | None = None,
        *,
        cpus: int = 0,
        gpus: int = 0,
    ) -> Any:
        actor = actor_class.options(
            num_cpus=cpus, num_gpus=gpus, runtime_env={"env_vars": {**ACTOR_ENV, **(env or {})}}
        ).remote()
        self._actors[name] = actor
        return actor

    def _await_ready(self, waits: Mapping[Any, str], status: Callable[[str], None]) -> None:
        """Wait for every start; raises DeadlineError naming those that did not come up."""
        timeout_s = self._config.generator.start_timeout_s + CALL_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        waiting = dict(waits)
        while waiting:
            status(f"starting {', '.join(sorted(waiting.values()))}")
            ready, _ = ray.wait(list(waiting), timeout=1.0)
            for reply in ready:
                fetch(reply, f"{waiting.pop(reply)}.start")
            if waiting and time.monotonic() > deadline:
                names = ", ".join(sorted(waiting.values()))
                raise DeadlineError(f"{names}: not ready within {timeout_s:g} s")
