"""Attacks on resources: memory, open files, the reader of the output."""

from tests.rewards.sandbox.hostile import ERROR, MEMORY, OUTPUT, PASS, TIMEOUT, Attack

MEMORY_AND_OUTPUT = [
    Attack("memory at once", MEMORY, "x = bytearray(8 << 30)"),
    Attack(
        "memory bit by bit",
        MEMORY + TIMEOUT,
        """
kept = []
while True:
    kept.append(bytes(1 << 20))
""",
    ),
    Attack(
        "memory in many processes",
        MEMORY + TIMEOUT,
        """
for _ in range(12):
    if os.fork() == 0:
        break
kept = bytearray(100 << 20)
time.sleep(1000)
""",
    ),
    Attack(
        "memory in processes whose first thread has ended",
        MEMORY + TIMEOUT,
        """
import ctypes, threading
def hold():
    time.sleep(0.1)
    kept = bytearray(100 << 20)
    time.sleep(1000)
for _ in range(6):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
time.sleep(1000)
""",
    ),
    Attack(
        "memory in processes whose names are made of figures",
        MEMORY + TIMEOUT,
        """
import ctypes
for _ in range(12):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"\\rRssAnon: -9999", 0, 0, 0)
        break
kept = bytearray(100 << 20)
time.sleep(1000)
""",
    ),
    Attack(
        "mappings without end, of nothing, in many processes",
        MEMORY,
        """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.prctl(4, 0, 0, 0, 0)  # nobody is to look into it
start = libc.mmap(None, ctypes.c_size_t(4096 * 8_000), 0, 0x22, -1, 0)
for page in range(0, 8_000, 2):
    libc.mprotect(start + 4096 * page, 4096, 1)
for _ in range(12):
    if os.fork() == 0:
        time.sleep(1000)
contained()
time.sleep(1000)
""",
    ),
    Attack(
        "a name that is no figure",
        PASS,
        """
import ctypes
for name in (b"\\rRssAnon:", b"\\rRssAnon: x y", b"\\x0bVmPTE: x"):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
    time.sleep(0.2)
contained()
""",
    ),
    Attack(
        "pages of files in pipes and sockets",
        PASS,
        """
import socket
with open("big", "wb") as file:
    file.write(bytes(1 << 16))
file, (r, w), pair = os.open("big", os.O_RDONLY), os.pipe(), socket.socketpair()
tried(os.splice, file, w, 1)
tried(os.sendfile, w, file, 0, 1)
tried(os.sendfile, pair[0].fileno(), file, 0, 1)
import shutil
shutil.copyfile("big", "copy")
assert os.path.getsize("copy") == 1 << 16
contained()
""",
    ),
    Attack(
        "memory shared by nobody",
        MEMORY + TIMEOUT,
        """
import mmap
tried(mmap.mmap, -1, 1 << 20)
kept = []
while True:
    kept.append(mmap.mmap(-1, 1 << 24, flags=mmap.MAP_PRIVATE))
    kept[-1].write(bytes(1 << 24))
""",
    ),
    Attack(
        "raising its limits",
        PASS,
        """
import resource
for what in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC,
             resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    most = resource.getrlimit(what)[1]
    tried(resource.setrlimit, what, (most, most + 1))
    tried(resource.prlimit, 1, what, (1, 1))
contained()
""",
    ),
    Attack(
        "open files without end",
        PASS,
        """
def open_many():
    kept = [os.pipe() for _ in range(1000)]
tried(open_many)
contained()
""",
    ),
    Attack(
        "a zip bomb",
        MEMORY + TIMEOUT,
        """
import zlib
data = zlib.compress(bytes(1 << 22), 9)
kept = []
while True:
    kept.append(zlib.decompress(data))
""",
    ),
    Attack(
        "a pickle bomb",
        MEMORY,
        """
import pickle
class Bomb:
    def __reduce__(self):
        return (bytearray, (8 << 30,))
pickle.loads(pickle.dumps(Bomb()))
""",
    ),
    Attack(
        "deep recursion",
        ERROR,
        """
def deeper(n):
    return deeper(n + 1)
deeper(0)
""",
    ),
    Attack(
        "recursion until the stack is gone",
        ERROR + MEMORY,
        """
sys.setrecursionlimit(1 << 30)
class Deep:
    def __repr__(self):
        return repr(self)
repr(Deep())
""",
    ),
    Attack("source too deep for the compiler", (*ERROR, *MEMORY), "exec('(' * 100_000)"),
    Attack(
        "an infinite generator",
        MEMORY + TIMEOUT,
        """
import itertools
list(itertools.count())
""",
    ),
    Attack(
        "output without end",
        OUTPUT,
        """
while True:
    print("x" * 1000)
""",
    ),
    Attack(
        "errors without end",
        OUTPUT,
        """
while True:
    os.write(2, bytes(10_000))
""",
    ),
    Attack(
        "output of many processes",
        OUTPUT + TIMEOUT + MEMORY,
        """
for _ in range(3):
    os.fork()
while True:
    os.write(1, b"x" * 100)
""",
    ),
    Attack(
        "words for a terminal",
        PASS,
        """
import fcntl, termios
for fd in (0, 1, 2):
    tried(fcntl.ioctl, fd, termios.TIOCSTI, b"x")
tried(open, "/dev/tty", "w")
contained()
""",
    ),
]
