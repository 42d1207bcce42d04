"""Seccomp filter: denies system calls that evade namespaces and rlimits.

Denied are calls that create namespaces, hold memory that no rlimit counts, or reach parts of the
kernel where a bug would be an escape. A denied call fails with EPERM; all other calls are allowed.
"""

import errno
import os
from typing import Any

#: Inspecting and controlling other processes, including the driver.
_OTHER_PROCESSES = (
    "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd"
    " sched_setaffinity sched_setscheduler sched_setattr setpriority migrate_pages move_pages"
)
#: Mounts and namespaces: a program has capabilities inside a namespace that it creates.
_NAMESPACES = (
    "mount umount2 pivot_root chroot unshare setns open_tree move_mount fsopen fsconfig fsmount"
    " fspick mount_setattr name_to_handle_at open_by_handle_at quotactl"
)
#: Kernel subsystems with many past vulnerabilities, unnecessary for programs under test.
_KERNEL = (
    "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register seccomp"
    " kexec_load kexec_file_load init_module finit_module delete_module create_module acct swapon"
    " swapoff reboot syslog iopl ioperm modify_ldt personality fanotify_init lookup_dcookie"
    " settimeofday clock_settime clock_adjtime adjtimex vhangup nfsservctl uselib"
)
#: Memory that belongs to no process, or survives unmapping: no limit counts it.
_HIDDEN_MEMORY = (
    "memfd_create memfd_secret shmget shmat shmctl shmdt semget semop semtimedop semctl msgget"
    " msgsnd msgrcv msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify"
    " add_key request_key keyctl vmsplice io_setup io_submit remap_file_pages mbind set_mempolicy"
    " setxattr lsetxattr fsetxattr"
)
#: Calls that pin whole pages in pipes and sockets but count only the bytes requested. The error is
#: ENOSYS: libraries then fall back to copying, as on an older kernel.
_ZERO_COPY_CALLS = "splice tee sendfile"
#: Observing other processes of the machine, and slowing them down.
_CROSS_PROCESS_EFFECTS = "inotify_init inotify_init1 inotify_add_watch ioprio_set sync syncfs flock"
#: All sockets except socketpair(AF_UNIX), which asyncio and multiprocessing need.
_SOCKETS = "socket bind connect listen accept accept4 setsockopt"

_NEW_NAMESPACE_FLAGS = (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS: survives unmapping by a single owner
_TIOCSTI = 0x5412  # injects input into the terminal
_TIOCLINUX = 0x541C
_AF_UNIX = 1
#: POSIX and open-file-description locks (get, set, set and wait), leases and dnotify: a lock on a
#: shared read-only file is a covert channel between jails.
_LOCKS = (5, 6, 7, 36, 37, 38)
_F_SETLEASE, _F_NOTIFY = 1024, 1026
#: System calls newer than libseccomp; their numbers are the same on all architectures. The
#: error is ENOSYS, as on an older kernel.
_NEW_CALLS = range(450, 600)


def build_syscall_filter() -> bytes:
    """Return the seccomp filter as BPF for bubblewrap. Raises RuntimeError without libseccomp."""
    import pyseccomp as seccomp  # imported here: the import itself requires libseccomp

    denied = seccomp.ERRNO(errno.EPERM)
    missing = seccomp.ERRNO(errno.ENOSYS)
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    calls = (_OTHER_PROCESSES, _NAMESPACES, _KERNEL, _HIDDEN_MEMORY, _SOCKETS)
    for name in " ".join((*calls, _CROSS_PROCESS_EFFECTS)).split():
        if seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) >= 0:  # exists on this architecture
            rules.add_rule(denied, name)
    for name in _ZERO_COPY_CALLS.split():
        rules.add_rule(missing, name)
    for command in (*_LOCKS, _F_SETLEASE, _F_NOTIFY):
        low_word = seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, command)
        rules.add_rule(denied, "fcntl", low_word)
    for flag in _NEW_NAMESPACE_FLAGS:
        rules.add_rule(denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    # clone3 passes its flags in memory, where seccomp cannot look; libraries fall back to clone.
    rules.add_rule(missing, "clone3")
    shared = seccomp.Arg(3, seccomp.MASKED_EQ, _SHARED_ANONYMOUS, _SHARED_ANONYMOUS)
    rules.add_rule(denied, "mmap", shared)
    rules.add_rule(denied, "socketpair", seccomp.Arg(0, seccomp.NE, _AF_UNIX))
    rules.add_rule(denied, "prlimit64", seccomp.Arg(0, seccomp.NE, 0))
    for request in (_TIOCSTI, _TIOCLINUX):
        low_word = seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, request)
        rules.add_rule(denied, "ioctl", low_word)
    for number in _NEW_CALLS:
        rules.add_rule(missing, number)
    return _export_filter(rules)


def _export_filter(rules: Any) -> bytes:
    with os.fdopen(os.memfd_create("filter"), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
