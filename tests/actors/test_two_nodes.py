"""Two Ray nodes on one machine: queue and weights span both, or weights bind actors to a node."""

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streamrl.actors.launch.actor_registry import ActorRegistry
from streamrl.actors.launch.fork_server import TOKEN_AUTH_ENV
from streamrl.actors.launch.local_ray import TOKEN_VARIABLE, override_ray_environment
from streamrl.actors.launch.placement_groups import release_placement_groups, reserve_bundles
from streamrl.actors.launch.ray_cluster import NO_TOKEN_MESSAGE
from streamrl.actors.queue_shard import RemoteShard, create_shards
from streamrl.actors.transport.ray_calls import RAY_ACCESS
from streamrl.algorithms import AlgorithmConfig
from streamrl.buffer import (
    ExperienceQueue,
    QueueConfig,
    ShardCapacity,
    ShardFiles,
    ShardPlan,
    StageSchema,
)
from streamrl.dataflow import POLICY
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.trainer_config import CriticConfig, TrainerConfig
from streamrl.messages import ROLLOUT_COLUMNS, Array, Columns, Prompt
from streamrl.placement.config import PlacementConfig
from streamrl.weights import WeightManifest
from streamrl.weights.config import COLLECTIVE, OBJECT_STORE
from streamrl.weights.transport import TransportSpec
from tests.actors import fakes
from tests.actors.fakes import make_config, make_prepared, make_rollout_columns
from tests.e2e.launched import MARK, marked
from tests.weights import local_transport
from tests.weights.local_transport import Versions

# Workers of the nodes do not have the tests on their path.
for module in (fakes, local_transport, sys.modules[__name__]):
    ray.cloudpickle.register_pickle_by_value(module)

STAGES = {"generate": StageSchema((), ROLLOUT_COLUMNS), "train": StageSchema(ROLLOUT_COLUMNS, ())}
SIZES = {f"0:{i}:0": (100_000 if i < 4 else 10_000 if i < 6 else 50) for i in range(10)}
"""Tokens of each group: a MiB of columns goes through the object store, less in messages."""


def columns_of(uid: str) -> dict[str, Array]:
    """Return the columns of a group; they depend only on its uid."""
    return make_rollout_columns(SIZES[uid], list(uid.encode()))


def digest(columns: Columns) -> str:
    sha = hashlib.sha256()
    for name in sorted(columns):
        sha.update(f"{name} {columns[name].dtype}".encode() + columns[name].tobytes())
    return sha.hexdigest()


class Member:
    """Actor on a node that uses the queue."""

    def __init__(self, shards: list[RemoteShard], name: str) -> None:
        self._shards, self._name = shards, name
        self._queue: ExperienceQueue | None = None

    @property
    def queue(self) -> ExperienceQueue:
        self._queue = self._queue or ExperienceQueue(self._shards, self._name)
        return self._queue

    async def produce(self, count: int) -> list[str]:
        done: list[str] = []
        while len(done) < count:
            leased = await self.queue.lease_groups("generate", max_groups=2, columns=(), wait_s=5.0)
            refused = await self.queue.commit_columns(
                [(e.lease, columns_of(e.uid)) for e in leased]
            )
            assert not refused
            done += [experience.uid for experience in leased]
        return done

    async def consume(self, count: int) -> dict[str, str]:
        digests: dict[str, str] = {}
        while len(digests) < count:
            leased = await self.queue.lease_groups(
                "train", max_groups=2, columns=ROLLOUT_COLUMNS, wait_s=5.0
            )
            digests |= {experience.uid: digest(experience.columns) for experience in leased}
        return digests

    async def read(self, uids: list[str]) -> dict[str, str]:
        columns_by_uid = await self.queue.read_columns(uids, ROLLOUT_COLUMNS)
        return {uid: digest(columns) for uid, columns in columns_by_uid.items()}


@dataclass
class Nodes:
    """Two nodes; the driver is not on `second`."""

    second: Any
    ids: tuple[str, str]
    address: str

    def member(self, shards: list[RemoteShard], name: str, node: str) -> Any:
        pinned = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(Member).options(num_cpus=0, scheduling_strategy=pinned)
        return actor.remote(shards, name)

    def lose_second(self) -> None:
        """Kill every process of the second node at once."""
        (raylet,) = self.second.all_processes["raylet"]
        node = psutil.Process(raylet.process.pid)
        lost = [node, *node.children(recursive=True)]
        for process in lost:
            # Workers may exit on their own once their raylet is dead.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(lost, timeout=10.0)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    token = {**TOKEN_AUTH_ENV, TOKEN_VARIABLE: uuid.uuid4().hex}
    with pytest.MonkeyPatch.context() as patch, override_ray_environment(token):
        yield from two_nodes(patch)


