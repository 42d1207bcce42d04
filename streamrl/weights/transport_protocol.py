"""The two ends of a transport, behind which all ways for buckets to travel are the same.

The publisher lays a bucket into `room` and seals it; what it gets for that, the handle, travels in
the manifest. A reader fetches the buckets of a manifest by their handles. Neither end checks what
travels: `pack` computes the checksums and `unpack` compares them, whatever lies between.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from streamrl.messages import Array
from streamrl.weights.manifest import WeightBucket, WeightManifest


class TransportWriter(Protocol):
    """The publisher's end. One version at a time, from one thread."""

    def set_readers(self, names: Sequence[str]) -> None:
        """Who follows from the next version on; others may join them at any time."""
        ...

    def begin_version(self, version: int) -> None:
        """The buckets of this version come next."""
        ...

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Where to lay the next bucket: uint8 [num_bytes], writable; it may hold old bytes."""
        ...

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        """The bucket is laid: `data`, uint8 [bucket.num_bytes], is the beginning of the last room.

        Returns the handle readers fetch it by, which must be picklable.
        """
        ...

    def commit_version(self, manifest: WeightManifest) -> None:
        """The version is whole: it may be read from now on, older ones than are kept may go."""
        ...

    def close(self) -> None:
        """Nothing is published any more; free what is held, but for what others follow."""
        ...


class TransportReader(Protocol):
    """A reader's end. Called from a thread, one version at a time.

    `bytes_fetched` is what has come so far; `failure` is why the last version had to come another
    way than it should have, None if it did not.
    """

    bytes_fetched: int
    fallback_reason: str | None

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """The buckets of a version, uint8 [num_bytes] each, read-only and not verified.

        They stay as they are for as long as the arrays live. Raises WeightsError if a bucket cannot
        be had (any more).
        """
        ...

    def close(self) -> None:
        """Nothing is fetched any more."""
        ...


def commit_copy(outlet: TransportWriter, bucket: WeightBucket, data: Array) -> Any:
    """Send a bucket that was laid elsewhere, `data`, through an outlet; its handle there."""
    room = outlet.allocate_buffer(data.nbytes)[: data.nbytes]
    room[:] = data
    return outlet.commit_bucket(bucket, room)
