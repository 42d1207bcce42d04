"""Registry of a run's actors: creates, starts, restarts and kills them by name."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streamrl.actors.actor_context import ActorContext
from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.generator import GeneratorActor, HybridActor, HybridActorHandle
from streamrl.actors.launch.fork_server import (
    BASE_LEVEL,
    GENERATOR_LEVEL,
    MODELS_LEVEL,
    STAGE_ENV,
    TRAINER_LEVEL,
    make_level_env,
)
from streamrl.actors.launch.placement_groups import (
    ReservedSlots,
    reserve_large_bundles,
    reserve_rank_slots,
    reserve_shared_slots,
)
from streamrl.actors.launch.ray_cluster import GIB
from streamrl.actors.queue_shard import MAX_SHARD_RESTARTS, RemoteShard
from streamrl.actors.scoring_ranks import ModelScorerActor, RewardActor
from streamrl.actors.trainer import TrainerActor
from streamrl.actors.transport.ray_calls import fetch_reply
from streamrl.config.preflight import PreparedRun, list_resource_demands
from streamrl.config.role_counts import assign_slots, count_ranks_per_replica
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import GENERATE_CALL, POLICY, SERVING_ROLES, CallKind, ModelCall
from streamrl.distributed.devices import NCCL_ENV, make_device_env
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.rank_groups import assign_rank_groups
from streamrl.errors import ActorLostError
from streamrl.files.hf_config import make_trusted_env
from streamrl.placement.resource_demand import ClusterCapacity, ResourceDemand, check_fits
from streamrl.run_dir.checkpoint import Checkpoint, get_role_dirs
from streamrl.weights.config import RUN_TOKEN_ENV


def make_worker_env(config: RunConfig, call: ModelCall, *, on_gpu: bool) -> dict[str, str]:
    """Return the environment variables of an actor that serves a model call."""
    shared_env = {**STAGE_ENV, **make_trusted_env(*config.trusted_models)}
    shared_env |= make_device_env(on_gpu=on_gpu) | (NCCL_ENV if on_gpu else {})
    if call.kind is CallKind.GENERATE:
        env = make_vllm_env("cuda" if on_gpu else "cpu", threads=config.generator.threads)
        return {**shared_env, **env, **make_level_env(GENERATOR_LEVEL)}
    if call.kind is CallKind.TRAIN:
        env = {"OMP_NUM_THREADS": str(config.get_trainer_config(call.role).threads or 1)}
        env |= {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
        return {**shared_env, **env, **make_level_env(TRAINER_LEVEL)}
    level = BASE_LEVEL if SERVING_ROLES[call.role].is_reward else MODELS_LEVEL
    return {**shared_env, **make_level_env(level)}


def make_hybrid_env(config: RunConfig, *, on_gpu: bool) -> dict[str, str]:
    """Return the environment variables of a process that trains the policy and generates."""
    env: dict[str, str] = {}
    for role in (GENERATE_CALL.role, POLICY):
        env |= make_worker_env(config, config.dataflow.calls_by_role[role][0], on_gpu=on_gpu)
    return env | make_level_env(GENERATOR_LEVEL)


RESTARTABLE_KINDS = (CallKind.GENERATE, CallKind.SCORE)
"""Stages whose actors Ray restarts after a death: their state is in the queue."""


def get_actor_class(call: ModelCall) -> Any:
    """Return the class of the actors that serve a model call."""
    if call.kind is CallKind.SCORE:
        return RewardActor if SERVING_ROLES[call.role].is_reward else ModelScorerActor
    return GeneratorActor if call.kind is CallKind.GENERATE else TrainerActor


@dataclass
class ActorRestarts:
    """Restarts that Ray makes of an actor: their limit, the deaths so far, and what follows one.

    start: sends the call that initializes the restarted process, once that process exists.
    setting: config key of the limit; empty without one.
    """

    start: Callable[[], Any]
    limit: int
    setting: str = ""
    num_deaths: int = 0

    @property
    def can_restart(self) -> bool:
        return self.num_deaths < self.limit

    def restart(self) -> Any:
        """Count a death and initialize the restarted process; return the pending reply."""
        self.num_deaths += 1
        return self.start()

    def describe(self, name: str, *, has_died_again: bool = False) -> str:
        """Describe how often the actor was restarted, as the end of an error; empty if never.

        has_died_again: it died in its restart, which Ray then repeats until the limit.
        """
        number = self.limit if has_died_again else self.num_deaths
        rule = f" ({self.setting})" if self.setting else ""
        return f"; {name} was restarted {number} of {self.limit} times{rule}" if number else ""


class ActorRegistry:
    """All actors of a run by name. Serving replicas may be added and removed during the run."""

    def __init__(self, config: RunConfig, prepared: PreparedRun, *, on_gpu: bool) -> None:
        self._config = config
        self._on_gpu = on_gpu
        #: Distinguishes the shared memory of this run on a machine; that of its transport.
        self.token = ""
        self._demands = {
            d.calls[0].role: d for d in list_resource_demands(config, prepared, on_gpu) if d.calls
        }
        self._reserved_slots = ReservedSlots()
        self._weights_node = ""
        #: Actors that Ray restarts.
        self.restarts: dict[str, ActorRestarts] = {}
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
        """Create a Ray actor under a name; it reserves no CPU unless `options` say so."""
        # Not a decorator of the class: ray.remote draws an id, see fork_server._draws_unique_ids.
        actor = (
            ray.remote(actor_class).options(**{"num_cpus": 0, **(options or {})}).remote(*arguments)
        )
        self.actors[name] = actor
        return actor

    def create_roles(self, node: str, waiting: Callable[[str], None]) -> None:
        """Reserve devices and create the actors of all roles.

        node: node id on which all actors that publish or follow weights must run; empty for any
        node.
        waiting: receives a status line while the devices are not free.

        Raises ConfigError if the devices do not become free in time.
        """
        self._weights_node = node
        is_hybrid = self._config.placement.is_hybrid
        # Before any actor: individually placed actors could fragment the room of a model's ranks.
        self._reserved_slots = self._reserve_slots(waiting)
        hybrid_roles = (GENERATE_CALL.role, POLICY) if is_hybrid else ()
        hosts = self._create_hybrid_actors() if is_hybrid else []
        for role, demand in self._demands.items():
            # The leader of a model's ranks creates the actors of the others.
            ranks = count_ranks_per_replica(self._config, role)
            names = [f"{demand.role}-{i}" for i in range(demand.count // ranks)]
            if role in hybrid_roles:
                actors = [HybridActorHandle(host, demand.role) for host in hosts]
                self.actors.update(zip(names, actors, strict=True))
            else:
                actors = [
                    self._create_role_actor(
                        name, demand, self._make_slot_options(demand, i * ranks)
                    )
                    for i, name in enumerate(names)
                ]
            self.roles[role] = RoleActors(demand.calls, names, actors)

    def _reserve_slots(self, waiting: Callable[[str], None]) -> ReservedSlots:
        config = self._config
        if not config.placement.shared_pools:
            trained = {role: self._demands[role] for role in config.dataflow.trained_roles}
            others = [demand for role, demand in self._demands.items() if role not in trained]
            with reserve_large_bundles(others, node=self._weights_node, waiting=waiting):
                return reserve_rank_slots(trained, node=self._weights_node, waiting=waiting)
        return reserve_shared_slots(
            assign_slots(config),
            is_hybrid=config.placement.is_hybrid,
            on_gpu={role for role, demand in self._demands.items() if demand.gpus},
            waiting=waiting,
        )

    def _create_hybrid_actors(self) -> list[Any]:
        """Create a HybridActor per policy rank, which hosts trainer and generator."""
        demand = self._demands[POLICY]
        variables = make_hybrid_env(self._config, on_gpu=self._on_gpu)
        runtime_env = {"env_vars": {**variables, RUN_TOKEN_ENV: self.token}}
        leaders = self._leader_ranks
        return [
            ray.remote(HybridActor)
            .options(**self._make_slot_options(demand, i), runtime_env=runtime_env)
            .remote(i in leaders)
            for i in range(demand.count)
        ]

    @property
    def _leader_ranks(self) -> set[int]:
        """Trainer ranks whose process leads a generator; the others compute for a leader."""
        config = self._config
        return {
            ranks[0]
            for ranks in assign_rank_groups(config.trainer, config.generator.tensor_parallel)
        }

    @property
    def stream_roles(self) -> list[RoleActors]:
        """Actors of all roles that the coordinator calls.

        Of a generator that spans several processes, only the leader is included.
        """
        roles = dict(self.roles)
        if self._config.placement.is_hybrid:
            generators, leaders = roles[GENERATE_CALL.role], sorted(self._leader_ranks)
            names, actors = (
                [items[i] for i in leaders] for items in (generators.names, generators.actors)
            )
            roles[GENERATE_CALL.role] = RoleActors(generators.calls, names, actors)
        return list(roles.values())

    def _make_slot_options(self, demand: ResourceDemand, index: int) -> dict[str, Any]:
        """Return the Ray options that place actor `index` of a demand, in a slot if reserved."""
        options = self._reserved_slots.options.get(demand.calls[0].role, ())
        return options[index] if index < len(options) else self._make_node_options(demand, index)

    def _make_node_options(self, demand: ResourceDemand, index: int) -> dict[str, Any]:
        """Return the Ray options of actor `index` of a demand, without a slot.

        An actor that publishes or follows weights is bound to the weights' node, if set.
        """
        # A local instance has CPU slots for the initial actors only, whatever the machine's cores.
        has_slot = index < demand.count or self._config.placement.address
        options: dict[str, Any] = {"num_cpus": demand.cpus if has_slot else 0}
        options["num_gpus"] = demand.gpus
        if self._is_node_bound(demand):
            # Binds restarts and added replicas too, even if the cluster has grown.
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                self._weights_node, soft=False
            )
        return options

    def get_process_name(self, name: str) -> str:
        """Return the name of an actor's process: the names of all actors in the process, joined.

        Actors of a process die together.
        """
        process = _unwrap_handle(self.actors[name])
        hosted = (n for n, actor in self.actors.items() if _unwrap_handle(actor) is process)
        return " and ".join(hosted)

    @property
    def processes(self) -> dict[str, Any]:
        """Processes of the run by name, each represented by an actor in the process.

        Excludes replicas that are joining or leaving, which may have no process.
        """
        serving_prefixes = tuple(f"{demand.role}-" for demand in self._demands.values())
        names = [name for name in self.actors if not name.startswith(serving_prefixes)]
        names += [name for role in self.roles.values() for name in role.names]
        return {self.get_process_name(name): _unwrap_handle(self.actors[name]) for name in names}

    @property
    def irreplaceable(self) -> dict[str, Any]:
        """Processes that Ray cannot restart, by name."""
        return {name: p for name, p in self.processes.items() if name not in self.restarts}

    def start_actors(self, context: ActorContext, checkpoint: Checkpoint | None) -> dict[Any, str]:
        """Send `start` to the actors of all roles; return the pending replies with the actor names.

        checkpoint: checkpoint from which trainers load their state; None for a new run.
        """
        self._context = context
        replies = {}
        for role in self.roles.values():
            arguments: tuple[Any, ...] = (role.calls,)
            if role.kind is CallKind.TRAIN:
                # Long timeout: the first call of a process waits for its imports.
                rendezvous = fetch_reply(
                    role.actors[0].find_rendezvous.remote(),
                    f"{role.names[0]}.find_rendezvous",
                    self._config.generator.start_timeout_s,
                )
                training_state_dir = (
                    get_role_dirs(checkpoint.path, role.role)[1].absolute() if checkpoint else None
                )
                arguments = (role.names, role.calls, rendezvous, training_state_dir)
            for i, (actor, name) in enumerate(zip(role.actors, role.names, strict=True)):
                if role.kind is CallKind.TRAIN or isinstance(actor, HybridActorHandle):
                    replies[actor.start.remote(context, i, *arguments)] = name
                else:
                    replies[self.start_replica(name, role.role)] = name
        return replies

    def _make_start_arguments(self, role: RoleActors, replica: int) -> tuple[Any, ...]:
        """Return the arguments of `start` of a replica: its calls, and options of other ranks."""
        ranks = count_ranks_per_replica(self._config, role.role)
        if ranks == 1:
            return (role.calls,)
        demand = self._demands[role.role]
        return role.calls, [
            self._make_actor_options(demand, self._make_slot_options(demand, replica * ranks + i))
            for i in range(1, ranks)
        ]

    # Scaling.

    def check_capacity(self, counts: Mapping[str, int]) -> None:
        """Raise ConfigError if the cluster is too small for these numbers of replicas by role.

        A local Ray instance is checked for memory instead of CPU slots, since its CPU slots only
        cover the initial actors.
        """
        resources = ray.cluster_resources()
        is_local = not self._config.placement.address
        cpus = float("inf") if is_local else resources.get("CPU", 0)
        memory = psutil.virtual_memory().total / GIB if is_local else float("inf")
        demands = [
            replace(
                demand,
                setting="now and on request",
                count=counts.get(role, len(self.roles[role].names))
                * count_ranks_per_replica(self._config, role),
            )
            for role, demand in self._demands.items()
        ]
        check_fits(demands, ClusterCapacity(cpus, resources.get("GPU", 0), memory))

    def spawn_replica(self, role: str) -> tuple[str, Any]:
        """Create the actor of a new replica, named by the first free index of its role.

        Returns the name, and a reply that arrives once Ray has placed the actor.
        """
        demand = self._demands[role]
        name = next(n for i in range(1 << 20) if (n := f"{demand.role}-{i}") not in self.actors)
        options = self._make_node_options(demand, demand.count)
        actor = self._create_role_actor(name, demand, options)
        return name, actor.__ray_ready__.remote()

    def describe_demand(self, role: str) -> str:
        """Return text for an error: resources that a replica needs and those that are free."""
        demand, free = self._demands[role], ray.available_resources()
        where = " on the node whose memory weights travel through"
        return (
            f"asks for {demand.cpus} CPU slots and {demand.gpus} GPUs"
            f"{where if self._is_node_bound(demand) else ''};"
            f" {free.get('CPU', 0):g} and {free.get('GPU', 0):g} are free"
        )

    def start_replica(self, name: str, role: str) -> Any:
        """Send `start` to a replica, and again after each death; return the pending reply."""
        index, start = int(name.rpartition("-")[2]), self.actors[name].start
        arguments = (self._context, index, *self._make_start_arguments(self.roles[role], index))
        # Retries make the call wait for the restarted process.
        restart = partial(start.options(max_task_retries=-1).remote, *arguments)
        self.restarts[name] = ActorRestarts(
            restart, self._config.run.max_restarts, "run.max_restarts"
        )
        return start.remote(*arguments)

    def register_replica(self, name: str, role: str) -> tuple[Any, Any]:
        """Add a started replica to its role and run its loops.

        Returns two pending replies: that of the loops, and that of the first loaded version.
        """
        actor = self.actors[name]
        self.roles[role].add_replica(name, actor)
        self.notify_coordinator("add_replica", role, name, actor)
        return actor.run.remote(), actor.wait_until_serving.remote()

    def drain_replica(self, name: str, role: str) -> None:
        """Exclude a replica from evaluations and make it return its groups and leave."""
        self.roles[role].remove_replica(name)
        self.notify_coordinator("start_replica_drain", role, name)
        self.actors[name].start_drain.remote()

    def remove_replica(self, name: str) -> None:
        """Kill a replica that has drained; the queue requeues any group it still holds."""
        self.kill_actor(name)
        self.notify_coordinator("release_actor", name, died=False)

    def reject_replica(self, name: str, role: str) -> None:
        """Remove a replica that joined but failed before it served."""
        self.roles[role].remove_replica(name)
        self.notify_coordinator("start_replica_drain", role, name)
        self.remove_replica(name)

    def notify_coordinator(self, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method of the coordinator and wait until it returns."""
        reply = getattr(self.actors["coordinator"], method).remote(*arguments, **named)
        fetch_reply(reply, f"coordinator.{method}")

    def kill_actor(self, name: str) -> None:
        self.restarts.pop(name, None)
        _kill_actor(self.actors.pop(name))

    # Deaths.

    def watch_shards(self, shards: Sequence[RemoteShard]) -> dict[Any, str]:
        """Return pending replies that fail when a shard dies, with the name of the shard."""
        for shard in shards:
            if shard.is_restartable:
                reopen = shard.actor.open_shard.options(max_task_retries=-1)
                self.restarts[shard.name] = ActorRestarts(reopen.remote, MAX_SHARD_RESTARTS)
        return {shard.actor.run.remote(): shard.name for shard in shards}

    def crash_actor(self, name: str) -> None:
        """Make a live actor with bad weights or a bad engine exit, so that Ray restarts it."""
        with contextlib.suppress(ActorLostError):
            fetch_reply(self.actors[name].crash_process.remote(), f"{name}.crash_process")

    def close(self) -> None:
        for actor in self.actors.values():
            _kill_actor(actor)
        self._reserved_slots.close()

    def _create_role_actor(
        self, name: str, demand: ResourceDemand, placement_options: Mapping[str, Any]
    ) -> Any:
        call = demand.calls[0]
        options = self._make_actor_options(demand, placement_options)
        if call.kind in RESTARTABLE_KINDS:
            options["max_restarts"] = self._config.run.max_restarts
        return self.create_actor(name, get_actor_class(call), options=options)

    def _make_actor_options(
        self, demand: ResourceDemand, placement_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the Ray options of an actor: its place and its environment variables."""
        variables = make_worker_env(self._config, demand.calls[0], on_gpu=self._on_gpu)
        variables[RUN_TOKEN_ENV] = self.token
        if self._on_gpu and not demand.gpus:
            # By default, a cluster leaves all GPUs visible to actors that request none.
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return {**placement_options, "runtime_env": {"env_vars": variables}}

    def _is_node_bound(self, demand: ResourceDemand) -> bool:
        """Return whether these actors must run on the node of the weights' shared memory.

        Holds for actors that publish or follow weights, if a node is set.
        """
        return bool(self._weights_node) and any(
            call.followed_role or call.kind is CallKind.TRAIN for call in demand.calls
        )


def _unwrap_handle(actor: Any) -> Any:
    """Return the Ray actor behind a handle of a hybrid actor's role."""
    return actor.actor if isinstance(actor, HybridActorHandle) else actor


def _kill_actor(actor: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(_unwrap_handle(actor))
