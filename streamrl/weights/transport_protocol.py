"""Protocols of a transport: the publisher's writer and a follower's reader.

The publisher fills the memory that `allocate_buffer` returns and commits the bucket.
`commit_bucket` returns a handle, which travels in the manifest; readers fetch buckets by handle.
Transports do not verify data: `pack` computes the checksums and `unpack` compares them, whatever
transport lies between.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from streamrl.messages import Array
from streamrl.weights.manifest import WeightBucket, WeightManifest


class TransportWriter(Protocol):
    """Publisher's end of a transport. Handles one version at a time, from one thread."""

    def set_readers(self, names: Sequence[str]) -> None:
        """Set the names of the readers of the next versions; others may join at any time."""
        ...

    def begin_version(self, version: int) -> None:
        """Start writing `version`, to which the buckets committed next belong."""
        ...

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Return memory for the next bucket: uint8 [num_bytes], writable, with any contents."""
        ...

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        """Hand a filled bucket to the transport; return its picklable handle for readers.

        `data`, uint8 [bucket.num_bytes], is the beginning of the last allocated buffer.
        """
        ...

    def commit_version(self, manifest: WeightManifest) -> None:
        """Make the version readable; versions older than those to keep may be dropped."""
        ...

    def close(self) -> None:
        """Stop publishing and free all resources, except versions that readers still use."""
        ...


class TransportReader(Protocol):
    """Reader's end of a transport. Handles one version at a time, called from a thread.

    bytes_fetched: total since creation. fallback_reason: why the last version used the fallback
    transport; None without fallback.
    """

    bytes_fetched: int
    fallback_reason: str | None

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """Return the buckets of a version, uint8 [num_bytes] each, read-only and not verified.

        The bytes stay valid for the lifetime of the arrays. Raises WeightsError if a bucket is not
        available (any more).
        """
        ...

    def close(self) -> None: ...


def commit_copy(writer: TransportWriter, bucket: WeightBucket, data: Array) -> Any:
    """Copy `data` into a buffer of `writer`, commit the bucket, and return its handle."""
    buffer = writer.allocate_buffer(data.nbytes)[: data.nbytes]
    buffer[:] = data
    return writer.commit_bucket(bucket, buffer)
