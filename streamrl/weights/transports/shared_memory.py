"""Weights through the memory of one node: a bucket is laid where it is read.

The publisher lays a bucket straight into its mapping of a file in /dev/shm and readers map that
read-only, so nothing is copied on the way. Pages that were never touched cost twice as much as
memory that was, so the files of versions that are no longer kept are laid anew, unless somebody
still reads them. Memory is asked for before it is written: where there is none, the bucket goes
another way, and the next version tries again.
"""

import errno
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.manifest import WeightBucket, WeightManifest
from streamrl.weights.transport_protocol import TransportReader, TransportWriter, commit_copy
from streamrl.weights.transports.shm_segments import (
    HEADER_BYTES,
    OWNER_SUFFIX,
    SHARED_MEMORY_DIR,
    UNCOMMITTED_HEADER,
    SegmentHandle,
    SharedMemorySegment,
    claim_name_prefix,
    get_free_bytes,
    map_segment,
    remove_stale_segments,
)

OUT_OF_MEMORY_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
"""What the system says where there is no memory to be had."""


class SharedMemoryWriter:
    """The publisher's end. `token` tells a run from others on the node; see the module.

    The newest `keep_versions` versions stay as they are. Its files have at most `max_bytes`: what
    lies in the same memory, as Ray's object store, dies where others have taken all of it. A bucket
    for which these do not suffice goes through `fallback`. Raises WeightsError where `directory` is
    full, or cannot be used for another reason.
    """

    def __init__(
        self,
        token: str,
        fallback: TransportWriter,
        *,
        keep_versions: int,
        max_bytes: int = sys.maxsize,
        directory: Path = SHARED_MEMORY_DIR,
    ) -> None:
        remove_stale_segments(directory)
        self._fallback = fallback
        self._directory = directory
        self._keep_versions = keep_versions
        self._max_bytes = max_bytes
        self._name_prefix, self._owner_fd = claim_name_prefix(directory, token)
        self._serials = itertools.count()
        self._version = -1
        self._staging_buffer = np.empty(0, np.uint8)
        self._requested_bytes = 0
        self._num_committed = 0
        self._open_segment: SharedMemorySegment | None = None
        self._committed_segments: dict[int, SharedMemorySegment] = {}
        self._kept_versions: list[dict[int, SharedMemorySegment]] = []
        self._free_segments: list[tuple[int, SharedMemorySegment]] = []
        self._last_bucket_bytes: tuple[int, ...] = ()

    def set_readers(self, names: Sequence[str]) -> None:
        """It matters to the fallback, if to anybody."""
        self._fallback.set_readers(names)

    def begin_version(self, version: int) -> None:
        """What was laid of a version that was never finished is free again."""
        self._release_open_segment()
        self._free_segments += self._committed_segments.items()
        self._committed_segments, self._num_committed = {}, 0
        self._version = version
        self._fallback.begin_version(version)

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Where the bucket will be read, if it is known how large it is: as large as the last time.

        Otherwise it is laid elsewhere and moved when it is sealed, since there may be no room for
        the largest one it could be.
        """
        index = self._num_committed
        self._release_open_segment()
        self._requested_bytes = num_bytes
        expected = self._last_bucket_bytes[index] if index < len(self._last_bucket_bytes) else 0
        self._open_segment = self._acquire_segment(index, expected) if expected else None
        if self._open_segment is not None:
            if num_bytes - self._open_segment.reserved_bytes <= get_free_bytes(self._directory):
                return self._open_segment.view_bytes(num_bytes)
            self._release_open_segment()
        if self._staging_buffer.nbytes < num_bytes:
            self._staging_buffer = np.zeros(num_bytes, np.uint8)
        return self._staging_buffer[:num_bytes]

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        """Where the bucket is, or its handle in the fallback."""
        index, segment = self._num_committed, self._open_segment
        self._num_committed += 1
        if segment is None:
            segment = self._acquire_segment(index, data.nbytes)
            if segment is None:
                self._require_free_memory(data.nbytes)
                return commit_copy(self._fallback, bucket, data)
            segment.view_bytes(data.nbytes)[:] = data
        segment.write_header(self._version, index)
        segment.unlock()
        self._committed_segments[index] = segment
        self._open_segment = None
        return SegmentHandle(str(segment.path), self._version, index)

    def commit_version(self, manifest: WeightManifest) -> None:
        """The version is kept; the one that no longer is will be laid anew."""
        self._fallback.commit_version(_fallback_manifest(manifest))
        self._drop_unread_segments()
        self._last_bucket_bytes = tuple(bucket.num_bytes for bucket in manifest.buckets)
        self._staging_buffer = np.empty(0, np.uint8)
        self._kept_versions.append(self._committed_segments)
        self._committed_segments = {}
        while len(self._kept_versions) > self._keep_versions:
            self._free_segments += self._kept_versions.pop(0).items()

    def close(self) -> None:
        """Take all names away: who reads a version goes on, who comes later finds none."""
        for segment in self._list_segments():
            segment.unlink_file()
        self._open_segment, self._committed_segments, self._kept_versions, self._free_segments = (
            None,
            {},
            [],
            [],
        )
        (self._directory / f"{self._name_prefix}{OWNER_SUFFIX}").unlink(missing_ok=True)
        if self._owner_fd >= 0:
            os.close(self._owner_fd)
            self._owner_fd = -1
        self._fallback.close()

    def _acquire_segment(self, index: int, num_bytes: int) -> SharedMemorySegment | None:
        """A segment nobody reads, locked, with memory for so many bytes; None without room."""
        segment = self._reuse_segment(index)
        try:
            if segment is None:
                path = self._directory / f"{self._name_prefix}-{next(self._serials)}"
                segment = SharedMemorySegment(path, self._requested_bytes)
            taken = sum(other.reserved_bytes + HEADER_BYTES for other in self._list_segments())
            if taken + max(num_bytes, segment.reserved_bytes) + HEADER_BYTES > self._max_bytes:
                segment.unlink_file()
                return None
            segment.reserve_memory(num_bytes)
        except OSError as error:
            if segment is not None:
                segment.unlink_file()
            if error.errno in OUT_OF_MEMORY_ERRNOS:
                return None
            raise WeightsError(
                f"weights version {self._version}, bucket {index}: cannot be laid in "
                f"{self._directory}: {error.strerror}"
            ) from error
        segment.write_header(*UNCOMMITTED_HEADER)
        return segment

    def _require_free_memory(self, num_bytes: int) -> None:
        """Raise WeightsError if the memory is full, of whatever: the fallback's may be the same.

        Ray's store dies of that. Full of what this publisher may take at most, it has room.
        """
        there = get_free_bytes(self._directory)
        if there < num_bytes:
            raise WeightsError(
                f"weights version {self._version}, bucket {self._num_committed - 1}: needs "
                f"{num_bytes / 1e6:.1f} MB, and {self._directory} has {there / 1e6:.1f} MB free"
            )

    def _reuse_segment(self, index: int) -> SharedMemorySegment | None:
        """One of the bucket's that nobody reads any more; those that are too small go."""
        for place in [place for place in self._free_segments if place[0] == index]:
            segment = place[1]
            if segment.try_lock():
                self._free_segments.remove(place)
                if segment.capacity_bytes >= self._requested_bytes:
                    return segment
                segment.unlink_file()
        return None

    def _release_open_segment(self) -> None:
        """What was to be laid was not."""
        if self._open_segment is not None:
            self._free_segments.append((self._num_committed, self._open_segment))
            self._open_segment = None

    def _list_segments(self) -> list[SharedMemorySegment]:
        """All that have memory."""
        free = [segment for _, segment in self._free_segments]
        versions = [segment for version in self._kept_versions for segment in version.values()]
        return [
            *versions,
            *self._committed_segments.values(),
            *free,
            *([self._open_segment] if self._open_segment else []),
        ]

    def _drop_unread_segments(self) -> None:
        """Give back what this version had no use for. What is read is not given back by that."""
        for place in list(self._free_segments):
            if place[1].try_lock():
                self._free_segments.remove(place)
                place[1].unlink_file()


