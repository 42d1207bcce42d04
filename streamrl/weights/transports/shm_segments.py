"""Segments in /dev/shm with file locks that decide when a segment may be overwritten.

A segment is a file: a header page with version and bucket index, then the bucket. The publisher
holds an exclusive flock while writing. Readers hold shared locks while their arrays live: a mapping
keeps a descriptor of the file, which keeps the lock. The kernel releases the locks of dead
processes.

All files of a publisher share a prefix, `streamrl-<token>-<pid>-<random>`. The publisher locks the
file `.owner` for its lifetime; if the lock is free, the next publisher on the node removes the
files.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamrl.errors import WeightsError
from streamrl.messages import Array

SHARED_MEMORY_DIR = Path("/dev/shm")
SEGMENT_PREFIX = "streamrl-"
OWNER_SUFFIX = ".owner"
HEADER_BYTES = mmap.PAGESIZE
_HEADER_STRUCT = struct.Struct("<qq")  # version, bucket
UNCOMMITTED_HEADER = (-1, -1)


@dataclass(frozen=True)
class SegmentHandle:
    """File that holds a bucket; valid while the file's header has this version and bucket index."""

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

    def reserve_memory(self, num_bytes: int) -> None:
        """Reserve memory for the header and `num_bytes`, and map the file.

        Raises OSError if memory is short.
        """
        if num_bytes > self.reserved_bytes or not self.reserved_bytes:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + num_bytes)
            self.reserved_bytes = num_bytes
        if self._mapping is None:
            self._mapping = mmap.mmap(self._fd, HEADER_BYTES + self.capacity_bytes)

    def view_bytes(self, num_bytes: int) -> Array:
        """Return the first `num_bytes` after the header as a writable uint8 view."""
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
        self._mapping = None


def map_segment(handle: SegmentHandle, num_bytes: int, name: str) -> Array:
    """Map the bucket of a handle: uint8 [num_bytes], read-only, locked while the array lives.

    `name` names the model in errors. Raises WeightsError if the segment is gone or reused.
    """
    place = f"weights of {name} version {handle.version}, bucket {handle.bucket}"
    try:
        fd = os.open(handle.path, os.O_RDONLY)
    except OSError as error:
        raise WeightsError(f"{place}: gone, {handle.path}: {error.strerror}") from error
    try:
        # mmap duplicates the descriptor, which keeps the lock for the mapping's lifetime.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mapping = mmap.mmap(fd, HEADER_BYTES + num_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{place}: gone, {handle.path} is being overwritten") from error
    finally:
        os.close(fd)
    header = _HEADER_STRUCT.unpack_from(mapping)
    if header != (handle.version, handle.bucket):
        raise WeightsError(
            f"{place}: gone, {handle.path} holds version {header[0]}, bucket {header[1]}"
        )
    return np.frombuffer(mapping, np.uint8, num_bytes, HEADER_BYTES)


def get_free_bytes(directory: Path = SHARED_MEMORY_DIR) -> int:
    """Return the free bytes of the directory's file system; 0 if the directory does not exist."""
    return _count_block_bytes(directory, "f_bavail")


def get_total_bytes(directory: Path = SHARED_MEMORY_DIR) -> int:
    """Return the size of the directory's file system in bytes; 0 without such a directory."""
    return _count_block_bytes(directory, "f_blocks")


def _count_block_bytes(directory: Path, statvfs_field: str) -> int:
    try:
        stats = os.statvfs(directory)
    except OSError:
        return 0
    return int(getattr(stats, statvfs_field)) * stats.f_frsize


def remove_stale_segments(directory: Path = SHARED_MEMORY_DIR) -> list[str]:
    """Remove the segment files of this user's dead publishers; return the files' names."""
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
