"""A transport of the weights: the publisher's writer, the followers' readers, their settings.

The publisher fills the memory that `allocate_buffer` returns and commits the bucket.
`commit_bucket` returns a handle, which travels in the manifest; readers fetch buckets by handle.
Transports do not verify data: `buckets` computes and compares the checksums, whatever
transport lies between.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from streamrl.messages import Array
from streamrl.weights.config import TRANSPORT_MODULES
from streamrl.weights.rank_slices import Readers
from streamrl.weights.versions import WeightBucket, WeightManifest

MIN_BYTES_PER_S = 100e6
"""Slowest network that deadlines of a transfer allow for: about gigabit Ethernet."""


def estimate_send_s(num_bytes: int) -> float:
    """Return the seconds that sending `num_bytes` takes on the slowest supported network."""
    return num_bytes / MIN_BYTES_PER_S


def estimate_model_send_s(file_bytes: int) -> float:
    """Return the seconds that a model's parameters take. file_bytes: size of its weight files.

    In float32 the parameters may have twice the bytes.
    """
    return estimate_send_s(2 * file_bytes)


class TransportWriter:
    """Publisher's end of a transport. Handles one version at a time, from one thread.

    rank_manifests: of the committed version, those of the slices that it sends to each rank.
    """

    rank_manifests: tuple[WeightManifest, ...] = ()

    def set_readers(self, readers: Readers) -> None:
        """Set the readers of the next versions; others may join at any time."""

    def begin_version(self, version: int) -> None:
        """Start writing `version`, to which the buckets committed next belong."""

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Return memory for the next bucket: uint8 [num_bytes or more], writable, any contents."""
        raise NotImplementedError

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        """Hand a filled bucket to the transport; return its picklable handle for readers.

        `data`, uint8 [bucket.num_bytes], is the beginning of the last allocated buffer. A writer
        that carries buckets for another one also takes memory that it has not allocated.
        """
        raise NotImplementedError

    def commit_version(self, manifest: WeightManifest) -> None:
        """Make the version readable; versions older than those to keep may be dropped."""

    def close(self) -> None:
        """Stop publishing and free all resources, except versions that readers still use."""


class TransportReader:
    """Reader's end of a transport. Handles one version at a time, called from a thread.

    bytes_fetched: total since creation. fallback_reason: why the last version used the fallback
    transport; None without fallback.
    """

    bytes_fetched: int = 0
    fallback_reason: str | None = None

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """Return the buckets of a version, uint8 [num_bytes] each, read-only and not verified.

        The bytes stay valid for the lifetime of the arrays and of their views. Raises WeightsError
        if a bucket is not available (any more).
        """
        raise NotImplementedError

    def fetch_slices(self, manifest: WeightManifest) -> Sequence[Sequence[Array]]:
        """Return the buckets of each rank's manifest; empty if they are not sent to this reader.

        As `fetch_buckets` otherwise. The error names the rank.
        """
        return ()

    def close(self) -> None:
        """Free all resources, except fetched arrays."""


@dataclass(frozen=True)
class ClusterAccess:
    """Functions of the cluster's runtime, called in the process of a writer or a reader. Picklable.

    put_object: copies an array into the object store and returns its handle.
    fetch_objects(handles, subject, timeout_s): returns the arrays of handles, read-only; raises a
    StreamError that names the subject.
    get_address: returns the IP address of the process's node.
    """

    put_object: Callable[[Array], Any]
    fetch_objects: Callable[[list[Any], str, float], list[Array]]
    get_address: Callable[[], str]


@dataclass(frozen=True)
class TransportSpec:
    """Transport of a run, and the settings from which every actor makes its end. Picklable.

    name: a key of TRANSPORT_MODULES.
    reason: line for the user that says why it was chosen.
    token: distinguishes the shared memory of this run on the machine.
    keep_versions: versions that a writer keeps for slow followers.
    copied_roles: roles whose versions must not depend on being published again, which is possible
    only until the next training step.
    max_bytes: limit of shared memory by published role, bytes.
    node: node id that all publishers and followers must share; empty if any node will do.
    """

    name: str
    reason: str
    token: str
    keep_versions: int
    cluster: ClusterAccess
    copied_roles: frozenset[str] = frozenset()
    max_bytes: Mapping[str, int] = field(default_factory=dict)
    node: str = ""

    def make_writer(self, role: str) -> TransportWriter:
        """Make the writer with which rank 0 of a trained role publishes weights."""
        return load_transport(self.name).make_writer(self, role)

    def make_reader(self, role: str, reader: str) -> TransportReader:
        """Make the reader with which the actor `reader` fetches the weights of a role."""
        return load_transport(self.name).make_reader(self, role, reader)

    def clean_up(self) -> None:
        """Remove what killed publishers of this run left on this node."""
        load_transport(self.name).clean_up(self)


@dataclass(frozen=True)
class Transport:
    """Both ends of a transport: each module of `weights/transports` has one, TRANSPORT.

    make_writer(spec, role), make_reader(spec, role, reader), clean_up(spec): as in
    `TransportSpec`.
    """

    make_writer: Callable[[TransportSpec, str], TransportWriter]
    make_reader: Callable[[TransportSpec, str, str], TransportReader]
    clean_up: Callable[[TransportSpec], None] = lambda spec: None


def load_transport(name: str) -> Transport:
    """Import the transport of this name. Some import torch, which not every actor needs."""
    module = import_module(f"streamrl.weights.transports.{TRANSPORT_MODULES[name]}")
    transport: Transport = module.TRANSPORT
    return transport
