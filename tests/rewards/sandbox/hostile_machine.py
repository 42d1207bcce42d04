"""Attacks on the machine: processes, time, and the kernel itself."""

from tests.rewards.sandbox.hostile import (
    ERROR,
    MEMORY,
    PASS,
    SYSCALLS,
    TIMEOUT,
    WRONG,
    Attack,
)

PROCESSES = [
    Attack(
        "a fork bomb",
        TIMEOUT + MEMORY,
        """
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    ),
    Attack(
        "watching what others run, and making them wait",
        PASS,
        SYSCALLS
        + """
import fcntl, struct
denied("inotify_init1", 0)
denied("ioprio_set", 1, 1, 0)
denied("syncfs", 1)
library = os.open("/usr/bin/env", os.O_RDONLY)
denied("flock", library, 6)
tried(fcntl.fcntl, library, 1024, 1)
reading = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0)
for command in (5, 6, 7, 36, 37, 38):
    tried(fcntl.fcntl, library, command, reading)
tried(fcntl.lockf, library, fcntl.LOCK_SH | fcntl.LOCK_NB)
own = open("own", "w")
tried(fcntl.lockf, own, fcntl.LOCK_EX | fcntl.LOCK_NB)
assert fcntl.fcntl(own, fcntl.F_GETFL) & os.O_WRONLY
contained()
""",
    ),
    Attack(
        "a fork bomb in bash",
        TIMEOUT + WRONG + ERROR,
        """
os.execvp("bash", ["bash", "-c", "b() { b | b & }; b; sleep 100"])
""",
    ),
    Attack(
        "more processes than allowed",
        PASS,
        """
import signal
def fork_many():
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(100)
tried(fork_many)
contained()
""",
    ),
    Attack(
        "more threads than allowed",
        PASS,
        """
import threading
def start_many():
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
tried(start_many)
print("contained", flush=True)
os._exit(0)
""",
    ),
    Attack(
        "a child that outlives it",
        PASS,
        """
if os.fork() == 0:
    time.sleep(1000)
contained()
""",
    ),
    Attack(
        "a daemon, forked twice in a session of its own",
        PASS,
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import signal
        for number in range(1, 64):
            if number not in (9, 19, 32, 33):
                signal.signal(number, signal.SIG_IGN)
        while True:
            pass
    os._exit(0)
os.wait()
contained()
""",
    ),
    Attack(
        "a daemon that holds on to its output",
        PASS,
        """
print("contained", flush=True)
if os.fork() == 0:
    os.setsid()
    while True:
        time.sleep(1)
os._exit(0)
""",
    ),
    Attack(
        "zombies",
        PASS,
        """
def leave_a_zombie():
    if os.fork() == 0:
        try:
            os.fork()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.wait()[1] == 0
for _ in range(40):
    while not leave_a_zombie():  # until those of before are collected
        time.sleep(0.05)
contained()
""",
    ),
    Attack(
        "signals to the parent",
        PASS,
        """
import signal
for number in range(1, 65):
    try:
        os.kill(os.getppid(), number)
        os.kill(1, number)
    except OSError:
        pass
time.sleep(0.1)
contained()
""",
    ),
    Attack(
        "a signal to everyone",
        PASS,
        """
import signal
if os.fork() == 0:
    time.sleep(100)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(-1, signal.SIGTERM)
os.wait()
contained()
""",
    ),
    Attack(
        "a signal to a process of the host",
        PASS,
        """
tried(os.kill, {pid}, 9)
tried(os.killpg, {pid}, 9)
for pid in range(2, 100_000):
    if pid != os.getpid():
        try:
            os.kill(pid, 9)
        except OSError:
            continue
        print("escaped", pid)
contained()
""",
    ),
    Attack("killing itself", ERROR, "os.kill(os.getpid(), 9)"),
    Attack("killing itself by a nameless signal", ERROR, "os.kill(os.getpid(), 50)"),
    Attack(
        "stopping itself",
        TIMEOUT,
        """
import signal
os.kill(os.getpid(), signal.SIGSTOP)
""",
    ),
    Attack(
        "a starved driver",
        PASS + TIMEOUT,
        """
tried(os.setpriority, os.PRIO_PROCESS, 1, 19)
tried(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))
contained()
""",
    ),
    Attack("a loop", TIMEOUT, "while True: pass"),
    Attack(
        "a loop that ignores its time limit",
        TIMEOUT,
        """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass
""",
    ),
    Attack("sleep", TIMEOUT, "time.sleep(1000)"),
    Attack(
        "a thread that never ends",
        TIMEOUT,
        """
import threading
threading.Thread(target=time.sleep, args=(1000,)).start()
contained()
""",
    ),
    Attack(
        "an exit that never ends",
        TIMEOUT,
        """
import atexit
atexit.register(time.sleep, 1000)
contained()
""",
    ),
    Attack("waiting for input that never comes", ERROR, "input()"),
    Attack(
        "a regular expression bomb",
        TIMEOUT,
        """
import re
re.match("(a+)+b", "a" * 60)
""",
    ),
    Attack("a number too large to compute", TIMEOUT + MEMORY, "9 ** 9 ** 9"),
]

