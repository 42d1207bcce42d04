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

from streamrl.rewards.sandbox.program import MIB, Limits

#: Where a program may write, and all that it may write.
PRIVATE = "/tmp"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": PRIVATE,
    "TMPDIR": PRIVATE,
    "LANG": "C.UTF-8",
}
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache")
_DEVICES = ("null", "urandom")  # not zero: it is shared memory without limit
#: One user for each jail of a machine, for processes are limited by user: a process id leaves
#: room for 256, and all of it lies above the ids that systems give out.
_FIRST_USER = 1 << 30
_USERS_EACH = 256
_ALL_USERS = 1 << 32

#: What the jail's Python does first: it takes the driver from its stdin and becomes it.
_BOOT = (
    "import marshal,os\n"
    "size,code={size},b''\n"
    "while len(code)<size: code+=os.read(0,size-len(code)) or os._exit(0)\n"
    "exec(marshal.loads(code),{{'__name__':'__main__'}})"
)


@dataclass(frozen=True)
class Isolation:
    """One way to make a jail.

    name: for messages. user_namespace: whether the jail has a user namespace of its own.
    own_user: whether this process can be, and so gives each jail, a user of its own.
    """

    name: str
    user_namespace: bool
    own_user: bool


#: No isolation: limits alone.
UNSAFE = Isolation("none", user_namespace=False, own_user=False)


def candidates() -> list[Isolation]:
    """What is worth trying here, the best first."""
    if os.geteuid() != 0:
        return [Isolation("user namespace", user_namespace=True, own_user=False)]
    if not _all_users() or shutil.which("setpriv") is None:
        return [Isolation("user namespace of root", user_namespace=True, own_user=False)]
    return [
        Isolation("root", user_namespace=False, own_user=True),
        Isolation("user namespace of a user of its own", user_namespace=True, own_user=True),
    ]


def _all_users() -> bool:
    inside, _, count = Path("/proc/self/uid_map").read_text().split()[:3]
    return (inside, int(count)) == ("0", _ALL_USERS - 1)


def find_bubblewrap() -> str | None:
    """Path of bwrap: the system's, or the one that came with the installation."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=f"{sys.prefix}/bubblewrap")


def user_of_jail(number: int) -> int:
    """The user id of the jail with this running number."""
    return _FIRST_USER + os.getpid() * _USERS_EACH + number % _USERS_EACH


def jail_command(
    isolation: Isolation,
    limits: Limits,
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
    id_ = user_of_jail(number)
    user = ["setpriv", f"--reuid={id_}", f"--regid={id_}", "--clear-groups", "--inh-caps=-all"]
    user += ["--no-new-privs", "--pdeathsig=KILL"]
    jail = [bubblewrap, *_namespaces(isolation), *_view(limits)]
    jail += ["--seccomp", str(fds[0]), "--info-fd", str(fds[1])]
    if not isolation.own_user:
        return [*jail, *boot]
    if isolation.user_namespace:
        return [*user, *jail, *boot]
    for right in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        jail += ["--cap-add", right]
    return [*jail, *user, "--bounding-set=-all", *boot]


def boot_command(size: int) -> list[str]:
    """The command that turns into the driver once it is sent its code of `size` bytes."""
    return [
        python(),
        *["-I", "-S", "-B", "-X", "utf8", "-X", "no_debug_ranges", "-c"],
        _BOOT.format(size=size),
    ]


def python() -> str:
    """The interpreter that this one's environment was made from, outside of any venv."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(Path(sys.base_prefix, "bin", version))


def _namespaces(isolation: Isolation) -> list[str]:
    options = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try"
    options += " --hostname sandbox --as-pid-1 --die-with-parent --new-session"
    options += " --cap-drop ALL"
    if isolation.user_namespace:
        options += " --unshare-user"
    return options.split()


def _view(limits: Limits) -> list[str]:
    """The files that a program sees: the system's, Python's, and one directory of its own."""
    view = []
    for path in _SYSTEM:
        view += ["--symlink", os.readlink(path), path] if os.path.islink(path) else _shown([path])
    base = Path(sys.base_prefix)
    folders = ["/etc", "/dev"]
    shown = list(_SETTINGS)
    if not base.is_relative_to("/usr"):
        folders += map(str, [*reversed(base.parents[:-1]), base])
        shown += [str(base / "bin"), str(base / "lib")]
    for folder in folders:
        view += ["--perms", "0755", "--dir", folder]  # else it is made for root alone
    view += _shown(shown)
    packages = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    if os.path.isdir(packages):
        view += ["--tmpfs", packages, "--remount-ro", packages]
    for device in _DEVICES:
        view += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    view += ["--symlink", "urandom", "/dev/random"]
    view += ["--symlink", f"{PRIVATE}/stdin", "/dev/stdin"]  # which /proc would offer
    view += ["--symlink", PRIVATE, "/dev/shm"]  # for locks of multiprocessing
    view += ["--perms", "1777", "--size", str(limits.disk_mib * MIB), "--tmpfs", PRIVATE]
    return [*view, "--remount-ro", "/", "--chdir", PRIVATE]


def _shown(paths: Sequence[str]) -> list[str]:
    return [part for path in paths for part in ("--ro-bind-try", path, path)]
