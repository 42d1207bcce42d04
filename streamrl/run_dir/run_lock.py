"""The owner of a run directory: one command at a time, also across nodes.

A command holds flock on `owner.lock` in the directory for as long as it lives, and the file says
which command that is. The system drops the lock when the process ends, however it ends, so on one
machine a dead owner is told from a live one at once. Where flock does not reach from node to node,
or is not there at all, the owner's heartbeat decides: it touches the file every HEARTBEAT_S, and
whoever asks from another node watches for that. Nobody's clock is compared with another's.

The lock is not inherited: the file is closed on exec, and in every fork of the process.
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

from streamrl.errors import ConfigError, StreamError
from streamrl.files.bounded_read import open_regular_file, read_small_json, wrap_file_errors

LOCK_FILE = "owner.lock"
HEARTBEAT_INTERVAL_S = 4.0
HEARTBEAT_TIMEOUT_S = 5 * HEARTBEAT_INTERVAL_S
"""A heartbeat that stays away for so long is that of a dead owner, s."""
FORK_CLOSE_TIMEOUT_S = 5.0
"""A fork of an owner that was just killed has so long to close the lock it was born with, s."""
_POLL_INTERVAL_S = 0.5
_MAX_NUMBER = 1e12
"""No pid, tick or second of an owner is as large."""
_NO_FLOCK_ERRNOS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What a file system without flock answers."""
_LOCKED_ERRNOS = (errno.EAGAIN, errno.EACCES)
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
"""A link would have a file elsewhere overwritten, and a pipe never be opened."""
WANDB_LINK_PATTERN = "wandb/*run-*/logs/debug-core.log"
"""To the log of wandb's service, elsewhere: made in a new folder with each start, never opened."""
_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class InUseError(ConfigError):
    """A live command has the run directory."""


def _ignore_status(text: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class RunOwner:
    """A command that owns a run directory.

    boot, processes: which kernel and which set of process ids it lives in, empty where the system
    does not say. start: ticks from the kernel's start to the process's. since: epoch, s.
    """

    id: str
    host: str
    boot: str
    processes: str
    pid: int
    start: int
    since: float

    @classmethod
    def from_this_process(cls) -> "RunOwner":
        """Describe this process, as an owner from now on."""
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
    """The ownership of a run directory, held until `release` or the end of the process."""

    def __init__(self, file: int, path: Path, owner: RunOwner) -> None:
        self._file, self._path, self._owner = file, path, owner
        self._release_event = threading.Event()
        _held_locks.add(self)
        threading.Thread(target=self._run_heartbeat, name="run-lock", daemon=True).start()

    def _run_heartbeat(self) -> None:
        while not self._release_event.wait(HEARTBEAT_INTERVAL_S):
            # By the file, not by its name: an overwritten run is moved away with its lock.
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def verify_owner(self) -> None:
        """Raise StreamError if another command has taken the directory over, from a node to which
        neither flock nor the heartbeat got through in time."""
        found = self._find_other_owner()
        if found is not None:
            raise StreamError(
                f"run directory {self._path.parent} was taken over {found}: this run ends, and"
                " leaves it to that one"
            )

    def _find_other_owner(self) -> RunOwner | None:
        found = read_owner(self._path.parent)
        return None if found is None or found.id == self._owner.id else found

    def set_folder(self, folder: Path) -> None:
        """Note that the directory has another name now."""
        self._path = folder / LOCK_FILE

    def release(self) -> None:
        """Let others have the directory. The file stays: to remove it would be a race."""
        if self._release_event.is_set():
            return
        self._release_event.set()
        with contextlib.suppress(OSError):
            if self._find_other_owner() is None:
                os.ftruncate(self._file, 0)
        self.close()

    def close(self) -> None:
        """Close the file; the lock ends with its last holder, and this process is one."""
        _held_locks.discard(self)
        with contextlib.suppress(OSError):
            os.close(self._file)


_held_locks: set[RunLock] = set()


def _close_inherited_locks() -> None:
    """Close the locks in a fork, which would hold them beyond the life of the command."""
    for lock in list(_held_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_inherited_locks)


def acquire_run_lock(folder: Path, *, status: Callable[[str], None] = _ignore_status) -> RunLock:
    """Own a run directory that exists.

    Raises ConfigError in one line if a live command owns it, or it cannot be owned, as one with
    links that lead out of it. `status` is told what is waited for: the heartbeat of an owner on
    another node takes WATCH_S.
    """
    check_links(folder)
    path = folder / LOCK_FILE
    with _translate_disk_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o644)
    try:
        with _translate_disk_errors(path):
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
    """Raise ConfigError for a link in a run directory that leads out of it, or a FIFO or device.

    No link is followed. A run writes and removes files in its directory, by names that
    anybody knows.
    """
    inside, left = folder.resolve(), [folder]
    while left:
        here = left.pop()
        entries: list[os.DirEntry[str]] = []
        # Of a run that goes on, a folder may be gone meanwhile.
        with wrap_file_errors(here), contextlib.suppress(FileNotFoundError):
            entries = list(os.scandir(here))
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                left.append(Path(entry.path))
            elif entry.is_symlink() and not _is_inside(Path(entry.path), folder, inside):
                raise ConfigError(
                    f"run directory {folder}: {entry.path} is a link to"
                    f" {os.readlink(entry.path)!r}, which is not in it; remove the link, or put"
                    " in its place what it leads to"
                )
            elif not entry.is_symlink() and not entry.is_file(follow_symlinks=False):
                raise ConfigError(f"run directory {folder}: {entry.path}: not a regular file")


