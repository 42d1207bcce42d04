"""Hostile programs and their required outcomes, from the files in attacks/.

A program that prints `contained` only passes: its attack ran without success. A successful attack
prints `escaped`. Programs with `guess` try to find the expected value instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox.program import CallTest, SandboxProgram, StdinTest

#: No program in a jail may read this; programs know the prefix to search for.
SECRET = "canary-7f3a91"
#: Expected value of the function-call tests; never sent into a jail.
EXPECTED_VALUE = 918_273_645
#: Name of every file that a program tries to leave behind.
LEFT = "streamrl-escaped"

_TOOLS = f'''
import os, sys, time
SECRET, LEFT = "{SECRET}"[:7], "{LEFT}"
def tried(action, *arguments):
    try:
        result = action(*arguments)
    except BaseException:
        return None
    print("escaped", action, arguments)
    return result
def leaked(text):
    if SECRET + "7f" in str(text).replace(" ", ""):
        print("escaped")
def contained():
    print("contained")
'''
#: Helpers for direct system calls, with numbers on x86-64 and ARM.
_SYSCALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "ptrace": (101, 117), "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "clone": (56, 220),
    "clone3": (435, 435), "socket": (41, 198), "memfd_create": (319, 279), "shmget": (29, 194),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "process_vm_readv": (310, 270), "pidfd_getfd": (438, 438), "open_tree": (428, 428),
    "fsopen": (430, 430), "pivot_root": (155, 41), "chroot": (161, 51), "kexec_load": (246, 104),
    "init_module": (175, 105), "reboot": (169, 142), "prlimit64": (302, 261), "setuid": (105, 146),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "vmsplice": (278, 75),
    "name_to_handle_at": (303, 264), "mseal": (462, 462), "statmount": (457, 457),
    "sched_setaffinity": (203, 122), "quotactl": (179, 60), "swapon": (167, 224),
    "inotify_init1": (294, 26), "ioprio_set": (251, 30), "syncfs": (306, 267), "flock": (73, 32),
    "syslog": (103, 116), "sethostname": (170, 161), "memfd_secret": (447, 447),
}
def denied(name, *arguments):
    number = NUMBERS[name][os.uname().machine == "aarch64"]
    if libc.syscall(number, *arguments) != -1:
        print("escaped", name)
"""


@dataclass(frozen=True)
class Attack:
    """A hostile program. {canary}, {port}, {pid} stand for a file, a server and a process.

    outcomes: allowed outcomes; several if two limits race.
    flags: `calls`: calls the function `guess` instead of running a script; `syscalls`: uses
        `denied`; `slow`: takes seconds, while a quick attack of the same type exists; `user`:
        behaves differently for an ordinary user (permissions, processes, the user's files).
    """

    name: str
    outcomes: frozenset[RewardOutcome]
    source: str
    flags: frozenset[str] = frozenset()

    def make_program(self, facts: dict[str, str]) -> SandboxProgram:
        """Return the program with the host's facts filled in."""
        source = _TOOLS + (_SYSCALLS if "syscalls" in self.flags else "") + self.source
        for name, value in facts.items():
            source = source.replace("{" + name + "}", value)
        calls = "calls" in self.flags
        test = CallTest("guess", [], [EXPECTED_VALUE]) if calls else StdinTest("", "contained\n")
        return SandboxProgram("python", source, [test])


def _read_attacks() -> Iterator[Attack]:
    """Parse attacks/*.txt: programs under lines `### name | outcomes | flags`."""
    for path in sorted(Path(__file__).with_name("attacks").glob("*.txt")):
        for section in path.read_text().split("\n### ")[1:]:
            head, _, source = section.partition("\n")
            name, outcomes, *flags = head.split(" | ")
            yield Attack(
                name,
                frozenset(map(RewardOutcome, outcomes.split())),
                source,
                frozenset(" ".join(flags).split()),
            )


COMPILE_ERROR = frozenset({RewardOutcome.COMPILE_ERROR})
ATTACKS = [
    *_read_attacks(),
    Attack("a source with a null", COMPILE_ERROR, "x = 1\x00", frozenset({"calls"})),
    Attack("a source that claims another encoding", COMPILE_ERROR, "\udcff = 1"),
]
