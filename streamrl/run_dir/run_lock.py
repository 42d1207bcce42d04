"""Lock of a run directory: a single owner at a time, also across nodes.

The owner process holds flock on `owner.lock` and writes its identity into the file. The kernel
drops the lock when the process ends, however it ends, so on the same machine a dead owner is
detected at once. Where flock does not work across nodes, or at all, the heartbeat decides: the
owner touches the file every HEARTBEAT_INTERVAL_S, and a process on another node watches for a
change of the mtime. Clocks of different nodes are never compared.

The lock is not inherited: exec and fork close the file in the child.

Decision of `_check_free`, given the identity in the file:

    flock taken by another process          -> in use
    same boot, flock works                  -> free (the kernel knows)
    same boot and pid namespace, no flock   -> in use if pid and start time match
    otherwise                               -> in use if the heartbeat moves
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import msgspec

from streamrl.errors import ConfigError, StreamError
from streamrl.files.atomic_write import wrap_os_errors
from streamrl.files.bounded_read import open_regular_file, read_small_json, wrap_file_errors

LOCK_FILE = "owner.lock"
HEARTBEAT_INTERVAL_S = 4.0
HEARTBEAT_TIMEOUT_S = 5 * HEARTBEAT_INTERVAL_S
"""Time without a heartbeat after which an owner on another node counts as dead."""
FORK_CLOSE_TIMEOUT_S = 5.0
"""Longest wait for a forked child of a dead owner to close the inherited lock file."""
_POLL_INTERVAL_S = 0.5
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
"""Number in a lock file; the bound is above any valid pid, tick count or epoch second."""
_NO_FLOCK_ERRNOS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Error numbers of flock on a file system without flock."""
_LOCKED_ERRNOS = (errno.EAGAIN, errno.EACCES)
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
"""O_NOFOLLOW: a symlink could make the lock overwrite another file. O_NONBLOCK: a FIFO blocks."""
WANDB_LINK_PATTERN = "wandb/*run-*/logs/debug-core.log"
"""wandb links to the log of its service, outside the run; no code here opens the link."""
_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class InUseError(ConfigError):
    """Error: a live process owns the run directory, so this command cannot use it."""


@dataclass(frozen=True)
class RunOwner:
    """Identity of the process that owns a run directory, as its lock file holds it.

    boot, processes: kernel boot id and pid namespace; empty if unavailable.
    start: start time of the process, clock ticks since boot.
    since: start of ownership, epoch seconds.
    """

    id: str
    host: str
    boot: str
    processes: str
    pid: _Count
    start: _Count
    since: Annotated[float, msgspec.Meta(ge=0, le=1e12)]

    @classmethod
    def from_this_process(cls) -> "RunOwner":
        pid, boot, processes = os.getpid(), "", ""
        with contextlib.suppress(OSError):
            boot = _BOOT_ID_PATH.read_text().strip()
        with contextlib.suppress(OSError):
            processes = os.readlink("/proc/self/ns/pid")
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            boot=boot,
            processes=processes,
            pid=pid,
            start=_read_start_ticks(pid),
            since=time.time(),
        )

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"since {since} on {self.host}, pid {self.pid}"


