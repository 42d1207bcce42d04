"""Isolation modes and the bubblewrap command of a jail.

bubblewrap gives each jail its own namespaces and a read-only view of system directories. Programs
in a jail run without capabilities, and never as the user of the run.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.user_code.sandbox.program import MIB, ProgramLimits

#: The only writable directory of a jail.
PRIVATE_DIR = "/tmp"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": PRIVATE_DIR,
    "TMPDIR": PRIVATE_DIR,
    "LANG": "C.UTF-8",
}
_SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache")
_DEVICES = ("null", "urandom")  # not zero: mapping it shared gives unlimited uncounted memory
_NAMESPACE_OPTIONS = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", "--as-pid-1", "--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL"),
)
#: Each jail of a machine has its own user id because RLIMIT_NPROC counts processes by user. Ids lie
#: above those that systems assign, with 256 per process id of a scorer.
_FIRST_USER_ID = 1 << 30
_USERS_PER_PROCESS = 256
_NUM_USER_IDS = 1 << 32

#: First code of the jail's Python: read the driver's modules from stdin and execute them in order.
_BOOT_SOURCE = (
    "import marshal,os,sys\n"
    "size,data={size},b''\n"
    "while len(data)<size: data+=os.read(0,size-len(data)) or os._exit(0)\n"
    "for name,code in marshal.loads(data):\n"
    " module=sys.modules[name]=type(sys)(name)\n"
    " exec(code,module.__dict__)"
)


@dataclass(frozen=True)
class IsolationMode:
    """Configuration of namespaces and users of a jail.

    name: used in messages. has_user_namespace: the jail has its own user namespace.
    has_dedicated_user: each jail runs as its own user id, which requires root.
    """

    name: str
    has_user_namespace: bool
    has_dedicated_user: bool


#: Mode for sandbox.allow_unsafe: rlimits only.
NO_ISOLATION = IsolationMode("none", has_user_namespace=False, has_dedicated_user=False)


def list_isolation_modes() -> list[IsolationMode]:
    """Return the isolation modes that this user may try on this machine, strongest first."""
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
    """Return True if root here can use every user id, unlike root of a restricted container."""
    inside, _, count = Path("/proc/self/uid_map").read_text().split()[:3]
    return (inside, int(count)) == ("0", _NUM_USER_IDS - 1)


def find_bubblewrap() -> str | None:
    """Return the path of bwrap on PATH or in the Python environment, or None."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=f"{sys.prefix}/bubblewrap")


def compute_jail_user(number: int) -> int:
    return _FIRST_USER_ID + os.getpid() * _USERS_PER_PROCESS + number % _USERS_PER_PROCESS


def build_jail_command(
    isolation: IsolationMode,
    limits: ProgramLimits,
    number: int,
    *,
    fds: tuple[int, int],
    boot: Sequence[str],
) -> list[str]:
    """Return the command that creates jail `number` and runs the command `boot` in it.

    fds: descriptors for bubblewrap: the seccomp filter to read, and the pipe for the child's pid.
    """
    bubblewrap = find_bubblewrap()
    assert bubblewrap is not None, "checked by choose_isolation"
    user_id = compute_jail_user(number)
    user = ["setpriv", f"--reuid={user_id}", f"--regid={user_id}"]
    user += ["--clear-groups", "--inh-caps=-all", "--no-new-privs", "--pdeathsig=KILL"]
    jail = [bubblewrap, *_NAMESPACE_OPTIONS, *_build_mount_options(limits)]
    jail += ["--unshare-user"] if isolation.has_user_namespace else []
    jail += ["--seccomp", str(fds[0]), "--info-fd", str(fds[1])]
    if not isolation.has_dedicated_user:
        return [*jail, *boot]
    if isolation.has_user_namespace:
        return [*user, *jail, *boot]
    # setpriv inside the jail needs these to change the user; it drops all capabilities afterwards.
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        jail += ["--cap-add", capability]
    return [*jail, *user, "--bounding-set=-all", *boot]


def build_boot_command(size: int) -> list[str]:
    return [
        find_python(),
        *["-I", "-S", "-B", "-X", "utf8", "-X", "no_debug_ranges", "-c"],
        _BOOT_SOURCE.format(size=size),
    ]


def find_python() -> str:
    """Return the path of the base interpreter; jails do not see a virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(Path(sys.base_prefix, "bin", version))


def _build_mount_options(limits: ProgramLimits) -> list[str]:
    """Mount system and Python directories read-only, and a private tmpfs."""
    view = []
    for path in _SYSTEM_DIRS:
        view += (
            ["--symlink", os.readlink(path), path]
            if os.path.islink(path)
            else _bind_read_only([path])
        )
    base = Path(sys.base_prefix)
    folders = ["/etc", "/dev"]
    read_only = list(_SYSTEM_SETTINGS)
    if not base.is_relative_to("/usr"):
        folders += map(str, [*reversed(base.parents[:-1]), base])
        read_only += [str(base / "bin"), str(base / "lib")]
    for folder in folders:
        view += ["--perms", "0755", "--dir", folder]  # bubblewrap's default mode is root only
    view += _bind_read_only(read_only)
    # Hide installed packages.
    packages = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    if os.path.isdir(packages):
        view += ["--tmpfs", packages, "--remount-ro", packages]
    for device in _DEVICES:
        view += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    view += ["--symlink", "urandom", "/dev/random"]
    view += ["--symlink", f"{PRIVATE_DIR}/stdin", "/dev/stdin"]  # no /proc in a jail
    view += ["--symlink", PRIVATE_DIR, "/dev/shm"]  # for multiprocessing locks
    view += ["--perms", "1777", "--size", str(limits.disk_mib * MIB), "--tmpfs", PRIVATE_DIR]
    return [*view, "--remount-ro", "/", "--chdir", PRIVATE_DIR]


def _bind_read_only(paths: Sequence[str]) -> list[str]:
    return [part for path in paths for part in ("--ro-bind-try", path, path)]
