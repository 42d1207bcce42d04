"""The ways to isolate a program that a machine may offer, each as the command of a jail.

bubblewrap gives a jail namespaces of its own and a view of the system's own directories, read-only;
what runs in it never has the rights, nor the user, of the run.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.rewards.sandbox.program import MIB, ProgramLimits

#: Where a program may write, and all that it may write.
PRIVATE_DIR = "/tmp"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": PRIVATE_DIR,
    "TMPDIR": PRIVATE_DIR,
    "LANG": "C.UTF-8",
}
_SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache")
_DEVICES = ("null", "urandom")  # not zero: it is shared memory without limit
#: One user for each jail of a machine, for processes are limited by user: a process id leaves
#: room for 256, and all of it lies above the ids that systems give out.
_FIRST_USER_ID = 1 << 30
_USERS_PER_PROCESS = 256
_NUM_USER_IDS = 1 << 32

#: What the jail's Python does first: it takes the driver from its stdin and becomes it.
_BOOT_SOURCE = (
    "import marshal,os\n"
    "size,code={size},b''\n"
    "while len(code)<size: code+=os.read(0,size-len(code)) or os._exit(0)\n"
    "exec(marshal.loads(code),{{'__name__':'__main__'}})"
)


@dataclass(frozen=True)
class IsolationMode:
    """One way to make a jail.

    name: for messages. user_namespace: whether the jail has a user namespace of its own.
    own_user: whether this process can be, and so gives each jail, a user of its own.
    """

    name: str
    has_user_namespace: bool
    has_dedicated_user: bool


#: No isolation: limits alone.
NO_ISOLATION = IsolationMode("none", has_user_namespace=False, has_dedicated_user=False)


def list_isolation_modes() -> list[IsolationMode]:
    """What is worth trying here, the best first."""
    if os.geteuid() != 0:
        return [IsolationMode("user namespace", has_user_namespace=True, has_dedicated_user=False)]
    if not _has_all_user_ids() or shutil.which("setpriv") is None:
        return [
            IsolationMode(
                "user namespace of root", has_user_namespace=True, has_dedicated_user=False
            )
        ]
    return [
        IsolationMode("root", has_user_namespace=False, has_dedicated_user=True),
        IsolationMode(
            "user namespace of a user of its own", has_user_namespace=True, has_dedicated_user=True
        ),
    ]


def _has_all_user_ids() -> bool:
    inside, _, count = Path("/proc/self/uid_map").read_text().split()[:3]
    return (inside, int(count)) == ("0", _NUM_USER_IDS - 1)


def find_bubblewrap() -> str | None:
    """Path of bwrap: the system's, or the one that came with the installation."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=f"{sys.prefix}/bubblewrap")


def compute_jail_user(number: int) -> int:
    """The user id of the jail with this running number."""
    return _FIRST_USER_ID + os.getpid() * _USERS_PER_PROCESS + number % _USERS_PER_PROCESS


def build_jail_command(
    isolation: IsolationMode,
    limits: ProgramLimits,
    number: int,
    *,
    fds: tuple[int, int],
    boot: Sequence[str],
) -> list[str]:
    """The command that makes jail `number` and runs `boot` in it.

    fds: where bubblewrap finds the filter of system calls, and where it tells the jail's process.
    """
    bubblewrap = find_bubblewrap()
    assert bubblewrap is not None, "looked for when the sandbox started"
    id_ = compute_jail_user(number)
    user = ["setpriv", f"--reuid={id_}", f"--regid={id_}", "--clear-groups", "--inh-caps=-all"]
    user += ["--no-new-privs", "--pdeathsig=KILL"]
    jail = [bubblewrap, *_build_namespace_options(isolation), *_build_mount_options(limits)]
    jail += ["--seccomp", str(fds[0]), "--info-fd", str(fds[1])]
    if not isolation.has_dedicated_user:
        return [*jail, *boot]
    if isolation.has_user_namespace:
        return [*user, *jail, *boot]
    for right in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        jail += ["--cap-add", right]
    return [*jail, *user, "--bounding-set=-all", *boot]


def build_boot_command(size: int) -> list[str]:
    """The command that turns into the driver once it is sent its code of `size` bytes."""
    return [
        find_python(),
        *["-I", "-S", "-B", "-X", "utf8", "-X", "no_debug_ranges", "-c"],
        _BOOT_SOURCE.format(size=size),
    ]


def find_python() -> str:
    """The interpreter that this one's environment was made from, outside of any venv."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(Path(sys.base_prefix, "bin", version))


def _build_namespace_options(isolation: IsolationMode) -> list[str]:
    options = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try"
    options += " --hostname sandbox --as-pid-1 --die-with-parent --new-session"
    options += " --cap-drop ALL"
    if isolation.has_user_namespace:
        options += " --unshare-user"
    return options.split()


def _build_mount_options(limits: ProgramLimits) -> list[str]:
    """The files that a program sees: the system's, Python's, and one directory of its own."""
    view = []
    for path in _SYSTEM_DIRS:
        view += (
            ["--symlink", os.readlink(path), path]
            if os.path.islink(path)
            else _bind_read_only([path])
        )
    base = Path(sys.base_prefix)
    folders = ["/etc", "/dev"]
    shown = list(_SYSTEM_SETTINGS)
    if not base.is_relative_to("/usr"):
        folders += map(str, [*reversed(base.parents[:-1]), base])
        shown += [str(base / "bin"), str(base / "lib")]
    for folder in folders:
        view += ["--perms", "0755", "--dir", folder]  # else it is made for root alone
    view += _bind_read_only(shown)
    packages = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    if os.path.isdir(packages):
        view += ["--tmpfs", packages, "--remount-ro", packages]
    for device in _DEVICES:
        view += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    view += ["--symlink", "urandom", "/dev/random"]
    view += ["--symlink", f"{PRIVATE_DIR}/stdin", "/dev/stdin"]  # which /proc would offer
    view += ["--symlink", PRIVATE_DIR, "/dev/shm"]  # for locks of multiprocessing
    view += ["--perms", "1777", "--size", str(limits.disk_mib * MIB), "--tmpfs", PRIVATE_DIR]
    return [*view, "--remount-ro", "/", "--chdir", PRIVATE_DIR]


def _bind_read_only(paths: Sequence[str]) -> list[str]:
    return [part for path in paths for part in ("--ro-bind-try", path, path)]
