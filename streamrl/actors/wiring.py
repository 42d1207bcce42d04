"""What connects an actor to the run: config, queue, weight channel, device lease, engines."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from streamrl.actors.calls import CALL_TIMEOUT_S, call
from streamrl.actors.engine_factory import EngineFactory
from streamrl.actors.remote_shard import RemoteShard
from streamrl.actors.weight_travel import WeightTravel
from streamrl.buffer import ExperienceQueue
from streamrl.config import RunConfig
from streamrl.dataflow import Call, Dataflow, Kind
from streamrl.faces import DeviceLease, Fetched, Stage
from streamrl.lease import Arbiter, FreeLease, SharedLease, Suspendable
from streamrl.telemetry.spans import Span, SpanRecorder
from streamrl.weights import Inlet, WeightManifest, unpack
from streamrl.weights.registry import ReaderState


@dataclass(frozen=True)
class Wiring:
    """Given to every actor of a run at its start.

    components: columns that the scores, and the costs, are combined from.
    max_length: most tokens of prompt and completion together.
    run_dir: where checkpoints go, absolute. releases_kv: whether hybrid workers free the memory of
    keys and values while they train.
    """

    config: RunConfig
    dataflow: Dataflow
    components: tuple[str, ...]
    max_length: int
    run_dir: Path
    shards: tuple[RemoteShard, ...]
    coordinator: Any
    engines: EngineFactory
    travel: WeightTravel
    releases_kv: bool = False

    def channel(self, reader: str, role: str) -> "RemoteChannel":
        """Where `reader` follows the weights of a role."""
        return RemoteChannel(self.coordinator, reader, role, self.travel.inlet(role, reader))

    @property
    def train_columns(self) -> tuple[str, ...]:
        """What a rank reads of a group: what the algorithm needs, and the components of rewards."""
        train = self.dataflow.of_kind(Kind.TRAIN)[0]
        return (*train.needs, *self.components)

    def stages(
        self, calls: Sequence[Call], process: str, *, suspendable: Suspendable | None = None
    ) -> list[Stage]:
        """The places of an actor called `process`, one per call of its role, under one lease.

        They leave together. Where the pool is shared, what is `suspendable` gives way to others.
        """
        lease = self._lease(calls[0].role, process, suspendable)
        spans = SpanRecorder(process)
        leaving = asyncio.Event()
        return [
            Stage(call.stage, ExperienceQueue(self.shards, process), lease, spans, leaving)
            for call in calls
        ]

    def _lease(self, role: str, process: str, suspendable: Suspendable | None) -> DeviceLease:
        placement = self.config.placement
        if not placement.one_at_a_time:
            return FreeLease()
        arbiter = RemoteArbiter(self.coordinator, self.config.pipeline.stall_s)
        phase = role if placement.is_colocated else ""
        return SharedLease(arbiter, process, phase, suspendable=suspendable)


@dataclass(frozen=True)
class ActorReport:
    """What an actor did since its last report; `peaks_mb` is its memory by phase."""

    process: str
    spans: Sequence[Span]
    samples: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    counts: Mapping[str, int] = field(default_factory=dict)
    peaks_mb: Mapping[str, float] = field(default_factory=dict)


def make_arbiter(config: RunConfig) -> Arbiter:
    """What lends a run's pool, where its stages share one."""
    timeout_s = config.pipeline.stall_s
    if not config.placement.is_colocated:
        return Arbiter(timeout_s=timeout_s)
    # On policy there is nothing else to do before all rollouts of the step are there.
    slice_s = config.placement.slice_s if config.pipeline.max_staleness else math.inf
    return Arbiter(timeout_s=timeout_s, slice_s=slice_s)


def trainers_lease(config: RunConfig, arbiter: Arbiter) -> DeviceLease:
    """The share of all trainers of a run, who work as one."""
    return SharedLease(arbiter, "trainer") if config.placement.one_at_a_time else FreeLease()


class RemoteArbiter:
    """The coordinator's device lease, from another process."""

    def __init__(self, coordinator: Any, timeout_s: float) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s + CALL_TIMEOUT_S

    async def acquire(self, holder: str, phase: str) -> None:
        """Wait for the pool."""
        reply = self._coordinator.acquire.remote(holder, phase)
        await call(reply, "lease.acquire", self._timeout_s)

    async def release(self, holder: str) -> None:
        """Give the pool back."""
        await call(self._coordinator.release.remote(holder), "lease.release")

    async def wanted(self, holder: str) -> bool:
        """Wait, for a while, until the pool should be given back."""
        return bool(await call(self._coordinator.wanted.remote(holder), "lease.wanted"))


class RemoteChannel:
    """The readers' end of weight sync: manifests from the coordinator, buckets by the inlet.

    `role` is whose weights they are.
    """

    def __init__(self, coordinator: Any, reader: str, role: str, inlet: Inlet) -> None:
        self._coordinator = coordinator
        self._reader = reader
        self._role = role
        self._inlet = inlet
        self._node = ray.get_runtime_context().get_node_id()

    async def newest(self, held: ReaderState, *, wait_s: float) -> WeightManifest | None:
        """The newest version if it is newer than the one held, if it comes within `wait_s`."""
        here = replace(held, node=self._node)
        reply = self._coordinator.newest.remote(self._role, self._reader, here, wait_s)
        manifest = await call(reply, "coordinator.newest", wait_s + CALL_TIMEOUT_S)
        assert manifest is None or isinstance(manifest, WeightManifest)
        return manifest

    async def fetch(self, manifest: WeightManifest) -> Fetched:
        """The tensors of a version, verified: views of its buckets."""
        return await asyncio.to_thread(self._fetch, manifest)

    async def close(self) -> None:
        """Nothing is followed any more."""
        await asyncio.to_thread(self._inlet.close)

    def _fetch(self, manifest: WeightManifest) -> Fetched:
        inlet, before = self._inlet, self._inlet.bytes_fetched
        tensors = unpack(manifest, inlet.fetch(manifest))
        return Fetched(tensors, inlet.bytes_fetched - before, inlet.failure or "")
