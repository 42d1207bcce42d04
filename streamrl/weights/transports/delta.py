"""Delta transport: send each bucket in full and as its bitwise difference from the last version.

Buckets are compared word by word; a word is as long as the bucket's shortest element. A delta is a
bitmap with one bit per word, followed by the words whose bits are set. Unchanged float32 data costs
1/32 of its size. The result is exact: the manifest's checksum covers the reconstructed bucket, and
a reader without the previous version fetches the full bucket.

    old words     a b c d e f g h
    new words     a b X d e f Y h
    delta         0 0 1 0 0 0 1 0 | X Y
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.bucket_memory import copy_to_host
from streamrl.weights.manifest import (
    DTYPE_BYTES,
    BucketMemory,
    TensorSlot,
    WeightBucket,
    WeightManifest,
    compute_checksum,
)
from streamrl.weights.transport import Transport, TransportReader, TransportWriter
from streamrl.weights.transports import object_store


@dataclass(frozen=True)
class DeltaHandle:
    """Handles of a bucket in the carrier transport: in full, and as delta from `base_version`.

    delta_handle: None unless the delta is shorter than the bucket. delta_bytes: size of the delta.
    """

    full_handle: Any
    delta_handle: Any = None
    delta_bytes: int = 0
    base_version: int = -1


@dataclass(frozen=True)
class _BaseBucket:
    """Bucket of the last version, from which the next delta is computed."""

    slots: tuple[TensorSlot, ...]
    data: Array


def find_word_bytes(slots: Sequence[TensorSlot]) -> int:
    """Return the bytes per word when buckets are compared: size of the shortest element, 1 to 8."""
    return min(DTYPE_BYTES[slot.dtype] for slot in slots)


def encode_delta(base: Array, data: Array, word: int) -> Array:
    """Encode the change from `base` to `data`: both uint8, of equal size, a multiple of `word`.

    `word`: bytes per compared word. Returns uint8: the bitmap, padded to full words, and the words
    of `data` that differ.
    """
    word_dtype = np.dtype(f"u{word}")
    old, new = base.view(word_dtype), data.view(word_dtype)
    changed = old != new
    bitmap = np.packbits(changed)
    bitmap.resize(_count_bitmap_bytes(new.size, word))
    return np.concatenate([bitmap, new[changed].view(np.uint8)])


def decode_delta(base: Array, delta: Array, word: int) -> Array:
    """Return the bytes, uint8, to which a delta from `encode_delta` changes `base`.

    `word`: bytes per compared word. Raises ValueError if the sizes do not match.
    """
    word_dtype = np.dtype(f"u{word}")
    data = base.copy()
    new = data.view(word_dtype)
    bitmap_bytes = _count_bitmap_bytes(new.size, word)
    changed = np.unpackbits(delta[:bitmap_bytes], count=new.size).view(np.bool_)
    words = delta[bitmap_bytes:].view(word_dtype)
    if words.size != np.count_nonzero(changed):  # numpy would broadcast a single word to all
        raise ValueError(f"{words.size} words for {np.count_nonzero(changed)} set bits")
    new[changed] = words
    return data


def _count_bitmap_bytes(num_words: int, word: int) -> int:
    """Return the size of a bitmap with one bit per word, padded to full words."""
    return -(-num_words // (8 * word)) * word


class DeltaWriter(TransportWriter):
    """Publisher's end of the delta transport: sends through `carrier`, keeps the last version."""

    def __init__(self, carrier: TransportWriter) -> None:
        self._carrier = carrier
        self._base_version = -1
        self._base_buckets: list[_BaseBucket] = []
        self._next_buckets: list[_BaseBucket] = []
        self._version = -1
        self._buckets: list[WeightBucket] = []
        self._handles: list[Any] = []

    def set_readers(self, names: Sequence[str]) -> None:
        self._carrier.set_readers(names)

    def begin_version(self, version: int) -> None:
        """Start a version. A version that is published again is sent in full, without deltas."""
        self._carrier.begin_version(version)
        if version == self._base_version:
            self._base_buckets = []
        self._version = version
        self._next_buckets, self._buckets, self._handles = [], [], []

    def allocate_buffer(self, num_bytes: int) -> BucketMemory:
        return self._carrier.allocate_buffer(num_bytes)

    def commit_bucket(self, bucket: WeightBucket, data: BucketMemory) -> DeltaHandle:
        """Send the full bucket, and also its delta from the last version if that is shorter."""
        index = len(self._next_buckets)
        base = self._base_buckets[index] if index < len(self._base_buckets) else None
        data_copy = copy_to_host(data).copy()  # the carrier may reuse its buffer after the commit
        self._next_buckets.append(_BaseBucket(bucket.slots, data_copy))
        full_handle = self._record(bucket, self._carrier.commit_bucket(bucket, data))
        if base is None or base.slots != bucket.slots:
            return DeltaHandle(full_handle)
        delta = encode_delta(base.data, data_copy, find_word_bytes(bucket.slots))
        if delta.nbytes >= data.nbytes:
            return DeltaHandle(full_handle)
        delta_bucket = WeightBucket((), delta.nbytes, compute_checksum(delta))
        delta_handle = self._record(delta_bucket, self._carrier.commit_bucket(delta_bucket, delta))
        return DeltaHandle(full_handle, delta_handle, delta.nbytes, self._base_version)

    def commit_version(self, manifest: WeightManifest) -> None:
        """Commit the version and make it the base of the next deltas."""
        self._carrier.commit_version(
            WeightManifest(self._version, tuple(self._buckets), tuple(self._handles))
        )
        self._base_buckets, self._base_version = self._next_buckets, self._version

    def close(self) -> None:
        self._carrier.close()

    def _record(self, bucket: WeightBucket, handle: Any) -> Any:
        """Add a committed bucket to the carrier's version, and return its handle."""
        self._buckets.append(bucket)
        self._handles.append(handle)
        return handle


