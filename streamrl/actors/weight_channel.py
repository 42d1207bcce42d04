"""How a reader follows the weights of a role: versions by the coordinator, bytes by an inlet."""

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
    """The readers' end of weight sync: manifests from the coordinator, buckets as they travel.

    `role` is whose weights they are.
    """

    def __init__(self, coordinator: Any, travel: TransportSpec, reader: str, role: str) -> None:
        self._coordinator = coordinator
        self._reader_name = reader
        self._role = role
        self._transport_reader = make_transport_reader(travel, role, reader)
        self._node = ray.get_runtime_context().get_node_id()

    async def wait_for_newer(self, held: ReaderState, *, wait_s: float) -> WeightManifest | None:
        """The newest version if it is newer than the one held, if it comes within `wait_s`."""
        here = replace(held, node=self._node)
        reply = self._coordinator.wait_for_manifest.remote(
            self._role, self._reader_name, here, wait_s
        )
        manifest = await await_reply(reply, "coordinator.newest", wait_s + CALL_TIMEOUT_S)
        assert manifest is None or isinstance(manifest, WeightManifest)
        return manifest

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        """The tensors of a version, verified: views of its buckets."""
        return await asyncio.to_thread(self._fetch_version, manifest)

    async def close(self) -> None:
        """Nothing is followed any more."""
        await asyncio.to_thread(self._transport_reader.close)

    def _fetch_version(self, manifest: WeightManifest) -> FetchedWeights:
        inlet, before = self._transport_reader, self._transport_reader.bytes_fetched
        tensors = unpack_tensors(manifest, inlet.fetch_buckets(manifest))
        return FetchedWeights(tensors, inlet.bytes_fetched - before, inlet.fallback_reason or "")
