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

from streamrl.actors.actor_context import ActorContext
from streamrl.actors.colocated import HybridActor, HybridActorHandle
from streamrl.actors.coordination.step_reporter import RoleActors
from streamrl.actors.generator import GeneratorActor
from streamrl.actors.launch.fork_server import (
    BASE_LEVEL,
    GENERATOR_LEVEL,
    MODELS_LEVEL,
    STAGE_ENV,
    TRAINER_LEVEL,
    make_level_env,
)
from streamrl.actors.launch.placement_groups import (
    DedicatedSlots,
    SharedSlots,
    reserve_large_bundles,
)
from streamrl.actors.launch.ray_cluster import GIB
from streamrl.actors.queue_shard import MAX_SHARD_RESTARTS as SHARD_RESTARTS
from streamrl.actors.scorer import ScorerActor
from streamrl.actors.trainer import RendezvousInfo, TrainerActor
from streamrl.actors.transport.ray_calls import fetch_reply
from streamrl.actors.transport.shard_proxy import RemoteShard
from streamrl.config import RunConfig
from streamrl.config.preflight import PreparedRun, list_resource_demands
from streamrl.config.role_counts import assign_slots
from streamrl.dataflow import GENERATE_CALL, POLICY, REFERENCE_CALL, CallKind, ModelCall
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.rank_groups import assign_rank_groups
from streamrl.errors import ActorLostError
from streamrl.files.hf_config import make_trusted_env
from streamrl.placement import ClusterCapacity, ResourceDemand, check_fits
from streamrl.run_dir.checkpoint import Checkpoint

RESTARTABLE_KINDS = (CallKind.GENERATE, CallKind.SCORE)
"""Kinds of stages whose actors are started again when they die: they hold nothing that is lost."""
ACTOR_CLASSES = {
    CallKind.GENERATE: GeneratorActor,
    CallKind.SCORE: ScorerActor,
    CallKind.TRAIN: TrainerActor,
}


class RestartPolicy:
    """The actors whose processes Ray starts again, how often it may, and what they load then."""

    def __init__(self, most: int) -> None:
        """`most` times each, unless something else is said."""
        self._max_restarts = most
        self._max_restarts_by_actor: dict[str, int] = {}
        self._start_calls: dict[str, Callable[[], Any]] = {}
        self._num_deaths: Counter[str] = Counter()

    def register_actor(
        self, name: str, start: Callable[[], Any], *, most: int | None = None
    ) -> None:
        """What the new process of an actor is called with; it waits for the process."""
        self._start_calls[name] = start
        self._max_restarts_by_actor[name] = self._max_restarts if most is None else most

    def forget_actor(self, name: str) -> None:
        """The actor is no more."""
        self._start_calls.pop(name, None)
        self._num_deaths.pop(name, None)

    def is_restartable(self, name: str) -> bool:
        """Whether the process of an actor is one that Ray starts again."""
        return name in self._start_calls

    def select_irreplaceable(self, processes: Mapping[str, Any]) -> dict[str, Any]:
        """Those of these processes that Ray does not start again."""
        return {name: one for name, one in processes.items() if not self.is_restartable(name)}

    def can_restart(self, name: str) -> bool:
        """Whether it does so when that dies once more."""
        return (
            name in self._start_calls and self._num_deaths[name] < self._max_restarts_by_actor[name]
        )

    def restart_actor(self, name: str) -> Any:
        """Have the new process of an actor load what the dead one had; the reply."""
        self._num_deaths[name] += 1
        return self._start_calls[name]()


