"""The actors of a run by name: what each is made of, how it is started, and its end."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streamrl.actors.actor_context import Wiring
from streamrl.actors.colocated import HybridActor, Part
from streamrl.actors.coordination.step_reporter import RoleActors
from streamrl.actors.generator import GeneratorActor
from streamrl.actors.launch.fork_server import (
    BASE,
    GENERATOR,
    MODELS,
    STAGE_ENV,
    TRAINER,
    level_env,
)
from streamrl.actors.launch.placement_groups import OwnSeats, Seats, room_for_large
from streamrl.actors.launch.ray_cluster import GIB
from streamrl.actors.queue_shard import RESTARTS as SHARD_RESTARTS
from streamrl.actors.scorer import ScorerActor
from streamrl.actors.trainer import Meeting, TrainerActor
from streamrl.actors.transport.ray_calls import fetch
from streamrl.actors.transport.shard_proxy import RemoteShard
from streamrl.config import RunConfig
from streamrl.config.preflight import Prepared, demands
from streamrl.config.role_counts import placement_of
from streamrl.dataflow import GENERATE, POLICY, REFERENCE, Call, Kind
from streamrl.engines.vllm.environment import generation_env
from streamrl.engines.vllm.rank_groups import teams_of
from streamrl.errors import ActorLostError
from streamrl.files.hf_config import trusted_env
from streamrl.placement import Capacity, Demand, check_fits
from streamrl.run_dir.checkpoint import Checkpoint

RETURNING = (Kind.GENERATE, Kind.SCORE)
"""Kinds of stages whose actors are started again when they die: they hold nothing that is lost."""
HOSTS = {
    Kind.GENERATE: GeneratorActor,
    Kind.SCORE: ScorerActor,
    Kind.TRAIN: TrainerActor,
}


class Comebacks:
    """The actors whose processes Ray starts again, how often it may, and what they load then."""

    def __init__(self, most: int) -> None:
        """`most` times each, unless something else is said."""
        self._most = most
        self._own: dict[str, int] = {}
        self._starts: dict[str, Callable[[], Any]] = {}
        self._deaths: Counter[str] = Counter()

    def note(self, name: str, start: Callable[[], Any], *, most: int | None = None) -> None:
        """What the new process of an actor is called with; it waits for the process."""
        self._starts[name] = start
        self._own[name] = self._most if most is None else most

    def forget(self, name: str) -> None:
        """The actor is no more."""
        self._starts.pop(name, None)
        self._deaths.pop(name, None)

    def includes(self, name: str) -> bool:
        """Whether the process of an actor is one that Ray starts again."""
        return name in self._starts

    def others(self, processes: Mapping[str, Any]) -> dict[str, Any]:
        """Those of these processes that Ray does not start again."""
        return {name: one for name, one in processes.items() if not self.includes(name)}

    def allows(self, name: str) -> bool:
        """Whether it does so when that dies once more."""
        return name in self._starts and self._deaths[name] < self._own[name]

    def begin(self, name: str) -> Any:
        """Have the new process of an actor load what the dead one had; the reply."""
        self._deaths[name] += 1
        return self._starts[name]()


class Crew:
    """Every actor of a run; replicas of the roles that serve may be hired and dismissed."""

    def __init__(self, config: RunConfig, prepared: Prepared, *, on_gpu: bool) -> None:
        self._config = config
        self._on_gpu = on_gpu
        self._demands = {d.calls[0].role: d for d in demands(config, prepared, on_gpu) if d.calls}
        self._seats: Seats | OwnSeats | None = None
        self._node = ""
        self.comebacks = Comebacks(config.run.max_restarts)
        self._wiring: Wiring | None = None
        self.actors: dict[str, Any] = {}
        self.roles: dict[str, RoleActors] = {}

    def create(
        self,
        name: str,
        actor_class: Any,
        arguments: Sequence[Any] = (),
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make an actor; it takes no slot unless `options` say so."""
        # Not where the class is defined: see `fork_server._draws_unique_ids`.
        actor = (
            ray.remote(actor_class).options(**{"num_cpus": 0, **(options or {})}).remote(*arguments)
        )
        self.actors[name] = actor
        return actor

    @property
    def demands(self) -> list[Demand]:
        """What all roles ask for as the run begins."""
        return list(self._demands.values())

    def fill(self, node: str, waiting: Callable[[str], None]) -> None:
        """Make the actors of all roles; where weights travel, only on `node` if one is named.

        `waiting` is told what is waited for. Raises ConfigError if slots to share, or those of the
        ranks of a model, are not free.
        """
        self._node = node
        is_hybrid = self._config.placement.is_hybrid
        # Before all others: who comes one by one could leave the ranks of a model no room together.
        self._seats = self._reserve(waiting)
        together = (GENERATE.role, POLICY) if is_hybrid else ()
        hosts = self._hybrids(together)
        for role, demand in self._demands.items():
            names = [f"{demand.role}-{i}" for i in range(demand.count)]
            if role in together:
                actors = [Part(host, demand.role) for host in hosts]
                self.actors.update(zip(names, actors, strict=True))
            else:
                actors = [
                    self._hire(name, demand, self._seat(demand, i)) for i, name in enumerate(names)
                ]
            self.roles[role] = RoleActors(demand.calls, names, actors)

    def _reserve(self, waiting: Callable[[str], None]) -> Seats | OwnSeats:
        """The slots that are had together, or not at all."""
        config = self._config
        if not config.placement.shared:
            trained = {role: self._demands[role] for role in config.dataflow.trained}
            others = [demand for role, demand in self._demands.items() if role not in trained]
            with room_for_large(others, node=self._node, waiting=waiting):
                return OwnSeats(trained, node=self._node, waiting=waiting)
        return Seats(
            placement_of(config),
            is_hybrid=config.placement.is_hybrid,
            on_gpu={role for role, demand in self._demands.items() if demand.gpus},
            waiting=waiting,
        )

    def _hybrids(self, roles: Sequence[str]) -> list[Any]:
        """The processes that host these roles together, one for each rank of the trainer."""
        if not roles:
            return []
        demand = self._demands[POLICY]
        env: dict[str, str] = {}
        for role in roles:
            call = self._demands[role].calls[0]
            env |= _worker_env(self._config, call, on_gpu=self._on_gpu)
        env |= level_env(GENERATOR)
        runtime_env = {"env_vars": env}
        leaders = self._leaders
        return [
            ray.remote(HybridActor)
            .options(**self._seat(demand, i), runtime_env=runtime_env)
            .remote(i in leaders)
            for i in range(demand.count)
        ]

    @property
    def _leaders(self) -> set[int]:
        """The ranks whose processes sample, where generators live in those of the trainer."""
        config = self._config
        return {ranks[0] for ranks in teams_of(config.trainer, config.generator.tensor_parallel)}

    @property
    def cast(self) -> list[RoleActors]:
        """The roles as the stream sees them: of a generator that ranks share, who leads it."""
        found = dict(self.roles)
        if self._config.placement.is_hybrid:
            own, leaders = found[GENERATE.role], sorted(self._leaders)
            names, actors = ([each[i] for i in leaders] for each in (own.names, own.actors))
            found[GENERATE.role] = RoleActors(own.calls, names, actors)
        return list(found.values())

    def _seat(self, demand: Demand, index: int) -> dict[str, Any]:
        """What Ray is asked for, for one of the actors a run begins with."""
        role = demand.calls[0].role
        if self._seats is not None and role in self._seats:
            return self._seats.options(role, index)
        return self._place(demand)

    def _place(self, demand: Demand) -> dict[str, Any]:
        """What Ray is asked for, for an actor that takes a place by itself."""
        found: dict[str, Any] = {"num_cpus": demand.cpus, "num_gpus": demand.gpus}
        if self._stays(demand):
            # Also when it is started again, or hired once there are other nodes.
            found["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node, soft=False)
        return found

    def process_of(self, name: str) -> str:
        """What an actor's process is called: by all that live in it, as they die together."""
        actor = self.actors[name]
        if not isinstance(actor, Part):
            return name
        parts = {n: own for n, own in self.actors.items() if isinstance(own, Part)}
        return " and ".join(n for n, own in parts.items() if own.actor is actor.actor)

    @property
    def processes(self) -> dict[str, Any]:
        """An actor in each process of the run, by what `process_of` calls it.

        Those that join or leave are not among them: they may have no process.
        """
        serving = tuple(f"{demand.role}-" for demand in self._demands.values())
        there = [name for name in self.actors if not name.startswith(serving)]
        there += [name for role in self.roles.values() for name in role.names]
        return {self.process_of(name): _host(self.actors[name]) for name in there}

    def start(self, wiring: Wiring, checkpoint: Checkpoint | None) -> dict[Any, str]:
        """Let the actors of all roles start: their replies, and whose each is."""
        self._wiring = wiring
        replies = {}
        for role in self.roles.values():
            arguments: tuple[Any, ...] = (role.calls,)
            if role.kind is Kind.TRAIN:
                name, (call,) = role.names[0], role.calls
                # The first call of a process, which has to import its libraries for it.
                reply = role.actors[0].rendezvous.remote()
                place = fetch(reply, f"{name}.rendezvous", self._config.generator.start_timeout_s)
                meeting = Meeting(call, name.rpartition("-")[0], *place)
                saved = checkpoint.dirs(call.role)[1].absolute() if checkpoint else None
                arguments = (meeting, saved)
            for i, (actor, name) in enumerate(zip(role.actors, role.names, strict=True)):
                replies[actor.start.remote(wiring, i, *arguments)] = name
                if role.kind in RETURNING and not isinstance(actor, Part):
                    self._note_start(name, i, role)
        return replies

    # Replicas that come and go.

    def check_room(self, counts: Mapping[str, int]) -> None:
        """Raise ConfigError if there will never be room for so many replicas of these roles.

        Where the run has Ray for itself, its CPU slots are those of its beginning and mean nothing.
        """
        have = ray.cluster_resources()
        own = not self._config.placement.address
        cpus = float("inf") if own else have.get("CPU", 0)
        memory = psutil.virtual_memory().total / GIB if own else float("inf")
        wanted = [
            replace(
                demand,
                key="now and on request",
                count=counts.get(role, len(self.roles[role].names)),
            )
            for role, demand in self._demands.items()
        ]
        check_fits(wanted, Capacity(cpus, have.get("GPU", 0), memory))

    def hire(self, role: str) -> tuple[str, Any]:
        """Make one more actor of a role under the first free number: its name, and the reply that
        comes once it has a place."""
        demand = self._demands[role]
        name = next(n for i in range(1 << 20) if (n := f"{demand.role}-{i}") not in self.actors)
        # Its own Ray has as many slots as the run began with, which says nothing of its cores.
        cpus = demand.cpus if self._config.placement.address else 0
        actor = self._hire(name, demand, {**self._place(demand), "num_cpus": cpus})
        return name, actor.__ray_ready__.remote()

    def asks_for(self, role: str) -> str:
        """What one replica asks of Ray, and what is free just now."""
        demand, free = self._demands[role], ray.available_resources()
        asked = _counted(demand.cpus, "CPU slot")
        asked += f" and {_counted(demand.gpus, 'GPU')}" if demand.gpus else ""
        if self._stays(demand):
            asked += " on the node whose memory weights travel through"
        has = f"{free.get('CPU', 0):g} CPU slots"
        has += f" and {free.get('GPU', 0):g} GPUs" if demand.gpus else ""
        return f"asks for {asked}; {has} are free"

    def begin(self, name: str, role: str) -> Any:
        """Let a hired actor start; the reply to it."""
        assert self._wiring is not None
        number, calls = int(name.rpartition("-")[2]), self.roles[role].calls
        self._note_start(name, number, self.roles[role])
        return self.actors[name].start.remote(self._wiring, number, calls)

    def enlist(self, name: str, role: str) -> tuple[Any, Any]:
        """A hired actor has started and is one of the others from here on.

        Returns the reply of its loops, and one that says which version it serves once it does.
        """
        actor = self.actors[name]
        self.roles[role].join(name, actor)
        self._tell("joined", role, name, actor)
        return actor.run.remote(), actor.serving.remote()

    def send_off(self, name: str, role: str) -> None:
        """Ask nothing more of an actor, and have it end its loops."""
        self.roles[role].leave(name)
        self._tell("leaving", role, name)
        self.actors[name].leave.remote()

    def part_with(self, name: str) -> None:
        """End an actor that was sent off; what it has not handed back is free."""
        self.dismiss(name)
        self._tell("left", name)

    def take_back(self, name: str, role: str) -> None:
        """End an actor that was enlisted and does not do."""
        self.roles[role].leave(name)
        self._tell("leaving", role, name)
        self.part_with(name)

    @staticmethod
    def answer(reply: Any, name: str) -> Any:
        """What an actor answered. Raises what it raised, and ActorLostError if it died over it."""
        return fetch(reply, name)

    def _tell(self, method: str, *arguments: Any) -> None:
        reply = getattr(self.actors["coordinator"], method).remote(*arguments)
        fetch(reply, f"coordinator.{method}")

    def dismiss(self, name: str) -> None:
        """End one actor for good."""
        self.comebacks.forget(name)
        _kill(self.actors.pop(name))

    # Those that die.

    def watch_over(self, shards: Sequence[RemoteShard]) -> dict[Any, str]:
        """Begin to hear of the ends of shards; the replies that tell, and whose each is."""
        for shard in shards:
            if shard.returns:
                again = shard.actor.ready.options(max_task_retries=-1)
                self.comebacks.note(shard.name, again.remote, most=SHARD_RESTARTS)
        return {shard.actor.run.remote(): shard.name for shard in shards}

    def fail(self, name: str) -> None:
        """End the process of an actor that lives; Ray starts it again."""
        with contextlib.suppress(ActorLostError):
            fetch(self.actors[name].fail.remote(), f"{name}.fail")

    def node_of(self, role: str) -> str:
        """The node of a role's first actor, which has been started."""
        reply = self.roles[role].actors[0].node.remote()
        return str(fetch(reply, f"{role}.node"))

    def close(self) -> None:
        """End every actor; what they had in memory is gone."""
        for actor in self.actors.values():
            _kill(actor)
        if self._seats is not None:
            self._seats.close()

    def _hire(self, name: str, demand: Demand, place: Mapping[str, Any]) -> Any:
        call = demand.calls[0]
        env = {"env_vars": _worker_env(self._config, call, on_gpu=self._on_gpu)}
        options = {**place, "runtime_env": env}
        if call.kind in RETURNING:
            options["max_restarts"] = self._config.run.max_restarts
        return self.create(name, HOSTS[call.kind], options=options)

    def _stays(self, demand: Demand) -> bool:
        """Whether these actors have to be where weights travel."""
        return bool(self._node) and any(c.follows or c.kind is Kind.TRAIN for c in demand.calls)

    def _note_start(self, name: str, number: int, role: RoleActors) -> None:
        # Waits for the new process, and dies with it like the first call.
        again = self.actors[name].start.options(max_task_retries=-1)
        self.comebacks.note(name, partial(again.remote, self._wiring, number, role.calls))


def _worker_env(config: RunConfig, call: Call, *, on_gpu: bool) -> dict[str, str]:
    """Return what a process must have in its environment before it imports its engine."""
    common = {**STAGE_ENV, **trusted_env(*config.trusted_models)}
    if call.kind is Kind.GENERATE:
        env = generation_env("cuda" if on_gpu else "cpu", threads=config.generator.threads)
        return {**common, **env, **level_env(GENERATOR)}
    if call.kind is Kind.TRAIN:
        env = {"OMP_NUM_THREADS": str(config.trainer_of(call.role).threads)}
        env |= {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
        return {**common, **env, **level_env(TRAINER)}
    has_model = bool(call.follows) or call.role == REFERENCE.role
    return {**common, **level_env(MODELS if has_model else BASE)}


def _host(actor: Any) -> Any:
    return actor.actor if isinstance(actor, Part) else actor


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(_host(actor))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"
