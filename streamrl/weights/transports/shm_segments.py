"""Files in shared memory, and who may lay them anew: the locks behind `shared_memory`.

A segment is a file in /dev/shm: a header page that says which bucket of which version it holds, and
the bucket. Its publisher locks it alone while it is laid, and readers together as long as they have
arrays of it: a mapping holds a descriptor of the file, and that holds the lock. The kernel takes
the locks of the dead away.

The files of a publisher begin with one name, `streamrl-<token>-<pid>-<random>`. One of them,
`.owner`, is locked as long as it lives: where it is not, the next publisher clears up.
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
#: Version and bucket.
_HEADER_STRUCT = struct.Struct("<qq")
UNCOMMITTED_HEADER = (-1, -1)


@dataclass(frozen=True)
class SegmentHandle:
    """The file that holds a bucket, as long as its header says so."""

    path: str
    version: int
    bucket: int


class SharedMemorySegment:
    """A file of the publisher's and its mapping: `capacity` bytes behind the header.

    Locked by the publisher while it is laid. Of the file, which is sparse, only `reserved_bytes`
    bytes are sure to be there: to write more could end the process with a SIGBUS.
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
        """Have memory for so many bytes and the header. Raises OSError where there is none."""
        if num_bytes > self.reserved_bytes or not self.reserved_bytes:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + num_bytes)
            self.reserved_bytes = num_bytes
        if self._mapping is None:
            self._mapping = mmap.mmap(self._fd, HEADER_BYTES + self.capacity_bytes)

    def view_bytes(self, num_bytes: int) -> Array:
        """The first so many bytes, writable."""
        assert self._mapping is not None
        return np.frombuffer(self._mapping, np.uint8, num_bytes, HEADER_BYTES)

    def write_header(self, version: int, bucket: int) -> None:
        """Say what it holds."""
        assert self._mapping is not None
        _HEADER_STRUCT.pack_into(self._mapping, 0, version, bucket)

    def try_lock(self) -> bool:
        """Whether nobody reads it; nobody can from now on, if so."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let it be read."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def unlink_file(self) -> None:
        """Take its name away; those who read it keep what they have."""
        self.path.unlink(missing_ok=True)
        # Not before the name is gone: to close is to unlock. The mapping goes with its arrays.
        os.close(self._fd)
        self._mapping = None


def map_segment(handle: SegmentHandle, num_bytes: int, name: str) -> Array:
    """The bucket a handle names, uint8 [num_bytes], read-only and locked as long as it lives.

    `name` is whose weights they are. Raises WeightsError if the segment holds something else, or
    is gone.
    """
    place = f"weights of {name} version {handle.version}, bucket {handle.bucket}"
    try:
        file = os.open(handle.path, os.O_RDONLY)
    except OSError as error:
        raise WeightsError(f"{place}: gone, {handle.path}: {error.strerror}") from error
    try:
        # The mapping has a descriptor of its own, which keeps the lock until it goes.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mapping = mmap.mmap(file, HEADER_BYTES + num_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{place}: gone, {handle.path} is being laid anew") from error
    finally:
        os.close(file)
    holds = _HEADER_STRUCT.unpack_from(mapping)
    if holds != (handle.version, handle.bucket):
        raise WeightsError(
            f"{place}: gone, {handle.path} holds version {holds[0]}, bucket {holds[1]}"
        )
    return np.frombuffer(mapping, np.uint8, num_bytes, HEADER_BYTES)


def get_free_bytes(directory: Path = SHARED_MEMORY_DIR) -> int:
    """What can still be written there; 0 if there is no such directory."""
    return _count_block_bytes(directory, "f_bavail")


def get_total_bytes(directory: Path = SHARED_MEMORY_DIR) -> int:
    """What could be written there if nothing were; 0 if there is no such directory."""
    return _count_block_bytes(directory, "f_blocks")


def _count_block_bytes(directory: Path, kind: str) -> int:
    """The bytes of a file system's blocks of a kind, by its name in statvfs."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return int(getattr(found, kind)) * found.f_frsize


def remove_stale_segments(directory: Path = SHARED_MEMORY_DIR) -> list[str]:
    """Take away what dead publishers of this user left; the names of those files."""
    gone = []
    for owner in directory.glob(f"{SEGMENT_PREFIX}*{OWNER_SUFFIX}"):
        with contextlib.suppress(OSError):  # another user's, or somebody else clears up
            if owner.stat().st_uid == os.getuid():
                gone += _remove_segments_of(owner)
    return gone


def _remove_segments_of(owner: Path) -> list[str]:
    file = os.open(owner, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The owner last: without it nobody would look for the others.
        files = [*owner.parent.glob(f"{owner.name.removesuffix(OWNER_SUFFIX)}-*"), owner]
        for path in files:
            path.unlink(missing_ok=True)
        return [path.name for path in files]
    finally:
        os.close(file)


def claim_name_prefix(directory: Path, token: str) -> tuple[str, int]:
    """A name no other publisher has, and the open file that says we live."""
    while True:
        name = f"{SEGMENT_PREFIX}{token}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            file = os.open(
                directory / f"{name}{OWNER_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600
            )
        except OSError as error:
            raise WeightsError(f"weights: cannot write to {directory}: {error}") from error
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return name, file
        os.close(file)  # one who clears up took it for a dead one's before it was locked