class ActorRegistry:
    """Every actor of a run; replicas of the roles that serve may be hired and dismissed."""

    def __init__(self, config: RunConfig, prepared: PreparedRun, *, on_gpu: bool) -> None:
        self._config = config
        self._on_gpu = on_gpu
        self._demands = {
            d.calls[0].role: d for d in list_resource_demands(config, prepared, on_gpu) if d.calls
        }
        self._placement_slots: SharedSlots | DedicatedSlots | None = None
        self._weights_node = ""
        self.restarts = RestartPolicy(config.run.max_restarts)
        self._context: ActorContext | None = None
        self.actors: dict[str, Any] = {}
        self.roles: dict[str, RoleActors] = {}

    def create_actor(
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
    def demands(self) -> list[ResourceDemand]:
        """What all roles ask for as the run begins."""
        return list(self._demands.values())

    def create_roles(self, node: str, waiting: Callable[[str], None]) -> None:
        """Make the actors of all roles; where weights travel, only on `node` if one is named.

        `waiting` is told what is waited for. Raises ConfigError if slots to share, or those of the
        ranks of a model, are not free.
        """
        self._weights_node = node
        is_hybrid = self._config.placement.is_hybrid
        # Before all others: who comes one by one could leave the ranks of a model no room together.
        self._placement_slots = self._reserve_slots(waiting)
        together = (GENERATE_CALL.role, POLICY) if is_hybrid else ()
        hosts = self._create_hybrid_actors(together)
        for role, demand in self._demands.items():
            names = [f"{demand.role}-{i}" for i in range(demand.count)]
            if role in together:
                actors = [HybridActorHandle(host, demand.role) for host in hosts]
                self.actors.update(zip(names, actors, strict=True))
            else:
                actors = [
                    self._create_role_actor(name, demand, self._make_slot_options(demand, i))
                    for i, name in enumerate(names)
                ]
            self.roles[role] = RoleActors(demand.calls, names, actors)

    def _reserve_slots(self, waiting: Callable[[str], None]) -> SharedSlots | DedicatedSlots:
        """The slots that are had together, or not at all."""
        config = self._config
        if not config.placement.shared_pools:
            trained = {role: self._demands[role] for role in config.dataflow.trained_roles}
            others = [demand for role, demand in self._demands.items() if role not in trained]
            with reserve_large_bundles(others, node=self._weights_node, waiting=waiting):
                return DedicatedSlots(trained, node=self._weights_node, waiting=waiting)
        return SharedSlots(
            assign_slots(config),
            is_hybrid=config.placement.is_hybrid,
            on_gpu={role for role, demand in self._demands.items() if demand.gpus},
            waiting=waiting,
        )

    def _create_hybrid_actors(self, roles: Sequence[str]) -> list[Any]:
        """The processes that host these roles together, one for each rank of the trainer."""
        if not roles:
            return []
        demand = self._demands[POLICY]
        env: dict[str, str] = {}
        for role in roles:
            call = self._demands[role].calls[0]
            env |= _make_worker_env(self._config, call, on_gpu=self._on_gpu)
        env |= make_level_env(GENERATOR_LEVEL)
        runtime_env = {"env_vars": env}
        leaders = self._leader_ranks
        return [
            ray.remote(HybridActor)
            .options(**self._make_slot_options(demand, i), runtime_env=runtime_env)
            .remote(i in leaders)
            for i in range(demand.count)
        ]

    @property
    def _leader_ranks(self) -> set[int]:
        """The ranks whose processes sample, where generators live in those of the trainer."""
        config = self._config
        return {
            ranks[0]
            for ranks in assign_rank_groups(config.trainer, config.generator.tensor_parallel)
        }

    @property
    def stream_roles(self) -> list[RoleActors]:
        """The roles as the stream sees them: of a generator that ranks share, who leads it."""
        found = dict(self.roles)
        if self._config.placement.is_hybrid:
            own, leaders = found[GENERATE_CALL.role], sorted(self._leader_ranks)
            names, actors = ([each[i] for i in leaders] for each in (own.names, own.actors))
            found[GENERATE_CALL.role] = RoleActors(own.calls, names, actors)
        return list(found.values())

    def _make_slot_options(self, demand: ResourceDemand, index: int) -> dict[str, Any]:
        """What Ray is asked for, for one of the actors a run begins with."""
        role = demand.calls[0].role
        if self._placement_slots is not None and role in self._placement_slots:
            return self._placement_slots.make_actor_options(role, index)
        return self._make_node_options(demand)

    def _make_node_options(self, demand: ResourceDemand) -> dict[str, Any]:
        """What Ray is asked for, for an actor that takes a place by itself."""
        found: dict[str, Any] = {"num_cpus": demand.cpus, "num_gpus": demand.gpus}
        if self._is_node_bound(demand):
            # Also when it is started again, or hired once there are other nodes.
            found["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                self._weights_node, soft=False
            )
        return found

    def get_process_name(self, name: str) -> str:
        """What an actor's process is called: by all that live in it, as they die together."""
        actor = self.actors[name]
        if not isinstance(actor, HybridActorHandle):
            return name
        parts = {n: own for n, own in self.actors.items() if isinstance(own, HybridActorHandle)}
        return " and ".join(n for n, own in parts.items() if own.actor is actor.actor)

    @property
    def processes(self) -> dict[str, Any]:
        """An actor in each process of the run, by what `get_process_name` calls it.

        Those that join or leave are not among them: they may have no process.
        """
        serving = tuple(f"{demand.role}-" for demand in self._demands.values())
        there = [name for name in self.actors if not name.startswith(serving)]
        there += [name for role in self.roles.values() for name in role.names]
        return {self.get_process_name(name): _unwrap_handle(self.actors[name]) for name in there}

    def start_actors(self, wiring: ActorContext, checkpoint: Checkpoint | None) -> dict[Any, str]:
        """Let the actors of all roles start: their replies, and whose each is."""
        self._context = wiring
        replies = {}
        for role in self.roles.values():
            arguments: tuple[Any, ...] = (role.calls,)
            if role.kind is CallKind.TRAIN:
                name, (call,) = role.names[0], role.calls
                # The first call of a process, which has to import its libraries for it.
                reply = role.actors[0].find_rendezvous.remote()
                place = fetch_reply(
                    reply, f"{name}.rendezvous", self._config.generator.start_timeout_s
                )
                meeting = RendezvousInfo(call, name.rpartition("-")[0], *place)
                saved = checkpoint.get_role_dirs(call.role)[1].absolute() if checkpoint else None
                arguments = (meeting, saved)
            for i, (actor, name) in enumerate(zip(role.actors, role.names, strict=True)):
                replies[actor.start.remote(wiring, i, *arguments)] = name
                if role.kind in RESTARTABLE_KINDS and not isinstance(actor, HybridActorHandle):
                    self._register_restart(name, i, role)
        return replies

    # Replicas that come and go.

    def check_capacity(self, counts: Mapping[str, int]) -> None:
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
                setting="now and on request",
                count=counts.get(role, len(self.roles[role].names)),
            )
            for role, demand in self._demands.items()
        ]
        check_fits(wanted, ClusterCapacity(cpus, have.get("GPU", 0), memory))

    def spawn_replica(self, role: str) -> tuple[str, Any]:
        """Make one more actor of a role under the first free number: its name, and the reply that
        comes once it has a place."""
        demand = self._demands[role]
        name = next(n for i in range(1 << 20) if (n := f"{demand.role}-{i}") not in self.actors)
        # Its own Ray has as many slots as the run began with, which says nothing of its cores.
        cpus = demand.cpus if self._config.placement.address else 0
        actor = self._create_role_actor(
            name, demand, {**self._make_node_options(demand), "num_cpus": cpus}
        )
        return name, actor.__ray_ready__.remote()

    def describe_demand(self, role: str) -> str:
        """What one replica asks of Ray, and what is free just now."""
        demand, free = self._demands[role], ray.available_resources()
        asked = _pluralize(demand.cpus, "CPU slot")
        asked += f" and {_pluralize(demand.gpus, 'GPU')}" if demand.gpus else ""
        if self._is_node_bound(demand):
            asked += " on the node whose memory weights travel through"
        has = f"{free.get('CPU', 0):g} CPU slots"
        has += f" and {free.get('GPU', 0):g} GPUs" if demand.gpus else ""
        return f"asks for {asked}; {has} are free"

    def start_replica(self, name: str, role: str) -> Any:
        """Let a hired actor start; the reply to it."""
        assert self._context is not None
        number, calls = int(name.rpartition("-")[2]), self.roles[role].calls
        self._register_restart(name, number, self.roles[role])
        return self.actors[name].start.remote(self._context, number, calls)

    def register_replica(self, name: str, role: str) -> tuple[Any, Any]:
        """A hired actor has started and is one of the others from here on.

        Returns the reply of its loops, and one that says which version it serves once it does.
        """
        actor = self.actors[name]
        self.roles[role].add_replica(name, actor)
        self._notify_coordinator("add_replica", role, name, actor)
        return actor.run.remote(), actor.serving.remote()

    def drain_replica(self, name: str, role: str) -> None:
        """Ask nothing more of an actor, and have it end its loops."""
        self.roles[role].remove_replica(name)
        self._notify_coordinator("start_replica_drain", role, name)
        self.actors[name].leave.remote()

    def remove_replica(self, name: str) -> None:
        """End an actor that was sent off; what it has not handed back is free."""
        self.kill_actor(name)
        self._notify_coordinator("remove_replica", name)

    def reject_replica(self, name: str, role: str) -> None:
        """End an actor that was enlisted and does not do."""
        self.roles[role].remove_replica(name)
        self._notify_coordinator("start_replica_drain", role, name)
        self.remove_replica(name)

    @staticmethod
    def fetch_reply(reply: Any, name: str) -> Any:
        """What an actor answered. Raises what it raised, and ActorLostError if it died over it."""
        return fetch_reply(reply, name)

    def _notify_coordinator(self, method: str, *arguments: Any) -> None:
        reply = getattr(self.actors["coordinator"], method).remote(*arguments)
        fetch_reply(reply, f"coordinator.{method}")

    def kill_actor(self, name: str) -> None:
        """End one actor for good."""
        self.restarts.forget_actor(name)
        _kill_actor(self.actors.pop(name))

    # Those that die.

    def watch_shards(self, shards: Sequence[RemoteShard]) -> dict[Any, str]:
        """Begin to hear of the ends of shards; the replies that tell, and whose each is."""
        for shard in shards:
            if shard.is_restartable:
                again = shard.actor.open_shard.options(max_task_retries=-1)
                self.restarts.register_actor(shard.name, again.remote, most=SHARD_RESTARTS)
        return {shard.actor.run.remote(): shard.name for shard in shards}

    def crash_actor(self, name: str) -> None:
        """End the process of an actor that lives; Ray starts it again."""
        with contextlib.suppress(ActorLostError):
            fetch_reply(self.actors[name].crash_actor.remote(), f"{name}.fail")

    def find_node(self, role: str) -> str:
        """The node of a role's first actor, which has been started."""
        reply = self.roles[role].actors[0].get_node_id.remote()
        return str(fetch_reply(reply, f"{role}.node"))

    def close(self) -> None:
        """End every actor; what they had in memory is gone."""
        for actor in self.actors.values():
            _kill_actor(actor)
        if self._placement_slots is not None:
            self._placement_slots.close()

    def _create_role_actor(
        self, name: str, demand: ResourceDemand, place: Mapping[str, Any]
    ) -> Any:
        call = demand.calls[0]
        env = {"env_vars": _make_worker_env(self._config, call, on_gpu=self._on_gpu)}
        options = {**place, "runtime_env": env}
        if call.kind in RESTARTABLE_KINDS:
            options["max_restarts"] = self._config.run.max_restarts
        return self.create_actor(name, ACTOR_CLASSES[call.kind], options=options)

    def _is_node_bound(self, demand: ResourceDemand) -> bool:
        """Whether these actors have to be where weights travel."""
        return bool(self._weights_node) and any(
            c.followed_role or c.kind is CallKind.TRAIN for c in demand.calls
        )

    def _register_restart(self, name: str, number: int, role: RoleActors) -> None:
        # Waits for the new process, and dies with it like the first call.
        again = self.actors[name].start.options(max_task_retries=-1)
        self.restarts.register_actor(name, partial(again.remote, self._context, number, role.calls))


def _make_worker_env(config: RunConfig, call: ModelCall, *, on_gpu: bool) -> dict[str, str]:
    """Return what a process must have in its environment before it imports its engine."""
    common = {**STAGE_ENV, **make_trusted_env(*config.trusted_models)}
    if call.kind is CallKind.GENERATE:
        env = make_vllm_env("cuda" if on_gpu else "cpu", threads=config.generator.threads)
        return {**common, **env, **make_level_env(GENERATOR_LEVEL)}
    if call.kind is CallKind.TRAIN:
        env = {"OMP_NUM_THREADS": str(config.get_trainer_config(call.role).threads)}
        env |= {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
        return {**common, **env, **make_level_env(TRAINER_LEVEL)}
    has_model = bool(call.followed_role) or call.role == REFERENCE_CALL.role
    return {**common, **make_level_env(MODELS_LEVEL if has_model else BASE_LEVEL)}


def _unwrap_handle(actor: Any) -> Any:
    return actor.actor if isinstance(actor, HybridActorHandle) else actor


def _kill_actor(actor: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(_unwrap_handle(actor))


def _pluralize(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"