def two_nodes(patch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Start two nodes; assert that all their processes exit at the end."""
    mark = uuid.uuid4().hex
    patch.setenv(MARK, mark)
    ray.shutdown()  # the instance shared by other tests
    sizes = {"num_cpus": 8, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=sizes)
    started: list[psutil.Process] = []
    try:
        second = cluster.add_node(num_cpus=8, object_store_memory=100 << 20)
        ray.init(address=cluster.address, log_to_driver=False)
        ids = (cluster.head_node.node_id, second.node_id)
        yield Nodes(second, ids, cluster.address)
    finally:
        started = marked(mark)
        ray.shutdown()
        cluster.shutdown()
    _, alive = psutil.wait_procs(started, timeout=30.0)
    assert not alive, "processes are still alive"


CONNECT = """
import os, sys
from streamrl.actors.launch.ray_cluster import connect_cluster
from streamrl.errors import ConfigError
from streamrl.placement.config import PlacementConfig
try:
    with connect_cluster(PlacementConfig(address=sys.argv[1])) as cluster:
        print(os.environ.get("RAY_AUTH_MODE"), cluster.machine_facts["nodes"])
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_an_existing_cluster_accepts_only_its_own_token(nodes: Nodes):
    wrong = {TOKEN_VARIABLE: "0" * 64}
    without = {"RAY_AUTH_MODE": "disabled"}
    scripts = [
        subprocess.Popen(
            [sys.executable, "-c", CONNECT, nodes.address],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Ray warns as well
            text=True,
        )
        for env in ({}, wrong, without)
    ]
    joined, *refused = (script.communicate(timeout=120.0)[0] for script in scripts)
    assert joined == "token 2\n"
    assert refused == [f"placement.address={nodes.address}: {NO_TOKEN_MESSAGE}\n"] * 2


def node_of(actor: Any) -> str:
    """Return the node of an actor, which may be restarting."""
    call = actor.__ray_call__.options(max_task_retries=-1)
    reply = call.remote(lambda _: ray.get_runtime_context().get_node_id())
    return str(ray.get(reply, timeout=120.0))


@pytest.mark.slow
def test_actors_with_weights_stay_on_the_node_of_shared_memory_after_scaling_and_restarts(
    nodes: Nodes, model_path: str
):
    head_node, second_node = nodes.ids
    registry = make_registry(model_path, ranks=2)
    registry.create_roles(second_node, print)
    try:
        generator, _ = registry.spawn_replica("generator")
        bound = {name for name in registry.actors if not name.startswith("reward")}
        trained = {"trainer-0", "trainer-1", "critic-0", "critic-1"}
        assert bound == {"generator-0", "generator-1", "value-0", *trained}
        expected = dict.fromkeys(bound, second_node)
        assert {name: node_of(registry.actors[name]) for name in bound} == expected

        actor = registry.actors[generator]
        pid = ray.get(actor.__ray_call__.remote(lambda _: psutil.Process().pid))
        process = psutil.Process(pid)
        process.kill()
        psutil.wait_procs([process], timeout=10.0)
        assert node_of(actor) == second_node
        assert node_of(registry.actors["reward-0"]) in (head_node, second_node)
    finally:
        registry.close()


@pytest.mark.slow
def test_ranks_leave_room_for_a_generator_of_many_devices(nodes: Nodes, model_path: str):
    wait_until_free()
    # Two models with two ranks, each on its own node, would leave no node with seven free slots.
    registry = make_registry(model_path, ranks=2, tensor_parallel=7)
    try:
        registry.create_roles("", print)
        assert {node_of(actor) for actor in registry.actors.values()} == set(nodes.ids)
    finally:
        registry.close()


def wait_until_free() -> None:
    """Wait until earlier tests have released their slots."""
    deadline = time.monotonic() + 60.0
    while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, "slots of an earlier test are not released"
        time.sleep(0.1)


def make_registry(model_path: str, *, ranks: int, tensor_parallel: int = 1) -> ActorRegistry:
    """Make the registry of a PPO run, without actors; each model has `ranks` ranks."""
    config = make_config(
        model_path,
        algorithm=AlgorithmConfig(name="ppo"),
        critic=CriticConfig(replicas=1),
        placement=PlacementConfig(address="local"),
        trainer=TrainerConfig(world_size=ranks),
        generator=GeneratorConfig(tensor_parallel=tensor_parallel),
    )
    return ActorRegistry(config, make_prepared(config), on_gpu=False)


@pytest.mark.slow
def test_ranks_of_a_model_share_a_node_with_room_and_are_placed_first(
    nodes: Nodes, model_path: str
):
    wait_until_free()
    reserved = reserve_bundles([{"CPU": 3.0}] * 2, strategy="STRICT_SPREAD", timeout_s=60.0)
    registry = make_registry(model_path, ranks=3)
    try:
        # Five slots are free per node: other actors, placed first, would leave no node with three.
        registry.create_roles("", print)
        for role in ("trainer", "critic"):
            names = [f"{role}-{rank}" for rank in range(3)]
            assert len({node_of(registry.actors[name]) for name in names}) == 1
    finally:
        registry.close()
        release_placement_groups(reserved)


VERSIONS = Versions(700_000, 1000, bucket_bytes=1 << 20)


class Publisher:
    """Publisher side of a transport."""

    def open(self, spec: TransportSpec) -> None:
        self._outlet = spec.make_writer(POLICY)

    def publish(self, version: int, readers: list[str]) -> WeightManifest:
        self._outlet.set_readers(dict.fromkeys(readers, ()))
        return VERSIONS.publish(self._outlet, version)


class Reader:
    """Follower side of a transport on a node."""

    def __init__(self, name: str) -> None:
        self._name = name

    def open(self, spec: TransportSpec) -> None:
        self._inlet = spec.make_reader(POLICY, self._name)

    def pull(self, manifest: WeightManifest) -> tuple[bool, str | None]:
        """Return whether the fetched version equals the published one, and the fallback reason."""
        return VERSIONS.fetch(self._inlet, manifest), self._inlet.fallback_reason


@pytest.mark.slow
def test_versions_reach_readers_on_both_nodes(nodes: Nodes):
    names = ["generator-0", "generator-1"]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes.ids]
    make_publisher: Any = ray.remote(Publisher)
    make_reader: Any = ray.remote(Reader)
    publisher = make_publisher.options(scheduling_strategy=strategies[0]).remote()
    readers = [
        make_reader.options(scheduling_strategy=strategy).remote(name)
        for strategy, name in zip(strategies, names, strict=True)
    ]
    assert [node_of(reader) for reader in readers] == list(nodes.ids)
    for transport in (OBJECT_STORE, COLLECTIVE):
        spec = TransportSpec(transport, "", "run", 2, RAY_ACCESS)
        ray.get([actor.open.remote(spec) for actor in (publisher, *readers)], timeout=60.0)
        for version in range(3):
            manifest = ray.get(publisher.publish.remote(version, names), timeout=60.0)
            pulled = [reader.pull.remote(manifest) for reader in readers]
            assert ray.get(pulled, timeout=60.0) == [(True, None)] * 2, (transport, version)
    for actor in (publisher, *readers):
        ray.kill(actor)


