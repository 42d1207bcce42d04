"""Weight channel of a follower in another process than the trainer.

The coordinator announces versions; a transport reader fetches their tensors.
"""

import asyncio
from dataclasses import replace
from typing import Any

import ray

from streamrl.actors.transport.endpoints import make_transport_reader
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, await_reply
from streamrl.actors.transport.transport_spec import TransportSpec
from streamrl.stream.protocols import FetchedWeights
from streamrl.weights import WeightManifest
from streamrl.weights.unpack import unpack_tensors
from streamrl.weights.version_registry import ReaderState


class RemoteWeightChannel:
    """Channel through which the actor `reader` receives each version of the weights of `role`."""

    def __init__(self, coordinator: Any, transport: TransportSpec, reader: str, role: str) -> None:
        self._coordinator = coordinator
        self._reader_name = reader
        self._role = role
        self._transport_reader = make_transport_reader(transport, role, reader)
        self._node = ray.get_runtime_context().get_node_id()

    async def wait_for_newer(self, state: ReaderState, *, wait_s: float) -> WeightManifest | None:
        """Wait for a version newer than the reader's state; return the newest manifest.

        Returns None if no newer version appears within `wait_s`.
        """
        located_state = replace(state, node=self._node)
        reply = self._coordinator.wait_for_manifest.remote(
            self._role, self._reader_name, located_state, wait_s
        )
        manifest = await await_reply(
            reply, "coordinator.wait_for_manifest", wait_s + CALL_TIMEOUT_S
        )
        assert manifest is None or isinstance(manifest, WeightManifest)
        return manifest

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        return await asyncio.to_thread(self._fetch_version, manifest)

    async def close(self) -> None:
        await asyncio.to_thread(self._transport_reader.close)

    def _fetch_version(self, manifest: WeightManifest) -> FetchedWeights:
        reader, bytes_before = self._transport_reader, self._transport_reader.bytes_fetched
        tensors = unpack_tensors(manifest, reader.fetch_buckets(manifest))
        return FetchedWeights(
            tensors, reader.bytes_fetched - bytes_before, reader.fallback_reason or ""
        )