def _is_inside(link: Path, folder: Path, inside: Path) -> bool:
    """Whether a link leads into the run directory, or is the one of wandb's to its own log."""
    if fnmatch(str(link.relative_to(folder)), WANDB_LINK_PATTERN):
        return True
    try:
        return inside in link.resolve().parents
    except (OSError, RuntimeError):
        # Links in a circle lead nowhere.
        return False


@contextlib.contextmanager
def lock_for_reading(
    folder: Path, *, status: Callable[[str], None] = _ignore_status
) -> Iterator[None]:
    """Keep others from owning a run directory, while it is read; nothing is written there.

    Raises ConfigError in one line if a live command owns it.
    """
    path = folder / LOCK_FILE
    if not path.exists():
        # Nobody has owned it since there are owners.
        yield
        return
    with _translate_disk_errors(path):
        file = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    try:
        with _translate_disk_errors(path):
            _check_free(folder, file, fcntl.LOCK_SH, status)
        yield
    finally:
        os.close(file)


def read_owner(folder: Path) -> RunOwner | None:
    """Return the command that owns a run directory, or owned it last; None if it has given it up.

    The text is read anew, as another node may have written it.
    """
    try:
        found = read_small_json(folder / LOCK_FILE)
        owner = RunOwner(**found)
    except (OSError, ValueError, TypeError):
        # Whoever is just about to own it has not written it yet.
        return None
    numbers, texts = (owner.pid, owner.start, owner.since), (owner.host, owner.boot, owner.id)
    is_one = all(
        isinstance(number, int | float) and 0 <= number < _MAX_NUMBER for number in numbers
    )
    return owner if is_one and all(str(text).isprintable() for text in texts) else None


def _lock_file(folder: Path, file: int, kind: int) -> bool:
    """Lock the file of a directory; False if its file system has no flock.

    Raises ConfigError if another process has it, but for a fork of an owner that was just killed.
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
    """Raise ConfigError if a live command owns the directory; lock the file if it can be."""
    reaches = _lock_file(folder, file, kind)
    owner, this = read_owner(folder), RunOwner.from_this_process()
    if owner is None:
        return
    if owner.boot and owner.boot == this.boot:
        # One kernel: its flock is the truth. Without one it knows the process, if ids are shared.
        if reaches:
            return
        if owner.processes == this.processes:
            if _read_start_ticks(owner.pid) == owner.start:
                raise _make_in_use_error(folder, owner)
            return
    if _has_heartbeat(folder, owner, status):
        raise _make_in_use_error(folder, owner)


def _has_exited(owner: RunOwner) -> bool:
    """Whether an owner in this set of process ids is known to have ended."""
    this = RunOwner.from_this_process()
    is_here = bool(owner.boot) and (owner.boot, owner.processes) == (this.boot, this.processes)
    return is_here and _read_start_ticks(owner.pid) != owner.start


def _has_heartbeat(folder: Path, owner: RunOwner, status: Callable[[str], None]) -> bool:
    """Whether the owner's heartbeat is seen."""
    status(f"watching for {HEARTBEAT_TIMEOUT_S:g} s whether {folder}, owned {owner}, is alive")
    before, until = _read_heartbeat(folder), time.monotonic() + HEARTBEAT_TIMEOUT_S
    while time.monotonic() < until:
        time.sleep(_POLL_INTERVAL_S)
        if _read_heartbeat(folder) != before:
            return True
    return False


def _read_heartbeat(folder: Path) -> int:
    """When the file was touched last, as its file system has it."""
    # Opened anew: NFS asks the server for what it knows of a file when it is opened.
    with open_regular_file(folder / LOCK_FILE) as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _make_in_use_error(folder: Path, owner: RunOwner | None) -> InUseError:
    if owner is None:
        return InUseError(
            f"run directory {folder} is in use: another command is just taking it or reads it for"
            " a fork; try again in a minute"
        )
    return InUseError(
        f"run directory {folder} is in use: its run is alive, {owner}; wait for its end, or stop it"
        f" (kill -INT {owner.pid} on {owner.host})"
    )


def _read_start_ticks(pid: int) -> int:
    """When a process began, in ticks since the kernel did; 0 if there is none, or nobody knows."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name stands in brackets, and may have any character in it.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


@contextlib.contextmanager
def _translate_disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be locked: {error.strerror or error}") from None
