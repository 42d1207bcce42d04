"""Shared memory transport: the publisher writes buckets where readers on the same node map them.

The publisher fills its mapping of a file in /dev/shm and readers map the file read-only, so no copy
is made in transit. First-touch page faults make new files twice as slow to write as used ones.
Files of dropped versions are therefore reused, unless a reader still holds them. Memory is reserved
before it is written: if it is short, the bucket goes through the fallback transport, and the next
version tries again.

A segment is a file each for a bucket: a header, then the bytes. While a reader holds the file's
lock, the publisher does not write.
"""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.distributed.devices import has_local_gpu, pin_host_memory, unpin_host_memory
from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.pinned_memory import PinnedFiles
from streamrl.weights.rank_slices import Readers
from streamrl.weights.shared_copies import (
    SEGMENT_PREFIX,
    SHARED_MEMORY_DIR,
    measure_shared_memory,
    remove_unused_copies,
)
from streamrl.weights.transport import Transport, TransportReader, TransportSpec, TransportWriter
from streamrl.weights.transports import object_store
from streamrl.weights.versions import WeightBucket, WeightManifest

HEADER_BYTES = mmap.PAGESIZE
_HEADER_STRUCT = struct.Struct("<qq")  # version, bucket
UNCOMMITTED_HEADER = (-1, -1)


@dataclass(frozen=True)
class SegmentHandle:
    """File of a bucket; valid while the file's header has this version and bucket index."""

    path: str
    version: int
    bucket: int