class SharedMemoryReader:
    """A reader's end, on the publisher's node; `name` is whose weights are read, for errors.

    Buckets that found no room come by `fallback`; `failure` says of how many of the last version
    that is so.
    """

    def __init__(self, name: str, fallback: TransportReader) -> None:
        self._name = name
        self._fallback = fallback
        self.bytes_fetched = 0
        self.fallback_reason: str | None = None

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """The publisher's own memory: it is not laid anew as long as the arrays live."""
        self.fallback_reason = None
        pairs = zip(manifest.handles, manifest.buckets, strict=True)
        # First, so that they are held while the others come.
        laid = [
            map_segment(handle, bucket.num_bytes, self._name)
            if isinstance(handle, SegmentHandle)
            else None
            for handle, bucket in pairs
        ]
        others = _fallback_manifest(manifest)
        came = iter(self._fallback.fetch_buckets(others) if others.buckets else ())
        if others.buckets:
            self.fallback_reason = (
                f"weights version {manifest.version}: {len(others.buckets)} of {len(laid)} "
                f"buckets found no room in {SHARED_MEMORY_DIR} and came another way"
            )
        self.bytes_fetched += manifest.num_bytes
        return [next(came) if array is None else array for array in laid]

    def close(self) -> None:
        """Mappings go with their arrays."""
        self._fallback.close()


def _fallback_manifest(manifest: WeightManifest) -> WeightManifest:
    """The part of a version that is in no segment."""
    pairs = zip(manifest.buckets, manifest.handles, strict=True)
    others = [pair for pair in pairs if not isinstance(pair[1], SegmentHandle)]
    buckets, handles = zip(*others, strict=True) if others else ((), ())
    return replace(manifest, buckets=buckets, handles=handles)
