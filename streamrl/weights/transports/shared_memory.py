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
from streamrl.weights.manifest import Bucket, WeightManifest
from streamrl.weights.transport_protocol import Inlet, Outlet, seal_copy
from streamrl.weights.transports.shm_segments import (
    HEADER_BYTES,
    LAYING,
    OWNER,
    SHARED_MEMORY_DIR,
    Segment,
    SegmentHandle,
    clear_up,
    free_bytes,
    map_segment,
    own_name,
)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
"""What the system says where there is no memory to be had."""


class SharedMemoryOutlet:
    """The publisher's end. `token` tells a run from others on the node; see the module.

    The newest `keep_versions` versions stay as they are. Its files have at most `max_bytes`: what
    lies in the same memory, as Ray's object store, dies where others have taken all of it. A bucket
    for which these do not suffice goes through `fallback`. Raises WeightsError where `directory` is
    full, or cannot be used for another reason.
    """

    def __init__(
        self,
        token: str,
        fallback: Outlet,
        *,
        keep_versions: int,
        max_bytes: int = sys.maxsize,
        directory: Path = SHARED_MEMORY_DIR,
    ) -> None:
        clear_up(directory)
        self._fallback = fallback
        self._directory = directory
        self._keep_versions = keep_versions
        self._max_bytes = max_bytes
        self._name, self._owner = own_name(directory, token)
        self._serials = itertools.count()
        self._version = -1
        self._own_room = np.empty(0, np.uint8)
        self._asked = 0
        self._num_sealed = 0
        self._laying: Segment | None = None
        self._laid: dict[int, Segment] = {}
        self._kept: list[dict[int, Segment]] = []
        self._free: list[tuple[int, Segment]] = []
        self._sizes: tuple[int, ...] = ()

    def set_readers(self, names: Sequence[str]) -> None:
        """It matters to the fallback, if to anybody."""
        self._fallback.set_readers(names)

    def begin(self, version: int) -> None:
        """What was laid of a version that was never finished is free again."""
        self._put_back()
        self._free += self._laid.items()
        self._laid, self._num_sealed = {}, 0
        self._version = version
        self._fallback.begin(version)

    def room(self, num_bytes: int) -> Array:
        """Where the bucket will be read, if it is known how large it is: as large as the last time.

        Otherwise it is laid elsewhere and moved when it is sealed, since there may be no room for
        the largest one it could be.
        """
        index = self._num_sealed
        self._put_back()
        self._asked = num_bytes
        expected = self._sizes[index] if index < len(self._sizes) else 0
        self._laying = self._take(index, expected) if expected else None
        if self._laying is not None:
            if num_bytes - self._laying.reserved <= free_bytes(self._directory):
                return self._laying.bytes(num_bytes)
            self._put_back()
        if self._own_room.nbytes < num_bytes:
            self._own_room = np.zeros(num_bytes, np.uint8)
        return self._own_room[:num_bytes]

    def seal(self, bucket: Bucket, data: Array) -> Any:
        """Where the bucket is, or its handle in the fallback."""
        index, segment = self._num_sealed, self._laying
        self._num_sealed += 1
        if segment is None:
            segment = self._take(index, data.nbytes)
            if segment is None:
                self._check_fallback(data.nbytes)
                return seal_copy(self._fallback, bucket, data)
            segment.bytes(data.nbytes)[:] = data
        segment.label(self._version, index)
        segment.unlock()
        self._laid[index] = segment
        self._laying = None
        return SegmentHandle(str(segment.path), self._version, index)

    def finish(self, manifest: WeightManifest) -> None:
        """The version is kept; the one that no longer is will be laid anew."""
        self._fallback.finish(_elsewhere(manifest))
        self._drop_unread()
        self._sizes = tuple(bucket.num_bytes for bucket in manifest.buckets)
        self._own_room = np.empty(0, np.uint8)
        self._kept.append(self._laid)
        self._laid = {}
        while len(self._kept) > self._keep_versions:
            self._free += self._kept.pop(0).items()

    def close(self) -> None:
        """Take all names away: who reads a version goes on, who comes later finds none."""
        for segment in self._segments():
            segment.drop()
        self._laying, self._laid, self._kept, self._free = None, {}, [], []
        (self._directory / f"{self._name}{OWNER}").unlink(missing_ok=True)
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1
        self._fallback.close()

    def _take(self, index: int, num_bytes: int) -> Segment | None:
        """A segment nobody reads, locked, with memory for so many bytes; None without room."""
        segment = self._recycled(index)
        try:
            if segment is None:
                path = self._directory / f"{self._name}-{next(self._serials)}"
                segment = Segment(path, self._asked)
            taken = sum(other.reserved + HEADER_BYTES for other in self._segments())
            if taken + max(num_bytes, segment.reserved) + HEADER_BYTES > self._max_bytes:
                segment.drop()
                return None
            segment.reserve(num_bytes)
        except OSError as error:
            if segment is not None:
                segment.drop()
            if error.errno in NO_ROOM:
                return None
            raise WeightsError(
                f"weights version {self._version}, bucket {index}: cannot be laid in "
                f"{self._directory}: {error.strerror}"
            ) from error
        segment.label(*LAYING)
        return segment

    def _check_fallback(self, num_bytes: int) -> None:
        """Raise WeightsError if the memory is full, of whatever: the fallback's may be the same.

        Ray's store dies of that. Full of what this publisher may take at most, it has room.
        """
        there = free_bytes(self._directory)
        if there < num_bytes:
            raise WeightsError(
                f"weights version {self._version}, bucket {self._num_sealed - 1}: needs "
                f"{num_bytes / 1e6:.1f} MB, and {self._directory} has {there / 1e6:.1f} MB free"
            )

    def _recycled(self, index: int) -> Segment | None:
        """One of the bucket's that nobody reads any more; those that are too small go."""
        for place in [place for place in self._free if place[0] == index]:
            segment = place[1]
            if segment.try_lock():
                self._free.remove(place)
                if segment.capacity >= self._asked:
                    return segment
                segment.drop()
        return None

    def _put_back(self) -> None:
        """What was to be laid was not."""
        if self._laying is not None:
            self._free.append((self._num_sealed, self._laying))
            self._laying = None

    def _segments(self) -> list[Segment]:
        """All that have memory."""
        free = [segment for _, segment in self._free]
        versions = [segment for version in self._kept for segment in version.values()]
        return [*versions, *self._laid.values(), *free, *([self._laying] if self._laying else [])]

    def _drop_unread(self) -> None:
        """Give back what this version had no use for. What is read is not given back by that."""
        for place in list(self._free):
            if place[1].try_lock():
                self._free.remove(place)
                place[1].drop()


