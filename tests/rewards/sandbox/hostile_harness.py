"""Attacks on the driver: forged reports, patched builtins, searches for the expected value."""

from streamrl.rewards.interface.verdict import RewardOutcome
from tests.rewards.sandbox.hostile import ERROR, MEMORY, OUTPUT, PASS, TIMEOUT, WRONG, Attack

FORGERIES = [
    Attack(
        "a forged verdict on every descriptor",
        WRONG + ERROR,
        """
import struct
for fd in range(3, 4096):
    for data in (struct.pack("!BiddII", 1, 0, 0.0, 0.0, 10, 0) + b"contained\\n", b"PASS\\n"):
        try:
            os.write(fd, data)
        except OSError:
            pass
""",
    ),
    Attack(
        "a forged verdict as output",
        WRONG,
        """
print('{"verdict": "pass", "score": 1.0}')
print("contained", end="")
""",
    ),
    Attack(
        "garbage on every descriptor",
        WRONG,
        """
for fd in range(0, 4096):
    try:
        os.write(fd, os.urandom(1000))
    except OSError:
        pass
""",
    ),
    Attack(
        "reading every descriptor",
        PASS,
        """
for fd in range(3, 4096):
    try:
        leaked(os.read(fd, 1 << 16))
        print("escaped")
    except OSError:
        pass
contained()
""",
    ),
    Attack("an exit before anything", WRONG, "os._exit(0)"),
    Attack("an exit by exception", WRONG, "raise SystemExit"),
    Attack("an exit with a text", ERROR, "sys.exit('contained')"),
    Attack(
        "an exit in a thread",
        PASS,
        """
import threading
threading.Thread(target=sys.exit).start()
contained()
""",
    ),
    Attack(
        "an exit code of its own choice",
        ERROR,
        """
print("contained", flush=True)
os._exit(77)
""",
    ),
    Attack(
        "an exception that is no Exception",
        ERROR,
        """
class Odd(BaseException):
    pass
print("contained")
raise Odd
""",
    ),
    Attack(
        "an exception that cannot be printed",
        WRONG,
        """
class Odd(Exception):
    def __str__(self):
        os._exit(0)
    __repr__ = __str__
sys.excepthook = lambda *_: 1 / 0
raise Odd
""",
    ),
    Attack(
        "closed streams",
        WRONG,
        """
for fd in range(0, 200):
    try:
        os.close(fd)
    except OSError:
        pass
""",
    ),
    Attack(
        "interrupts",
        ERROR,
        """
import signal
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
""",
    ),
    Attack(
        "a debugger's hook",
        PASS,
        """
sys.settrace(lambda *_: None)
sys.setprofile(lambda *_: None)
contained()
""",
    ),
]

FUNCTIONS = [
    Attack(
        "searching frames and objects for the wanted value",
        WRONG,
        """
import gc
def guess():
    seen, pending = set(), [*gc.get_objects(), sys._getframe(), *sys.modules.values()]
    while pending and len(seen) < 200_000:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, int) and 918_000_000 < thing < 919_000_000:
            return thing
        pending += gc.get_referents(thing)
    return 0
""",
        calls=True,
    ),
    Attack(
        "patched builtins",
        ERROR + WRONG,
        """
import builtins, json
for name in ("len", "all", "isinstance", "print", "compile", "exec", "open"):
    setattr(builtins, name, lambda *_, **__: True)
json.dumps = lambda *_, **__: "true"
def guess():
    return True
""",
        calls=True,
    ),
    Attack(
        "patched os.write and os._exit",
        ERROR,
        """
os.write = lambda fd, data: len(data)
os._exit = lambda code: None
sys.exit = lambda *_: None
def guess():
    return 0
""",
        calls=True,
    ),
    Attack(
        "an exit as it is loaded",
        ERROR,
        """
os._exit(0)
""",
        calls=True,
    ),
    Attack(
        "an exit as it is called",
        ERROR,
        """
def guess():
    sys.exit(0)
""",
        calls=True,
    ),
    Attack(
        "a value that equals everything",
        ERROR,
        """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    __class__ = int
def guess():
    return {Any(1)}
""",
        calls=True,
    ),
    Attack(
        "a number that equals everything",
        WRONG,
        """
class Any(int):
    def __eq__(self, other): return True
    def __repr__(self): return "true"
    __str__ = __repr__
def guess():
    return Any(1)
""",
        calls=True,
    ),
    Attack(
        "a list that equals everything",
        WRONG,
        """
class Any(list):
    def __eq__(self, other): return True
    def __len__(self): return 1
def guess():
    return Any([1])
""",
        calls=True,
    ),
    Attack(
        "two values at once",
        ERROR,
        """
for fd in range(3, 300):
    try:
        os.write(fd, b"1 ")
    except OSError:
        pass
def guess():
    return 2
""",
        calls=True,
    ),
    Attack(
        "not a number",
        WRONG,
        """
def guess():
    return float("nan")
""",
        calls=True,
    ),
    Attack(
        "an endless number",
        ERROR,
        """
def guess():
    sys.set_int_max_str_digits(0)
    return 10 ** 20_000
""",
        calls=True,
    ),
    Attack(
        "a value nested too deeply",
        ERROR,
        """
def guess():
    for fd in range(3, 300):
        try:
            os.write(fd, b"[" * 30_000 + b"]" * 30_000)
        except OSError:
            pass
    os._exit(0)
""",
        calls=True,
    ),
    Attack(
        "a value that contains itself",
        ERROR,
        """
def guess():
    value = []
    value.append(value)
    return value
""",
        calls=True,
    ),
    Attack(
        "a value without end",
        OUTPUT + MEMORY,
        """
def guess():
    return "x" * (1 << 22)
""",
        calls=True,
    ),
    Attack(
        "a value that is none",
        ERROR,
        """
def guess():
    return (x for x in iter(int, 1))
""",
        calls=True,
    ),
    Attack("no such function", ERROR, "pass", calls=True),
    Attack("a name that is no function", ERROR, "guess = 5", calls=True),
    Attack(
        "a call that never returns",
        TIMEOUT,
        """
def guess():
    while True:
        pass
""",
        calls=True,
    ),
    Attack(
        "a source that is no program", (RewardOutcome.COMPILE_ERROR,), "def guess(:", calls=True
    ),
    Attack("a source with a null", (RewardOutcome.COMPILE_ERROR,), "x = 1\x00", calls=True),
    Attack("a source that claims another encoding", (RewardOutcome.COMPILE_ERROR,), "\udcff = 1"),
]
