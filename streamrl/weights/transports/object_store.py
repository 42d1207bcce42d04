"""Object store transport: readers of a node share a copy in the cluster's object store.

A bucket is an object that the publisher owns. Ray fetches an object once per node, from any node
that has a copy, and every reader there maps that copy. Ray frees an object when no manifest refers
to it and no view is left.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from streamrl.errors import ActorError, ActorLostError, DeadlineError, WeightsError
from streamrl.messages import Array
from streamrl.weights.transport import (
    Transport,
    TransportReader,
    TransportSpec,
    TransportWriter,
    estimate_send_s,
)
from streamrl.weights.versions import WeightBucket, WeightManifest

FETCH_TIMEOUT_S = 120.0
"""Timeout of fetching a version beyond its transfer time."""
NODES_AT_ONCE = 8
"""Nodes that may fetch a version from the same node at once."""


class ObjectStoreWriter(TransportWriter):
    """Publisher's end: puts each bucket of a version into the object store of its node."""

    def __init__(self, put_object: Callable[[Array], Any]) -> None:
        self._put_object = put_object
        self._staging_buffer = np.empty(0, np.uint8)

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Return the same memory for every bucket: `put_object` copies."""
        if self._staging_buffer.nbytes < num_bytes:
            self._staging_buffer = np.zeros(num_bytes, np.uint8)
        return self._staging_buffer

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        return self._put_object(data)


class ObjectStoreReader(TransportReader):
    """Reader's end: maps the buckets of a version from the object store of its node.

    `name` names the model in errors. A version takes at most FETCH_TIMEOUT_S and its transfer time,
    as one of NODES_AT_ONCE nodes that fetch it from the same node.
    """

    def __init__(
        self, name: str, fetch_objects: Callable[[list[Any], str, float], list[Array]]
    ) -> None:
        self._name = name
        self._fetch_objects = fetch_objects

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        subject = f"buckets of {self._name} version {manifest.version}"
        timeout_s = FETCH_TIMEOUT_S + estimate_send_s(NODES_AT_ONCE * manifest.num_bytes)
        try:
            arrays = self._fetch_objects(list(manifest.handles), subject, timeout_s)
        except (ActorLostError, ActorError, DeadlineError) as error:
            raise WeightsError(str(error)) from error
        self.bytes_fetched += manifest.num_bytes
        return arrays


def make_writer(spec: TransportSpec, role: str) -> ObjectStoreWriter:
    return ObjectStoreWriter(spec.cluster.put_object)


def make_reader(spec: TransportSpec, role: str, reader: str) -> ObjectStoreReader:
    return ObjectStoreReader(role, spec.cluster.fetch_objects)


TRANSPORT = Transport(make_writer, make_reader)