KERNEL = [
    Attack(
        "namespaces of its own",
        PASS,
        SYSCALLS
        + """
denied("unshare", 0x80)
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    denied("unshare", flag)
    denied("clone", flag | 17, 0, 0, 0, 0)
    denied("setns", 0, flag)
arguments = (ctypes.c_uint64 * 11)(0x10000000)
denied("clone3", ctypes.byref(arguments), 88)
contained()
""",
    ),
    Attack(
        "a sandbox in the sandbox",
        PASS,
        """
import subprocess
for command in (["unshare", "-Urm", "echo", "in"], ["unshare", "-n", "echo", "in"],
                ["setpriv", "--reuid=0", "echo", "in"],
                ["/usr/sbin/chroot", ".", "/bin/echo", "in"],
                ["nsenter", "-t", "1", "-m", "echo", "in"]):
    if b"in" in subprocess.run(command, capture_output=True).stdout:
        print("escaped", command)
contained()
""",
    ),
    Attack(
        "mounts",
        PASS,
        SYSCALLS
        + """
denied("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, 0)
denied("mount", b"none", b"/", 0, 32 | 4096, 0)
denied("pivot_root", b".", b".")
denied("chroot", b".")
denied("open_tree", -100, b"/", 1)
denied("fsopen", b"tmpfs", 0)
denied("name_to_handle_at", -100, b"/usr", 0, 0, 0)
denied("quotactl", 0, 0, 0, 0)
denied("statmount", 0, 0, 0, 0)
contained()
""",
    ),
    Attack(
        "other processes",
        PASS,
        SYSCALLS
        + """
for pid in (1, os.getpid(), {pid}):
    denied("ptrace", 16, pid, 0, 0)
    denied("ptrace", 0x4206, pid, 0, 0)
    denied("process_vm_readv", pid, 0, 0, 0, 0, 0)
    denied("prlimit64", 1, 9, 0, 0)
denied("pidfd_getfd", 0, 200, 0)
denied("sched_setaffinity", 0, 8, ctypes.byref(ctypes.c_uint64(3)))
contained()
""",
    ),
    Attack(
        "corners of the kernel",
        PASS,
        SYSCALLS
        + """
for name in ("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "kexec_load",
             "init_module", "swapon", "syslog", "reboot", "mseal"):
    denied(name, 1, 0, 0, 0, 0)
denied("setuid", 0)
denied("sethostname", b"x", 1)
contained()
""",
    ),
    Attack(
        "memory that no limit counts",
        PASS,
        SYSCALLS
        + """
denied("memfd_create", b"x", 0)
denied("memfd_secret", 0)
denied("shmget", 0, 1 << 20, 0o1600)
denied("msgget", 0, 0o1600)
denied("semget", 0, 1, 0o1600)
denied("mq_open", b"x", 0o102, 0o600, 0)
denied("add_key", b"user", b"x", b"y", 1, -3)
denied("keyctl", 0, -3, 1)
denied("vmsplice", 1, 0, 0, 0)
contained()
""",
    ),
    Attack(
        "bare sockets",
        PASS,
        SYSCALLS
        + """
for family in (1, 2, 10, 16, 17, 38, 40):
    denied("socket", family, 1, 0)
contained()
""",
    ),
    Attack(
        "calls of another architecture",
        ERROR + PASS,
        """
import ctypes, mmap
if os.uname().machine != "x86_64":
    contained()
    sys.exit()
code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE, prot=7)
code.write(bytes.fromhex("b827000000cd80c3"))  # mkdir by the 32-bit gate
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
ctypes.CFUNCTYPE(ctypes.c_int)(address)()
print("escaped")
""",
    ),
    Attack(
        "calls in the x32 way",
        ERROR + PASS,
        """
import ctypes
if os.uname().machine == "x86_64":
    ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0)
    print("escaped")
contained()
""",
    ),
    Attack(
        "writing into its own memory",
        ERROR,
        """
import ctypes
ctypes.string_at(0)
""",
    ),
]
