"""Base of all replicas: run stage loops, and follow a model's weights.

Replicas join and leave during a run. They hold no state that a restart would lose.
"""

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from streamrl.actors.actor_context import ActorContext
from streamrl.actors.liveness import PingableActor
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, call_actor
from streamrl.dataflow import EMA_REFERENCE, ModelCall
from streamrl.errors import VersionNotStoredError, WeightsError
from streamrl.pipeline import follow_weights
from streamrl.run_dir.crash_stacks import record_crash_reason, record_crash_stacks
from streamrl.stream.device_lease import SuspendableWork
from streamrl.stream.protocols import StageContext
from streamrl.user_code.service_gate import Outage, list_outages
from streamrl.weights import ServedVersion, TransportReader, WeightManifest
from streamrl.weights.versions import FetchedWeights, FollowerProtocol, FollowerState


class RemoteWeightChannel:
    """Channel of the actor `follower` to the versions of `role` that the coordinator offers.

    The tensors come through the run's transport, or from the trainer of this process through
    `shared_weights`.
    """

    def __init__(
        self, context: ActorContext, role: str, follower: str, shared_weights: SharedWeights | None
    ) -> None:
        self._coordinator = context.coordinator
        self._role = role
        self._follower_name = follower
        self._shared_weights = shared_weights
        self._transport_reader: TransportReader | None = (
            context.transport.make_reader(role, follower) if shared_weights is None else None
        )
        self._takes_slices = False

    async def wait_for_newer(self, state: FollowerState, *, wait_s: float) -> WeightManifest | None:
        if state.pull is not None:
            self._takes_slices = bool(state.pull.layouts)
        manifest = await call_actor(
            self._coordinator,
            "coordinator",
            "wait_for_manifest",
            *(self._role, self._follower_name, state, wait_s),
            timeout_s=wait_s + CALL_TIMEOUT_S,
        )
        assert manifest is None or isinstance(manifest, WeightManifest)
        return manifest

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        if self._shared_weights is not None:
            return self._shared_weights.fetch_version(manifest.version)
        return await asyncio.to_thread(self._fetch_version, manifest)

    async def close(self) -> None:
        if self._transport_reader is not None:
            await asyncio.to_thread(self._transport_reader.close)

    def _fetch_version(self, manifest: WeightManifest) -> FetchedWeights:
        # Imports torch, which only actors with a model need.
        from streamrl.weights.buckets import unpack_slices, unpack_tensors

        reader = self._transport_reader
        assert reader is not None
        bytes_before, fault = reader.bytes_fetched, ""
        tensors: Mapping[str, Any] = {}
        try:
            if self._takes_slices and (slices := reader.fetch_slices(manifest)):
                tensors = unpack_slices(manifest, slices)
        except WeightsError as error:
            fault = str(error)  # the whole version may arrive
        if not tensors:
            try:
                tensors = unpack_tensors(manifest, reader.fetch_buckets(manifest))
            except VersionNotStoredError as error:
                cause = f" ({fault})" if fault else ""
                raise VersionNotStoredError(f"{error}{cause}") from error
            fault = fault or reader.fallback_reason or ""
        return FetchedWeights(tensors, reader.bytes_fetched - bytes_before, fault)


class ReplicaActor(PingableActor):
    """Base class of actors that serve stages until they leave the run or die."""

    _shared_weights: SharedWeights | None = None
    """Weights that a trainer in this process shares with the actor, if any."""
    _stages: Sequence[StageContext] = ()

    def _join_stream(
        self,
        context: ActorContext,
        calls: Sequence[ModelCall],
        name: str,
        *,
        follows: str | None,
        suspendable: SuspendableWork | None = None,
    ) -> None:
        """Set up what the actor `name` needs to serve the stages of `calls`.

        follows: role whose weights the actor loads; None for an actor without such a model.
        suspendable: work that the actor suspends when another phase needs the shared device pool.
        """
        self._name, self._run_dir = name, context.run_dir
        record_crash_stacks(self._run_dir, name)
        self._stages = context.make_stages(calls, name, suspendable=suspendable)
        self._served_version = ServedVersion(name) if follows else None
        if follows == EMA_REFERENCE:
            due = context.config.reference.find_reference_version
            self._served_version = ServedVersion(name, resolve_due_version=due)
        self._channel = (
            RemoteWeightChannel(context, follows, name, self._shared_weights) if follows else None
        )

    async def _run_loops(
        self, loops: Sequence[Coroutine[Any, Any, None]], follower: FollowerProtocol | None
    ) -> None:
        """Run the stage loops until all have ended, and load new weights meanwhile.

        follower: loads the weights; None for an actor without a trained model.
        """
        # Loading an engine replaces the signal handlers (tvm_ffi installs its own).
        record_crash_stacks(self._run_dir, self._name)
        async with asyncio.TaskGroup() as tasks:
            following, served, channel = None, self._served_version, self._channel
            if follower is not None and served is not None and channel is not None:
                follow = follow_weights(self._stages[0], follower, channel, served)
                following = tasks.create_task(follow)
            await asyncio.wait([tasks.create_task(loop) for loop in loops])
            if following is not None:
                following.cancel()
        # Last: releasing ends the leases under which the stages save their partial rollouts.
        await self._stages[0].queue.release_holder(self._name, died=False)
        if self._channel is not None:
            await self._channel.close()

    async def list_outages(self) -> Sequence[Outage]:
        """Return the outages of services that the work of this actor's process waits for."""
        # A restarted actor has no stage before its start.
        return await list_outages(self._stages[0].name) if self._stages else ()

    async def start_drain(self) -> None:
        """Lease no more groups, so that `run` returns once the queue has all groups back."""
        self._stages[0].leave_requested.set()

    async def crash_process(self, reason: str = "") -> None:
        """Exit without cleanup, as if killed: the loaded weights, the engine or a rank is bad.

        reason: text for the event of the crash; "" if the driver knows it.
        """
        if reason:
            record_crash_reason(self._run_dir, self._name, reason)
        os._exit(1)

    async def wait_until_serving(self) -> int:
        """Wait until the first weights are loaded; return their version.

        Returns -1 at once if the actor follows no model.
        """
        served = self._served_version
        return -1 if served is None else await served.wait_for_version(0)