class DeltaReader(TransportReader):
    """Reader's end of the delta transport: keeps the last fetched version to apply deltas to.

    `bytes_fetched` counts the bytes received through `carrier`.
    """

    def __init__(self, carrier: TransportReader) -> None:
        self._carrier = carrier
        self._version = -1
        self._last_buckets: Sequence[Array] = ()

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """Fetch each bucket as a delta if the delta's base version is here, otherwise in full."""
        pairs = list(zip(manifest.handles, manifest.buckets, strict=True))
        use_delta = [
            self._version >= 0
            and handle.delta_handle is not None
            and handle.base_version == self._version
            for handle, _ in pairs
        ]
        requests = [
            (WeightBucket((), handle.delta_bytes, ""), handle.delta_handle)
            if is_delta
            else (bucket, handle.full_handle)
            for (handle, bucket), is_delta in zip(pairs, use_delta, strict=True)
        ]
        buckets, handles = zip(*requests, strict=True) if requests else ((), ())
        fetched = self._carrier.fetch_buckets(WeightManifest(manifest.version, buckets, handles))
        arrays = list(map(copy_to_host, fetched))
        self.bytes_fetched += sum(array.nbytes for array in arrays)
        for index in np.flatnonzero(use_delta).tolist():
            arrays[index] = self._apply_delta(manifest, index, arrays[index])
        self._last_buckets, self._version = arrays, manifest.version
        return arrays

    def close(self) -> None:
        self._last_buckets, self._version = (), -1
        self._carrier.close()

    def _apply_delta(self, manifest: WeightManifest, index: int, delta: Array) -> Array:
        """Return bucket `index` of the manifest. Raise WeightsError if the delta does not fit."""
        try:
            data = decode_delta(
                self._last_buckets[index], delta, find_word_bytes(manifest.buckets[index].slots)
            )
        except ValueError as error:
            raise WeightsError(
                f"weights version {manifest.version}, bucket {index}: the delta of {delta.nbytes} "
                f"bytes does not fit version {self._version}: {error}"
            ) from error
        data.flags.writeable = False
        return data


TRANSPORT = Transport(
    lambda spec, role, model_path: DeltaWriter(object_store.make_writer(spec, role, model_path)),
    lambda spec, role, reader: DeltaReader(object_store.make_reader(spec, role, reader)),
    copies_per_node=True,
)
