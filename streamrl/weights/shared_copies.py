"""Bytes in shared memory, a single pinned copy per node for all processes that hold equal ones.

The name of a copy's file in /dev/shm has the run's token and the checksum of the bytes, so that
processes find each other's copy without knowing of each other. A file gets its name once it is
complete, and never changes. Its processes hold a shared lock on it: a file that nobody locks is
unused.
"""

import fcntl
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

import xxhash

from streamrl.errors import ConfigError
from streamrl.messages import Array
from streamrl.weights.config import RUN_TOKEN_ENV
from streamrl.weights.pinned_memory import PinnedFile

SHARED_MEMORY_DIR = Path("/dev/shm")
SEGMENT_PREFIX = "streamrl-"
COPY_PREFIX = f"{SEGMENT_PREFIX}copy-"


class SharedCopy:
    """A copy of bytes for all processes of the run on the node; the last of them removes it.

    memory: uint8 [num_bytes], pinned if the process has a GPU. Do not write to it.
    """

    def __init__(self, data: Array, subject: str, directory: Path = SHARED_MEMORY_DIR) -> None:
        """Share uint8 `data`, not empty.

        Raises ConfigError, which begins with `subject`, if `directory` is full or not usable.
        """
        checksum = xxhash.xxh3_128_hexdigest(data.data)
        token = os.environ.get(RUN_TOKEN_ENV, f"user{os.getuid()}")
        path = directory / f"{COPY_PREFIX}{token}-{checksum}"
        try:
            file = _open_copy(path, data)
        except OSError as error:
            _, free = measure_shared_memory(directory)
            raise ConfigError(
                f"{subject}: {directory} has no room for {data.nbytes / 1e6:.1f} MB more"
                f" ({error.strerror}; {free / 1e6:.1f} MB are free): enlarge it"
            ) from error
        weakref.finalize(self, _release, file, path)
        self._file = PinnedFile(f"/proc/self/fd/{file.fileno()}", data.nbytes)
        self.memory = self._file.memory


def measure_shared_memory(directory: Path = SHARED_MEMORY_DIR) -> tuple[int, int]:
    """Return total and free bytes of the directory's file system; 0 without such a directory."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def _open_copy(path: Path, data: Array) -> IO[bytes]:
    """Open a copy, created if need be, and lock it for as long as the file is open."""
    while True:
        with suppress(FileNotFoundError):
            file = path.open("r+b")
            fcntl.flock(file, fcntl.LOCK_SH)  # `_release` holds the other lock for an instant only
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()
        file = os.fdopen(os.open(path.parent, os.O_RDWR | os.O_TMPFILE, 0o600), "r+b")
        fcntl.flock(file, fcntl.LOCK_SH)
        os.posix_fallocate(file.fileno(), 0, data.nbytes)
        file.write(data.data)
        file.flush()
        with suppress(FileExistsError):  # another process was faster
            # A directory, of no effect, makes Python use linkat, which follows the link in /proc.
            os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=file.fileno())
            return file
        file.close()


def _release(file: IO[bytes], path: Path) -> None:
    """Close a copy; remove it if no other process uses it."""
    with file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            path.unlink(missing_ok=True)


def remove_unused_copies(directory: Path = SHARED_MEMORY_DIR) -> None:
    """Remove the copies of this user that no process uses."""
    for path in directory.glob(f"{COPY_PREFIX}*"):
        with suppress(OSError):  # another user's, or removed concurrently
            _release(path.open("r+b"), path)


def remove_run_copies(token: str) -> None:
    """Remove the copies of a run that has ended; processes that still exit keep their memory."""
    for path in SHARED_MEMORY_DIR.glob(f"{COPY_PREFIX}{token}-*"):
        path.unlink(missing_ok=True)
