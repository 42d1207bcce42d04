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
from streamrl.preflight import Prepared

POLL_S = 0.2
STOP_TIMEOUT_S = 12.0
"""An interrupted run has this long to finish its micro-batch and to save, s."""

ACTOR_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


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
        coordinator = self._create("coordinator", CoordinatorActor)
        wiring = self._wire(coordinator)
        waits = {
            **self._start_shards(wiring),
            **self._start_trainers(wiring, checkpoint),
            **self._start_generators(wiring),
            **self._start_scorers(wiring),
        }
        order = wiring.dataflow.stages
        self._stages.sort(key=lambda stage: order.index(stage.stage))
        self._await_ready(waits, status)
        start = Start(
            prompts=self._prepared.prompts,
            eval_prompts=self._prepared.eval_prompts,
            state=checkpoint.state if checkpoint else None,
        )
        status("publishing the first weights")
        fetch(coordinator.start.remote(wiring, Cast(self._stages), start), "coordinator.start")
        for stage in self._stages:
            if stage.kind != Kind.TRAIN.value:
                names = (f"{stage.stage}-{i}" for i in range(len(stage.actors)))
                self._loops |= {a.run.remote(): n for a, n in zip(stage.actors, names, strict=True)}
        self._finish = coordinator.run.remote()
        self._loops[self._finish] = "coordinator"

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

    def _start_generators(self, wiring: Wiring) -> dict[Any, str]:
        config = self._config.generator
        env = generation_env("cuda" if self._on_gpu else "cpu", threads=config.threads)
        actors = self._replicas(
            Call("generate", "generator", Kind.GENERATE, (), ()),
            GeneratorActor,
            count=config.replicas,
            env=env,
            gpus=int(self._on_gpu),
        )
        return {a.start.remote(wiring, i): f"generator-{i}" for i, a in enumerate(actors)}

    def _start_scorers(self, wiring: Wiring) -> dict[Any, str]:
        waits: dict[Any, str] = {}
        for call in wiring.dataflow.of_kind(Kind.SCORE):
            is_reward = call.role == "reward"
            actors = self._replicas(
                call,
                ScorerActor,
                count=self._config.scorer.replicas if is_reward else 1,
                env={},
                gpus=0 if is_reward else int(self._on_gpu),
            )
            waits |= {
                a.start.remote(wiring, call, i): f"{call.stage}-{i}" for i, a in enumerate(actors)
            }
        return waits

    def _start_trainers(self, wiring: Wiring, checkpoint: Checkpoint | None) -> dict[Any, str]:
        config = self._config.trainer
        (call,) = wiring.dataflow.of_kind(Kind.TRAIN)
        env = {"OMP_NUM_THREADS": str(config.threads)}
        if not self._on_gpu:
            env["DS_ACCELERATOR"] = "cpu"
        ranks = self._replicas(
            call, TrainerActor, count=config.world_size, env=env, gpus=int(self._on_gpu)
        )
        meeting = fetch(ranks[0].rendezvous.remote(), "trainer-0.rendezvous")
        folder = checkpoint.trainer_dir.absolute() if checkpoint else None
        return {
            rank.start.remote(wiring, i, meeting, folder): f"trainer-{i}"
            for i, rank in enumerate(ranks)
        }

    def _replicas(
        self, call: Call, actor_class: Any, *, count: int, env: Mapping[str, str], gpus: int
    ) -> list[Any]:
        """Create the actors of one stage and note them as its cast."""
        role = "trainer" if call.kind is Kind.TRAIN else call.role
        names = [f"{role}-{i}" for i in range(count)]
        actors = [self._create(name, actor_class, env=env, cpus=1, gpus=gpus) for name in names]
        self._stages.append(StageActors(call.stage, call.kind.value, names, actors))
        return actors

    def _create(
        self,
        name: str,
        actor_class: Any,
        *,
        env: Mapping[str, str] | None = None,
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