class RunLock:
    """Ownership of a run directory by this process, until `release` or the end of the process."""

    def __init__(self, file: int, path: Path, owner: RunOwner) -> None:
        self._file, self._path, self._owner = file, path, owner
        self._release_event = threading.Event()
        _held_locks.add(self)
        threading.Thread(target=self._run_heartbeat, name="run-lock", daemon=True).start()

    def _run_heartbeat(self) -> None:
        """Touch the lock file regularly until the release, so that other nodes see a live owner."""
        while not self._release_event.wait(HEARTBEAT_INTERVAL_S):
            # By descriptor, not by path: overwriting a run moves its folder, lock included.
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def verify_owner(self) -> None:
        """Raise StreamError if another process has taken over the run directory.

        A process on another node can take over if neither flock nor the heartbeat arrived in time.
        """
        other = self._find_other_owner()
        if other is not None:
            raise StreamError(
                f"run directory {self._path.parent} was taken over {other}: this run ends and"
                " leaves the directory to that command"
            )

    def _find_other_owner(self) -> RunOwner | None:
        """Return the owner of the run directory if that is not this process."""
        owner = read_owner(self._path.parent)
        return None if owner is None or owner.id == self._owner.id else owner

    def set_folder(self, folder: Path) -> None:
        """Set the path of the run directory after it has been moved."""
        self._path = folder / LOCK_FILE

    def release(self) -> None:
        """Give up the run directory.

        The lock file stays, without an owner: removing the file would race with a new owner.
        """
        if self._release_event.is_set():
            return
        self._release_event.set()
        with contextlib.suppress(OSError):
            if self._find_other_owner() is None:
                os.ftruncate(self._file, 0)
        self.close()

    def close(self) -> None:
        """Close the lock file, which drops flock, and leave the owner's identity in it."""
        _held_locks.discard(self)
        with contextlib.suppress(OSError):
            os.close(self._file)


_held_locks: set[RunLock] = set()


def _close_inherited_locks() -> None:
    """Close the run locks in a forked child, whose copies would outlive the owner."""
    for lock in list(_held_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_inherited_locks)


def acquire_run_lock(folder: Path, *, status: Callable[[str], None] = lambda text: None) -> RunLock:
    """Make this process the owner of an existing run directory.

    status: receives a line during a wait for the heartbeat of an owner on another node, which takes
    up to HEARTBEAT_TIMEOUT_S.

    Raises ConfigError if a live process owns the directory, or if the directory contains links that
    lead outside.
    """
    check_links(folder)
    path = folder / LOCK_FILE
    with wrap_os_errors(f"{path} cannot be locked", ConfigError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o644)
    try:
        with wrap_os_errors(f"{path} cannot be locked", ConfigError):
            _check_free(folder, file, fcntl.LOCK_EX, status)
            owner = RunOwner.from_this_process()
            text = json.dumps(asdict(owner)).encode() + b"\n"
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))
            os.fsync(file)
        return RunLock(file, path, owner)
    except BaseException:
        os.close(file)
        raise


def check_links(folder: Path) -> None:
    """Raise ConfigError if a run directory contains an outside link, a FIFO or a device.

    A run writes and removes files under predictable names, so such a link could redirect the run.
    Does not follow links.
    """
    root, pending = folder.resolve(), [folder]
    while pending:
        current = pending.pop()
        entries: list[os.DirEntry[str]] = []
        # A running run may remove a folder meanwhile.
        with wrap_file_errors(current), contextlib.suppress(FileNotFoundError):
            entries = list(os.scandir(current))
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            elif entry.is_symlink() and not _is_inside(Path(entry.path), folder, root):
                raise ConfigError(
                    f"run directory {folder}: {entry.path} is a link to"
                    f" {os.readlink(entry.path)!r}, which is outside; remove the link, or replace"
                    " it by its target"
                )
            elif not entry.is_symlink() and not entry.is_file(follow_symlinks=False):
                raise ConfigError(f"run directory {folder}: {entry.path}: not a regular file")


def _is_inside(link: Path, folder: Path, root: Path) -> bool:
    """Return whether a link in a run directory stays inside, or is wandb's link to its own log."""
    if fnmatch(str(link.relative_to(folder)), WANDB_LINK_PATTERN):
        return True
    try:
        return root in link.resolve().parents
    except (OSError, RuntimeError):
        # A cycle of links.
        return False


