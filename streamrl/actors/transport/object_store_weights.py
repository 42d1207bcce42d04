"""Weight transport through Ray's object store: readers of a node share a copy.

A bucket is an object that the publisher owns. Ray fetches an object once per node, from any node
that has a copy, and every reader there maps that copy. Ray frees an object when no manifest refers
to it and no view is left.
"""

from collections.abc import Sequence
from typing import Any

import ray

from streamrl.actors.transport.ray_calls import fetch_reply
from streamrl.errors import ActorError, ActorLostError, DeadlineError, WeightsError
from streamrl.messages import Array
from streamrl.weights import WeightBucket, WeightManifest
from streamrl.weights.pack import allocate_host_buffer

FETCH_TIMEOUT_S = 120.0
"""Longest wait for all buckets of a version to reach the follower's node."""


class ObjectStoreWriter:
    """Publisher side: puts each bucket of a version into the object store of its node."""

    def __init__(self) -> None:
        self._staging = allocate_host_buffer(0)

    def set_readers(self, names: Sequence[str]) -> None:
        """Do nothing: any process may read an object of the store."""

    def begin_version(self, version: int) -> None:
        """Do nothing: buckets of different versions are independent objects."""

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Return the memory in which to pack a bucket.

        All buckets reuse the same memory because `ray.put` copies.
        """
        if self._staging.nbytes < num_bytes:
            self._staging = allocate_host_buffer(num_bytes)
        return self._staging

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        return ray.put(data)

    def commit_version(self, manifest: WeightManifest) -> None:
        """Do nothing: Ray frees old buckets with the manifests that refer to them."""

    def close(self) -> None:
        """Do nothing: Ray frees the objects when the process ends."""


class ObjectStoreReader:
    """Follower side: maps the buckets of a version from the object store of its node.

    name: role of the weights, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.bytes_fetched = 0
        self.fallback_reason: str | None = None

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        call_name = f"buckets of {self._name} version {manifest.version}"
        try:
            arrays: list[Array] = fetch_reply(list(manifest.handles), call_name, FETCH_TIMEOUT_S)
        except (ActorLostError, ActorError, DeadlineError) as error:
            raise WeightsError(str(error)) from error
        self.bytes_fetched += manifest.num_bytes
        return arrays

    def close(self) -> None:
        """Do nothing: fetched arrays keep their objects alive."""