class SharedMemoryInlet:
    """A reader's end, on the publisher's node; `name` is whose weights are read, for errors.

    Buckets that found no room come by `fallback`; `failure` says of how many of the last version
    that is so.
    """

    def __init__(self, name: str, fallback: Inlet) -> None:
        self._name = name
        self._fallback = fallback
        self.bytes_fetched = 0
        self.failure: str | None = None

    def fetch(self, manifest: WeightManifest) -> Sequence[Array]:
        """The publisher's own memory: it is not laid anew as long as the arrays live."""
        self.failure = None
        pairs = zip(manifest.handles, manifest.buckets, strict=True)
        # First, so that they are held while the others come.
        laid = [
            map_segment(handle, bucket.num_bytes, self._name)
            if isinstance(handle, SegmentHandle)
            else None
            for handle, bucket in pairs
        ]
        others = _elsewhere(manifest)
        came = iter(self._fallback.fetch(others) if others.buckets else ())
        if others.buckets:
            self.failure = (
                f"weights version {manifest.version}: {len(others.buckets)} of {len(laid)} "
                f"buckets found no room in {SHARED_MEMORY_DIR} and came another way"
            )
        self.bytes_fetched += manifest.num_bytes
        return [next(came) if array is None else array for array in laid]

    def close(self) -> None:
        """Mappings go with their arrays."""
        self._fallback.close()


def _elsewhere(manifest: WeightManifest) -> WeightManifest:
    """The part of a version that is in no segment."""
    pairs = zip(manifest.buckets, manifest.handles, strict=True)
    others = [pair for pair in pairs if not isinstance(pair[1], SegmentHandle)]
    buckets, handles = zip(*others, strict=True) if others else ((), ())
    return replace(manifest, buckets=buckets, handles=handles)
