"""Weights through Ray's object store: the copy of a node is one for all its readers.

A bucket is an object of the publisher's. Ray fetches it to a node once, from any node that has it,
and every reader there has views of that copy. It goes when no manifest names it any more and no
view is left.
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
"""Longest that the buckets of a version may take to reach a node, s."""


class ObjectStoreWriter:
    """The publisher's end: puts buckets into the store of its node."""

    def __init__(self) -> None:
        self._staging = allocate_host_buffer(0)

    def set_readers(self, names: Sequence[str]) -> None:
        """It does not matter who reads."""

    def begin_version(self, version: int) -> None:
        """Nothing is to be prepared."""

    def allocate_buffer(self, num_bytes: int) -> Array:
        """The same memory for every bucket: the store takes a copy."""
        if self._staging.nbytes < num_bytes:
            self._staging = allocate_host_buffer(num_bytes)
        return self._staging

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        """A reference to the bucket in the store."""
        return ray.put(data)

    def commit_version(self, manifest: WeightManifest) -> None:
        """Older versions go with the manifests that name them."""

    def close(self) -> None:
        """Objects go with their owner."""


class ObjectStoreReader:
    """A reader's end; `name` is whose weights are read, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.bytes_fetched = 0
        self.fallback_reason: str | None = None

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """Views of the buckets in the store of this node."""
        what = f"buckets of {self._name} version {manifest.version}"
        try:
            arrays: list[Array] = fetch_reply(list(manifest.handles), what, FETCH_TIMEOUT_S)
        except (ActorLostError, ActorError, DeadlineError) as error:
            raise WeightsError(str(error)) from error
        self.bytes_fetched += manifest.num_bytes
        return arrays

    def close(self) -> None:
        """Views keep what they need."""
