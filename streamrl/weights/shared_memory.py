"""Weights through the memory of one node: a bucket is laid where it is read.

The publisher lays a bucket straight into its mapping of a file in /dev/shm and readers map that
read-only, so nothing is copied on the way. Pages that were never touched cost twice as much as
memory that was, so the files of versions that are no longer kept are laid anew, unless somebody
still reads them.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.manifest import Bucket, WeightManifest
from streamrl.weights.segments import (
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


class SharedMemoryOutlet:
    """The publisher's end. `token` tells a run from others on the node; see the module.

    The newest `keep_versions` versions stay as they are. Raises WeightsError where `directory`
    cannot be used, or has no room for a bucket.
    """

    def __init__(
        self, token: str, *, keep_versions: int, directory: Path = SHARED_MEMORY_DIR
    ) -> None:
        clear_up(directory)
        self._directory = directory
        self._keep_versions = keep_versions
        self._name, self._owner = own_name(directory, token)
        self._serials = itertools.count()
        self._version = -1
        self._own_room = np.empty(0, np.uint8)
        self._asked = 0
        self._laying: Segment | None = None
        self._laid: list[Segment] = []
        self._kept: list[list[Segment]] = []
        self._free: list[tuple[int, Segment]] = []
        self._sizes: tuple[int, ...] = ()

    def set_readers(self, names: Sequence[str]) -> None:
        """It does not matter who reads."""

    def begin(self, version: int) -> None:
        """What was laid of a version that was never finished is free again."""
        half_laid = [*self._laid, *([self._laying] if self._laying else [])]
        self._free += enumerate(half_laid)
        self._laid, self._laying = [], None
        self._version = version

    def room(self, num_bytes: int) -> Array:
        """Where the bucket will be read, if it is known how large it is: as large as the last time.

        Otherwise it is laid elsewhere and moved when it is sealed, since there may be no room for
        the largest one it could be.
        """
        index = len(self._laid)
        self._asked = num_bytes
        expected = self._sizes[index] if index < len(self._sizes) else 0
        if expected and num_bytes - expected <= free_bytes(self._directory):
            self._laying = self._take(index, expected)
            return self._laying.bytes(num_bytes)
        if self._own_room.nbytes < num_bytes:
            self._own_room = np.zeros(num_bytes, np.uint8)
        return self._own_room[:num_bytes]

    def seal(self, bucket: Bucket, data: Array) -> SegmentHandle:
        """Where the bucket is."""
        index = len(self._laid)
        segment = self._laying
        if segment is None:
            segment = self._take(index, data.nbytes)
            segment.bytes(data.nbytes)[:] = data
        segment.label(self._version, index)
        segment.unlock()
        self._laid.append(segment)
        self._laying = None
        return SegmentHandle(str(segment.path), self._version, index)

    def finish(self, manifest: WeightManifest) -> None:
        """The version is kept; the one that no longer is will be laid anew."""
        self._drop_free()
        self._sizes = tuple(bucket.num_bytes for bucket in manifest.buckets)
        self._own_room = np.empty(0, np.uint8)
        self._kept.append(self._laid)
        self._laid = []
        while len(self._kept) > self._keep_versions:
            self._free += enumerate(self._kept.pop(0))

    def close(self) -> None:
        """Take all names away: who reads a version goes on, who comes later finds none."""
        self.begin(self._version)
        for segments in self._kept:
            self._free += enumerate(segments)
        self._kept = []
        self._drop_free()
        (self._directory / f"{self._name}{OWNER}").unlink(missing_ok=True)
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1

    def _take(self, index: int, num_bytes: int) -> Segment:
        """A segment nobody reads, locked, with memory for so many bytes."""
        segment = self._recycled(index) or self._new_segment(index, num_bytes)
        try:
            segment.reserve(num_bytes)
        except OSError as error:
            segment.drop()
            raise self._lacks_room(index, num_bytes, error) from error
        segment.label(*LAYING)
        return segment

    def _recycled(self, index: int) -> Segment | None:
        for place in [place for place in self._free if place[0] == index]:
            self._free.remove(place)
            segment = place[1]
            if segment.capacity >= self._asked and segment.try_lock():
                return segment
            segment.drop()
        return None

    def _new_segment(self, index: int, num_bytes: int) -> Segment:
        path = self._directory / f"{self._name}-{next(self._serials)}"
        try:
            return Segment(path, self._asked)
        except OSError as error:
            raise self._lacks_room(index, num_bytes, error) from error

    def _lacks_room(self, index: int, num_bytes: int, error: OSError) -> WeightsError:
        there = free_bytes(self._directory)
        return WeightsError(
            f"weights version {self._version}, bucket {index}: needs {num_bytes / 1e6:.1f} MB in "
            f"{self._directory}, where {there / 1e6:.1f} MB are free ({error.strerror}); "
            f"{len(self._kept)} older versions are kept there"
        )

    def _drop_free(self) -> None:
        for _, segment in self._free:
            segment.drop()
        self._free = []


class SharedMemoryInlet:
    """A reader's end, on the publisher's node; `name` is whose weights are read, for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.bytes_fetched = 0
        self.failure: str | None = None

    def fetch(self, manifest: WeightManifest) -> Sequence[Array]:
        """The publisher's own memory: it is not laid anew as long as the arrays live."""
        pairs = zip(manifest.handles, manifest.buckets, strict=True)
        found = [map_segment(handle, bucket.num_bytes, self._name) for handle, bucket in pairs]
        self.bytes_fetched += manifest.num_bytes
        return found

    def close(self) -> None:
        """Mappings go with their arrays."""