class SharedMemorySegment:
    """Publisher's file in /dev/shm and its memory mapping: a header page, then `capacity_bytes`.

    The publisher holds the file's lock while writing. The file is sparse and only `reserved_bytes`
    are backed by memory: writing beyond them may kill the process with SIGBUS.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity_bytes = capacity
        self.reserved_bytes = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.ftruncate(self._fd, HEADER_BYTES + capacity)
        self._mapping: mmap.mmap | None = None
        self._pinned_address: int | None = None

    def reserve_memory(self, num_bytes: int) -> None:
        """Reserve memory for the header and `num_bytes`, map the file, and pin what is reserved.

        Raises OSError if memory is short.
        """
        if self._mapping is None:
            self._mapping = mmap.mmap(self._fd, HEADER_BYTES + self.capacity_bytes)
        if num_bytes > self.reserved_bytes or not self.reserved_bytes:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + num_bytes)
            self.reserved_bytes = num_bytes
            self._unpin()
            pinned_bytes = HEADER_BYTES + min(num_bytes, self.capacity_bytes)
            address = np.frombuffer(self._mapping, np.uint8).ctypes.data
            self._pinned_address = address if pin_host_memory(address, pinned_bytes) else None

    def view_bytes(self, num_bytes: int) -> Array:
        """Return the first `num_bytes` of the bucket's memory as a writable uint8 view."""
        assert self._mapping is not None
        return np.frombuffer(self._mapping, np.uint8, num_bytes, HEADER_BYTES)

    def write_header(self, version: int, bucket: int) -> None:
        assert self._mapping is not None
        _HEADER_STRUCT.pack_into(self._mapping, 0, version, bucket)

    def try_lock(self) -> bool:
        """Lock the segment and return True if it has no readers, else return False.

        Readers cannot map the segment until `unlock`.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let readers map the segment."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def unlink_file(self) -> None:
        """Unlink the file; current readers keep their mappings."""
        self.path.unlink(missing_ok=True)
        # Closing releases the lock, so unlink first. The mapping lives as long as its arrays.
        os.close(self._fd)
        self._unpin()
        self._mapping = None

    def _unpin(self) -> None:
        if self._pinned_address is not None:
            unpin_host_memory(self._pinned_address)
            self._pinned_address = None


def map_segment(handle: SegmentHandle, num_bytes: int, name: str) -> Array:
    """Map the bucket of a handle: uint8 [num_bytes], read-only, locked while the array lives.

    `name` names the model in errors. Raises WeightsError if the segment is gone or reused.
    """
    location = f"weights of {name} version {handle.version}, bucket {handle.bucket}"

    try:
        fd = os.open(handle.path, os.O_RDONLY)
    except OSError as error:
        raise WeightsError(f"{location}: gone, {handle.path}: {error.strerror}") from error
    try:
        # mmap duplicates the descriptor, which keeps the lock for the mapping's lifetime.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mapping = mmap.mmap(fd, HEADER_BYTES + num_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{location}: gone, {handle.path} is being overwritten") from error
    finally:
        os.close(fd)
    header = _HEADER_STRUCT.unpack_from(mapping)
    if header != (handle.version, handle.bucket):
        raise WeightsError(
            f"{location}: gone, {handle.path} holds version {header[0]}, bucket {header[1]}"
        )
    return np.frombuffer(mapping, np.uint8, num_bytes, HEADER_BYTES)


OWNER_SUFFIX = ".owner"
OUT_OF_MEMORY_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
CLEANUP_TIMEOUT_S = 2.0
"""Longest wait for killed publishers to exit; the next publisher removes the rest."""


class SharedMemoryWriter(TransportWriter):
    """Publisher's end of the shared memory transport. `token` distinguishes the runs on a node.

    The newest `keep_versions` versions are never overwritten. Segments take at most `max_bytes`:
    other users of /dev/shm, such as Ray's object store, crash once it is full. A bucket that
    exceeds the limit goes through the transport `fallback`. Raises WeightsError if `directory` is
    full or not usable.
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

    def set_readers(self, readers: Readers) -> None:
        self._fallback.set_readers(readers)

    def begin_version(self, version: int) -> None:
        """Start a version; shared memory of an uncommitted version becomes free for reuse."""
        self._release_open_segment()
        self._free_segments += self._committed_segments.items()
        self._committed_segments, self._num_committed = {}, 0
        self._version = version
        self._fallback.begin_version(version)

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Return shared memory if the bucket's size is known from the last version.

        Otherwise return staging memory, copied at commit: reserving shared memory for the largest
        possible bucket may fail although the actual bucket fits.
        """
        index = self._num_committed
        self._release_open_segment()
        self._requested_bytes = num_bytes
        expected = self._last_bucket_bytes[index] if index < len(self._last_bucket_bytes) else 0
        if expected:
            self._open_segment = self._acquire_segment(index, expected)
        if self._open_segment is not None:
            _, free_bytes = measure_shared_memory(self._directory)
            if num_bytes - self._open_segment.reserved_bytes <= free_bytes:
                return self._open_segment.view_bytes(num_bytes)
            self._release_open_segment()
        if self._staging_buffer.nbytes < num_bytes:
            self._staging_buffer = np.zeros(num_bytes, np.uint8)
        return self._staging_buffer[:num_bytes]

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        """Make a bucket readable and return its SegmentHandle.

        Without free shared memory, sends the bucket by the fallback transport and returns the
        handle of that transport.
        """
        index, segment = self._num_committed, self._open_segment
        self._num_committed += 1
        if segment is None:
            segment = self._acquire_segment(index, data.nbytes)
            if segment is None:
                self._require_free_memory(data.nbytes)
                return self._fallback.commit_bucket(bucket, data)
            segment.view_bytes(data.nbytes)[:] = data
        segment.write_header(self._version, index)
        segment.unlock()
        self._committed_segments[index] = segment
        self._open_segment = None
        return SegmentHandle(str(segment.path), self._version, index)

    def commit_version(self, manifest: WeightManifest) -> None:
        """Make the version readable; free the shared memory of versions beyond `keep_versions`."""
        self._fallback.commit_version(_make_fallback_manifest(manifest))
        self._drop_unread_segments()
        self._last_bucket_bytes = tuple(bucket.num_bytes for bucket in manifest.buckets)
        self._staging_buffer = np.empty(0, np.uint8)
        self._kept_versions.append(self._committed_segments)
        self._committed_segments = {}
        while len(self._kept_versions) > self._keep_versions:
            self._free_segments += self._kept_versions.pop(0).items()

    def close(self) -> None:
        """Unlink all segment files. Current readers keep their mappings; later readers fail."""
        for segment in self._list_segments():
            segment.unlink_file()
        self._open_segment, self._committed_segments = None, {}
        self._kept_versions, self._free_segments = [], []
        (self._directory / f"{self._name_prefix}{OWNER_SUFFIX}").unlink(missing_ok=True)
        if self._owner_fd >= 0:
            os.close(self._owner_fd)
            self._owner_fd = -1
        self._fallback.close()

    def _acquire_segment(self, index: int, num_bytes: int) -> SharedMemorySegment | None:
        """Return a shared memory segment with `num_bytes` reserved for bucket `index`.

        The segment, reused or new, is locked and has no readers. None if memory is short.
        """
        self._requested_bytes = max(self._requested_bytes, num_bytes)
        segment = self._reuse_segment(index)
        try:
            if segment is None:
                path = self._directory / f"{self._name_prefix}-{next(self._serials)}"
                segment = SharedMemorySegment(path, self._requested_bytes)
            used_bytes = sum(
                used_segment.reserved_bytes + HEADER_BYTES for used_segment in self._list_segments()
            )
            if used_bytes + max(num_bytes, segment.reserved_bytes) + HEADER_BYTES > self._max_bytes:
                segment.unlink_file()
                return None
            segment.reserve_memory(num_bytes)
        except OSError as error:
            if segment is not None:
                segment.unlink_file()
            if error.errno in OUT_OF_MEMORY_ERRNOS:
                return None
            raise WeightsError(
                f"weights version {self._version}, bucket {index}: cannot be written to "
                f"{self._directory}: {error.strerror}"
            ) from error
        segment.write_header(*UNCOMMITTED_HEADER)
        return segment

    def _require_free_memory(self, num_bytes: int) -> None:
        """Raise WeightsError if /dev/shm itself has less than `num_bytes` free.

        The fallback (Ray's object store) may live in the same memory and would crash. If only this
        publisher's `max_bytes` is exhausted, the fallback still has space.
        """
        _, free_bytes = measure_shared_memory(self._directory)
        if free_bytes < num_bytes:
            raise WeightsError(
                f"weights version {self._version}, bucket {self._num_committed - 1}: needs "
                f"{num_bytes / 1e6:.1f} MB, but {self._directory} has {free_bytes / 1e6:.1f} MB"
                " free"
            )

    def _reuse_segment(self, index: int) -> SharedMemorySegment | None:
        """Lock and return a free, unread shared memory segment of bucket `index`, or None.

        Unlinks free segments that are too small.
        """
        for entry in [entry for entry in self._free_segments if entry[0] == index]:
            segment = entry[1]
            if segment.try_lock():
                self._free_segments.remove(entry)
                if segment.capacity_bytes >= self._requested_bytes:
                    return segment
                segment.unlink_file()
        return None

    def _release_open_segment(self) -> None:
        """Free the shared memory of an allocated bucket that was not committed."""
        if self._open_segment is not None:
            self._free_segments.append((self._num_committed, self._open_segment))
            self._open_segment = None

    def _list_segments(self) -> list[SharedMemorySegment]:
        """Return all shared memory segments: of kept versions, of the next version, and free."""
        free = [segment for _, segment in self._free_segments]
        versions = [segment for version in self._kept_versions for segment in version.values()]
        return [
            *versions,
            *self._committed_segments.values(),
            *free,
            *([self._open_segment] if self._open_segment else []),
        ]

    def _drop_unread_segments(self) -> None:
        """Unlink free shared memory that the current version did not reuse and no reader maps."""
        for entry in list(self._free_segments):
            if entry[1].try_lock():
                self._free_segments.remove(entry)
                entry[1].unlink_file()


class SharedMemoryReader(TransportReader):
    """Reader's end of the shared memory transport, on the publisher's node.

    `name` names the model in errors. `fallback_reason` says how many buckets of the last version
    came through `fallback`; None if no bucket did.
    """

    def __init__(self, name: str, fallback: TransportReader) -> None:
        self._name = name
        self._fallback = fallback
        self._pinned_files = PinnedFiles()

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """Map a version's buckets in shared memory, not overwritten while the arrays live."""
        self.fallback_reason = None
        pairs = zip(manifest.handles, manifest.buckets, strict=True)
        # Map first: the mappings lock the segments while the fallback fetches the rest.
        mapped = [
            self._map_segment(handle, bucket.num_bytes)
            if isinstance(handle, SegmentHandle)
            else None
            for handle, bucket in pairs
        ]
        self._pinned_files.drop_removed()
        fallback = _make_fallback_manifest(manifest)
        fallback_arrays = iter(self._fallback.fetch_buckets(fallback) if fallback.buckets else ())
        if fallback.buckets:
            self.fallback_reason = (
                f"weights version {manifest.version}: {len(fallback.buckets)} of {len(mapped)} "
                "buckets did not fit in shared memory and used the fallback transport"
            )
        self.bytes_fetched += manifest.num_bytes
        return [next(fallback_arrays) if array is None else array for array in mapped]

    def close(self) -> None:
        self._pinned_files.close()
        self._fallback.close()

    def _map_segment(self, handle: SegmentHandle, num_bytes: int) -> Array:
        locked = map_segment(handle, num_bytes, self._name)
        if not has_local_gpu():
            return locked
        try:
            return self._pinned_files.view_range(handle.path, HEADER_BYTES, num_bytes, locked)
        except OSError:  # the publisher has just removed the file
            return locked


def _make_fallback_manifest(manifest: WeightManifest) -> WeightManifest:
    """Return the manifest of those buckets that the fallback transport carries."""
    pairs = zip(manifest.buckets, manifest.handles, strict=True)
    entries = [pair for pair in pairs if not isinstance(pair[1], SegmentHandle)]
    buckets, handles = zip(*entries, strict=True) if entries else ((), ())
    return replace(manifest, buckets=buckets, handles=handles)


def remove_stale_segments(directory: Path = SHARED_MEMORY_DIR) -> list[str]:
    """Remove the segment files of this user's dead publishers; return the files' names.

    Copies that no process uses are removed, too.
    """
    remove_unused_copies(directory)
    removed = []
    for owner in directory.glob(f"{SEGMENT_PREFIX}*{OWNER_SUFFIX}"):
        with contextlib.suppress(OSError):  # alive, another user's, or removed concurrently
            if owner.stat().st_uid == os.getuid():
                removed += _remove_segments_of(owner)
    return removed


def _remove_segments_of(owner: Path) -> list[str]:
    """Remove the files of the publisher with this owner file, and return their names.

    Raises BlockingIOError if the publisher is alive.
    """
    fd = os.open(owner, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Remove the owner file last: the search for stale segments starts from it.
        files = [*owner.parent.glob(f"{owner.name.removesuffix(OWNER_SUFFIX)}-*"), owner]
        for path in files:
            path.unlink(missing_ok=True)
        return [path.name for path in files]
    finally:
        os.close(fd)


def claim_name_prefix(directory: Path, token: str) -> tuple[str, int]:
    """Claim an unused name prefix for segment files.

    Returns the prefix and the locked file descriptor of its owner file.
    """
    while True:
        name = f"{SEGMENT_PREFIX}{token}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            fd = os.open(
                directory / f"{name}{OWNER_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600
            )
        except OSError as error:
            raise WeightsError(f"weights: cannot write to {directory}: {error}") from error
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return name, fd
        # Another publisher's cleanup removed the file before it was locked: try another name.
        os.close(fd)


def make_writer(spec: TransportSpec, role: str) -> SharedMemoryWriter:
    return SharedMemoryWriter(
        f"{spec.token}-{role}",
        object_store.make_writer(spec, role),
        keep_versions=spec.keep_versions,
        max_bytes=spec.max_bytes[role],
    )


def make_reader(spec: TransportSpec, role: str, reader: str) -> SharedMemoryReader:
    return SharedMemoryReader(role, object_store.make_reader(spec, role, reader))


def remove_segments(spec: TransportSpec) -> None:
    """Remove the segments of this run that killed publishers left."""
    deadline = time.monotonic() + CLEANUP_TIMEOUT_S
    # A segment counts as stale only after its publisher has exited, which may take a moment.
    while any(SHARED_MEMORY_DIR.glob(f"{SEGMENT_PREFIX}{spec.token}*")):
        remove_stale_segments()
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


TRANSPORT = Transport(make_writer, make_reader, clean_up=remove_segments)
