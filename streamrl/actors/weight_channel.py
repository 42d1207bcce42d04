"""How a reader follows the weights of a role: versions by the coordinator, bytes by an inlet."""

import asyncio
from dataclasses import replace
from typing import Any

import ray

from streamrl.actors.transport.endpoints import make_inlet
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, call
from streamrl.actors.transport.transport_spec import WeightTravel
from streamrl.stream.protocols import Fetched
from streamrl.weights import WeightManifest
from streamrl.weights.unpack import unpack
from streamrl.weights.version_registry import ReaderState


class RemoteChannel:
    """The readers' end of weight sync: manifests from the coordinator, buckets as they travel.

    `role` is whose weights they are.
    """

    def __init__(self, coordinator: Any, travel: WeightTravel, reader: str, role: str) -> None:
        self._coordinator = coordinator
        self._reader = reader
        self._role = role
        self._inlet = make_inlet(travel, role, reader)
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