def test_the_queue_spans_two_nodes_and_outlives_one(nodes: Nodes, tmp_path: Path):
    actors: dict[str, Any] = {}

    def create(name: str, actor_class: Any, arguments: Any, *, options: Any) -> Any:
        actors[name] = ray.remote(actor_class).options(num_cpus=0, **options).remote(*arguments)
        return actors[name]

    plans = {
        f"shard-{i}": ShardPlan(
            STAGES,
            QueueConfig(),
            ShardCapacity(len(SIZES)),
            files=ShardFiles(tmp_path / f"shard-{i}"),
        )
        for i in range(2)
    }
    shards = create_shards(plans, create)
    shard_nodes = [node_of(actor) for actor in actors.values()]
    assert sorted(shard_nodes) == sorted(nodes.ids), "each node has a shard"
    queue = ExperienceQueue(shards, "driver")
    placed = {(queue.get_shard_index(uid), SIZES[uid] > 10_000) for uid in SIZES}
    assert len(placed) == 4, "each shard has small groups and large ones"

    head_node, second_node = nodes.ids
    producer = nodes.member(shards, "producer", second_node)
    consumer = nodes.member(shards, "eve", head_node)
    assert [node_of(producer), node_of(consumer)] == [second_node, head_node]
    prompts = [Prompt(uid, np.array([1], np.int32)) for uid in SIZES]
    asyncio.run(queue.insert_prompts(prompts, 0))
    assert sorted(ray.get(producer.produce.remote(len(SIZES)))) == sorted(SIZES)
    pid = ray.get(producer.__ray_call__.remote(lambda _: psutil.Process().pid))
    process = psutil.Process(pid)
    ray.kill(producer)
    psutil.wait_procs([process], timeout=10.0)
    expected = {uid: digest(columns_of(uid)) for uid in SIZES}
    assert ray.get(consumer.consume.remote(len(SIZES))) == expected

    # No later test uses these nodes.
    nodes.lose_second()
    assert ray.get(consumer.read.remote(list(SIZES)), timeout=60.0) == expected
    assert [node_of(actor) for actor in actors.values()] == [head_node, head_node]
