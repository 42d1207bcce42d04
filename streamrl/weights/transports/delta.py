"""Only what has changed: each bucket also as its difference from the last version, bit for bit.

A bucket is compared word by word, a word being as long as the shortest element in it. A delta is a
bitmap, one bit per word, and the words whose bits are set; what does not change costs a 32nd of
itself in float32. It is nothing but a shorter way to the same bytes: the manifest's checksum is
that of the whole bucket, and a reader that lacks the version before takes the whole one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.manifest import TensorSlot, WeightBucket, WeightManifest, compute_checksum
from streamrl.weights.tensor_views import TORCH_DTYPES
from streamrl.weights.transport_protocol import TransportReader, TransportWriter


@dataclass(frozen=True)
class DeltaHandle:
    """Handles of the carrier: of the whole bucket, and of what makes it of `base`'s, if shorter."""

    full_handle: Any
    delta_handle: Any = None
    delta_bytes: int = 0
    base_version: int = -1


@dataclass(frozen=True)
class _BaseBucket:
    """A bucket of the last version, to compare with."""

    slots: tuple[TensorSlot, ...]
    data: Array


def word_bytes(slots: Sequence[TensorSlot]) -> int:
    """The length of the words a bucket is compared by: of its shortest element, 1 to 8."""
    return min(TORCH_DTYPES[slot.dtype].itemsize for slot in slots)


def encode_delta(base: Array, data: Array, word: int) -> Array:
    """What has changed from `base` to `data`, uint8 both, of the same size, a multiple of `word`.

    Returns uint8: the bitmap, filled up to whole words, and the words of `data` that differ.
    """
    kind = np.dtype(f"u{word}")
    old, new = base.view(kind), data.view(kind)
    changed = old != new
    bitmap = np.packbits(changed)
    bitmap.resize(_bitmap_bytes(new.size, word))
    return np.concatenate([bitmap, new[changed].view(np.uint8)])


def decode_delta(base: Array, delta: Array, word: int) -> Array:
    """The `data` that `encode` made `delta` of. Raises ValueError if the sizes do not fit."""
    kind = np.dtype(f"u{word}")
    data = base.copy()
    new = data.view(kind)
    bitmap_bytes = _bitmap_bytes(new.size, word)
    changed = np.unpackbits(delta[:bitmap_bytes], count=new.size).view(np.bool_)
    words = delta[bitmap_bytes:].view(kind)
    if words.size != np.count_nonzero(changed):  # numpy would fill all with a single one
        raise ValueError(f"{words.size} words for {np.count_nonzero(changed)} places")
    new[changed] = words
    return data


def _bitmap_bytes(num_words: int, word: int) -> int:
    return -(-num_words // (8 * word)) * word


class DeltaWriter:
    """The publisher's end: all goes through `carrier`. Keeps a copy of the last version."""

    def __init__(self, carrier: TransportWriter) -> None:
        self._carrier = carrier
        self._base_version = -1
        self._base_buckets: list[_BaseBucket] = []
        self._next_buckets: list[_BaseBucket] = []
        self._version = -1
        self._buckets: list[WeightBucket] = []
        self._handles: list[Any] = []

    def set_readers(self, names: Sequence[str]) -> None:
        """As the carrier does."""
        self._carrier.set_readers(names)

    def begin_version(self, version: int) -> None:
        """As the carrier does. A version that comes once more comes whole."""
        self._carrier.begin_version(version)
        if version == self._base_version:
            self._base_buckets = []
        self._version = version
        self._next_buckets, self._buckets, self._handles = [], [], []

    def allocate_buffer(self, num_bytes: int) -> Array:
        """The carrier's."""
        return self._carrier.allocate_buffer(num_bytes)

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> DeltaHandle:
        """Seal the bucket, and a delta if that is shorter."""
        index = len(self._next_buckets)
        old = self._base_buckets[index] if index < len(self._base_buckets) else None
        kept = data.copy()  # the carrier's memory is no longer ours once it is sealed
        self._next_buckets.append(_BaseBucket(bucket.slots, kept))
        whole = self._commit_to_carrier(bucket, data)
        if old is None or old.slots != bucket.slots:
            return DeltaHandle(whole)
        delta = encode_delta(old.data, kept, word_bytes(bucket.slots))
        if delta.nbytes >= data.nbytes:
            return DeltaHandle(whole)
        room = self._carrier.allocate_buffer(delta.nbytes)[: delta.nbytes]
        room[:] = delta
        handle = self._commit_to_carrier(
            WeightBucket((), delta.nbytes, compute_checksum(delta)), room
        )
        return DeltaHandle(whole, handle, delta.nbytes, self._base_version)

    def commit_version(self, manifest: WeightManifest) -> None:
        """From now on deltas are to this version."""
        self._carrier.commit_version(
            WeightManifest(self._version, tuple(self._buckets), tuple(self._handles))
        )
        self._base_buckets, self._base_version = self._next_buckets, self._version

    def close(self) -> None:
        """Close the carrier."""
        self._carrier.close()

    def _commit_to_carrier(self, bucket: WeightBucket, data: Array) -> Any:
        handle = self._carrier.commit_bucket(bucket, data)
        self._buckets.append(bucket)
        self._handles.append(handle)
        return handle


class DeltaReader:
    """A reader's end: keeps the last version it fetched. `bytes_fetched` is what came so far."""

    def __init__(self, carrier: TransportReader) -> None:
        self._carrier = carrier
        self._version = -1
        self._last_buckets: Sequence[Array] = ()
        self.bytes_fetched = 0
        self.fallback_reason: str | None = None

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """The buckets, made of those of the version before where it is at hand."""
        pairs = list(zip(manifest.handles, manifest.buckets, strict=True))
        by_delta = [
            self._version >= 0
            and handle.delta_handle is not None
            and handle.base_version == self._version
            for handle, _ in pairs
        ]
        wanted = [
            (WeightBucket((), handle.delta_bytes, ""), handle.delta_handle)
            if short
            else (bucket, handle.full_handle)
            for (handle, bucket), short in zip(pairs, by_delta, strict=True)
        ]
        buckets, handles = zip(*wanted, strict=True) if wanted else ((), ())
        came = list(self._carrier.fetch_buckets(WeightManifest(manifest.version, buckets, handles)))
        self.bytes_fetched += sum(array.nbytes for array in came)
        for index in np.flatnonzero(by_delta).tolist():
            came[index] = self._apply_delta(manifest, index, came[index])
        self._last_buckets, self._version = came, manifest.version
        return came

    def close(self) -> None:
        """Close the carrier's end."""
        self._last_buckets, self._version = (), -1
        self._carrier.close()

    def _apply_delta(self, manifest: WeightManifest, index: int, delta: Array) -> Array:
        try:
            data = decode_delta(
                self._last_buckets[index], delta, word_bytes(manifest.buckets[index].slots)
            )
        except ValueError as error:
            raise WeightsError(
                f"weights version {manifest.version}, bucket {index}: the delta of {delta.nbytes} "
                f"bytes does not fit version {self._version}: {error}"
            ) from error
        data.flags.writeable = False
        return data