@contextlib.contextmanager
def lock_for_reading(
    folder: Path, *, status: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Context in which no other process can own a run directory; writes no file.

    status: receives a line during a wait for an owner's heartbeat. Raises ConfigError if a live
    process owns the directory.
    """
    path = folder / LOCK_FILE
    if not path.exists():
        # No owner file: never owned, or written before this file was introduced.
        yield
        return
    with wrap_os_errors(f"{path} cannot be locked", ConfigError):
        file = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    try:
        with wrap_os_errors(f"{path} cannot be locked", ConfigError):
            _check_free(folder, file, fcntl.LOCK_SH, status)
        yield
    finally:
        os.close(file)


def read_owner(folder: Path) -> RunOwner | None:
    """Return the present or last owner of a run directory; None after a release.

    Reads the lock file afresh, since another node may have changed it.
    """
    try:
        owner = msgspec.convert(read_small_json(folder / LOCK_FILE), RunOwner)
    except (OSError, ValueError, TypeError):
        # A new owner may have locked the file and not written it yet.
        return None
    texts = (owner.host, owner.boot, owner.id)
    return owner if all(text.isprintable() for text in texts) else None


def _lock_file(folder: Path, file: int, kind: int) -> bool:
    """Lock an open lock file by flock; return False if the file system has no flock.

    kind: LOCK_EX or LOCK_SH. Raises ConfigError if another process holds the lock. If the recorded
    owner is dead, first waits for its forked children, which may hold the lock a little longer.
    """
    until = time.monotonic() + FORK_CLOSE_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_FLOCK_ERRNOS:
                return False
            if error.errno not in _LOCKED_ERRNOS:
                raise
        owner = read_owner(folder)
        if owner is None or not _has_exited(owner) or time.monotonic() > until:
            raise _make_in_use_error(folder, owner)
        time.sleep(_POLL_INTERVAL_S / 10)


def _check_free(folder: Path, file: int, kind: int, status: Callable[[str], None]) -> None:
    """Raise ConfigError if a live process owns the run directory; lock the file if flock works."""
    has_flock = _lock_file(folder, file, kind)
    owner, this = read_owner(folder), RunOwner.from_this_process()
    if owner is None:
        return
    if owner.boot and owner.boot == this.boot:
        # Same kernel: flock is reliable. Without flock, look up the pid if the namespace is shared.
        if has_flock:
            return
        if owner.processes == this.processes:
            if _read_start_ticks(owner.pid) == owner.start:
                raise _make_in_use_error(folder, owner)
            return
    if _has_heartbeat(folder, owner, status):
        raise _make_in_use_error(folder, owner)


def _has_exited(owner: RunOwner) -> bool:
    """Return whether an owner has certainly exited; False for another machine or pid namespace."""
    this = RunOwner.from_this_process()
    is_here = bool(owner.boot) and (owner.boot, owner.processes) == (this.boot, this.processes)
    return is_here and _read_start_ticks(owner.pid) != owner.start


def _has_heartbeat(folder: Path, owner: RunOwner, status: Callable[[str], None]) -> bool:
    """Watch the lock file for HEARTBEAT_TIMEOUT_S; return whether its owner touches it."""
    status(f"{folder} is owned {owner}; waiting {HEARTBEAT_TIMEOUT_S:g} s for its heartbeat")
    before, until = _read_heartbeat(folder), time.monotonic() + HEARTBEAT_TIMEOUT_S
    while time.monotonic() < until:
        time.sleep(_POLL_INTERVAL_S)
        if _read_heartbeat(folder) != before:
            return True
    return False


def _read_heartbeat(folder: Path) -> int:
    """Return the time of the owner's last heartbeat: the mtime of the lock file, ns.

    The time is that of the file system's clock.
    """
    # NFS revalidates cached attributes on open.
    with open_regular_file(folder / LOCK_FILE) as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _make_in_use_error(folder: Path, owner: RunOwner | None) -> InUseError:
    if owner is None:
        return InUseError(
            f"run directory {folder} is in use: another command is locking it, or reading it for"
            " a fork; try again in a minute"
        )
    return InUseError(
        f"run directory {folder} is in use: its run is alive, {owner}; wait for its end, or stop it"
        f" (kill -INT {owner.pid} on {owner.host})"
    )


def _read_start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process name is in parentheses and may contain any character.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
