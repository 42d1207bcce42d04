"""The sandbox with harmless programs, and its life cycle from start to close."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pyseccomp
import pytest
import pytest_asyncio

from streamrl.errors import ConfigError
from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox.jail import (
    ENVIRONMENT,
    NO_ISOLATION,
    IsolationMode,
    Jail,
    JailSpec,
    compute_jail_user,
    list_isolation_modes,
    make_jail_spec,
)
from streamrl.user_code.sandbox.program import (
    LANGUAGES,
    CallTest,
    LanguageSpec,
    ProgramLimits,
    ProgramResult,
    ProgramTestResult,
    SandboxProgram,
    StdinTest,
)
from streamrl.user_code.sandbox.sandbox import (
    Sandbox,
    _export_filter,
    build_syscall_filter,
    make_program_message,
    probe_isolation,
)
from streamrl.user_code.sandbox.sandbox import make_test_message as message_of
from tests.descendants import descendants

ADD = "print(sum(map(int, input().split())))"
#: Programs that add two numbers, and broken programs, by language.
ADD_IN = {
    "cpp": (
        "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }",
        "int main() {",
    ),
    "javascript": (
        "const words = require('fs').readFileSync('/dev/stdin', 'utf8').split(' ');\n"
        "console.log(+words[0] + +words[1])",
        "(",
    ),
    "bash": ("read a b; echo $((a + b))", "if"),
}
TOOLS = {"cpp": "g++", "javascript": "node", "bash": "bash"}
INSTALLED = [name for name, tool in TOOLS.items() if shutil.which(tool, path=ENVIRONMENT["PATH"])]
#: Fake bubblewrap that runs its command without isolation.
FAKE_BUBBLEWRAP = """#!/bin/sh
while [ "${1#*/bin/python}" = "$1" ]; do
    [ "$1" = --info-fd ] && echo '{"child-pid": '$$'}' >&"$2"
    shift
done
exec "$@"
"""
#: Outputs that are slow to compare or parse: text that differs at its end, a list of many lists.
LONG = [
    SandboxProgram(
        "python", "print('\\n' * 3_999_999, 'c')", [StdinTest("", "\n" * 3_999_999 + "b")]
    ),
    SandboxProgram("python", "def f(): return [[]] * 999_999", [CallTest("f", [], [5])]),
]
QUICK = ProgramLimits(wall_s=8.0, total_s=20.0, memory_mib=512, disk_mib=8)
module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    languages = {name: LANGUAGES[name] for name in ("python", *INSTALLED)}
    started = await Sandbox.start(QUICK, jails=2, languages=languages)
    yield started
    await started.close()


async def run(
    sandbox: Sandbox, source: str, *tests: StdinTest | CallTest, language: str = "python"
) -> ProgramResult:
    return await sandbox.run(SandboxProgram(language, source, tests or [StdinTest("", "")]))


async def verdict(sandbox: Sandbox, source: str, *tests: StdinTest | CallTest) -> RewardOutcome:
    return (await run(sandbox, source, *tests)).outcome


@module_loop
async def test_a_function_is_judged_by_its_return_value(sandbox: Sandbox):
    pairs = "def pairs(a, b): return [(a, b)], {a: 0.1 + 0.2}"
    right = CallTest("pairs", [1, "x"], [None, ([[1, "x"]], {"1": 0.3})])
    assert await verdict(sandbox, pairs, right) is RewardOutcome.PASS
    assert await verdict(sandbox, pairs, CallTest("pairs", [1, 2], [3])) is RewardOutcome.WRONG
    method = (
        "class Solution:\n    def twice(self, x):\n        print('debug')\n        return 2 * x"
    )
    assert await verdict(sandbox, method, CallTest("twice", [4], [8])) is RewardOutcome.PASS
    assert await verdict(sandbox, "", CallTest("twice", [4], [8])) is RewardOutcome.RUNTIME_ERROR


@module_loop
async def test_a_failure_is_described_in_one_line(sandbox: Sandbox):
    outcome = await run(sandbox, "x = 1\nx / 0")
    assert outcome.detail == "ZeroDivisionError: division by zero"
    outcome = await run(sandbox, "import sys; sys.exit(3)")
    assert outcome.detail == "exit code 3"
    outcome = await run(sandbox, "print(5)", StdinTest("", "6"))
    assert outcome.detail == r"wrote '5\n', not '6'"


@module_loop
async def test_tests_stop_at_the_first_failure_if_stop_early(sandbox: Sandbox):
    tests = [StdinTest("1 2", "3"), StdinTest("x", "0"), StdinTest("2 2", "4"), StdinTest("", "")]
    early = await sandbox.run(SandboxProgram("python", ADD, tests))
    expected = [RewardOutcome.PASS, RewardOutcome.RUNTIME_ERROR]
    assert [r.outcome for r in early.test_results] == expected
    full = await sandbox.run(SandboxProgram("python", ADD, tests, stop_early=False))
    assert [r.outcome for r in full.test_results] == expected * 2
    assert (early.pass_rate, full.pass_rate) == (0.25, 0.5)
    assert full.outcome is RewardOutcome.RUNTIME_ERROR


@module_loop
async def test_each_test_starts_in_a_clean_workspace(sandbox: Sandbox):
    source = """
import os
assert os.listdir(".") == [] and sorted(os.listdir("/tmp")) == ["program", "stdin", "work"]
for level in range(300):
    os.mkdir("d")
    open("d/\\udcff file", "w").close()
    os.symlink("/usr", "d/link")
    os.chdir("d")
os.chmod("/tmp/work/d", 0)
if os.fork() == 0:
    while True:
        open("/tmp/work/again", "w").close()
"""
    tests = [StdinTest("", "")] * 3
    outcome = await run(sandbox, source, *tests)
    assert [result.outcome for result in outcome.test_results] == [RewardOutcome.PASS] * 3, outcome


@module_loop
async def test_compiled_files_are_restored_before_each_test(sandbox: Sandbox):
    source = 'ls /tmp/program; echo "echo no" > /tmp/program/solution.sh; touch /tmp/program/n'
    tests = [StdinTest("", "solution.sh")] * 3
    outcome = await run(sandbox, source, *tests, language="bash")
    assert [result.outcome for result in outcome.test_results] == [RewardOutcome.PASS] * 3, outcome


@module_loop
async def test_tests_continue_after_a_jail_was_killed(sandbox: Sandbox):
    source = """
import os, time
if input() == "grow":
    for _ in range(8):
        if os.fork() == 0:
            break
    kept = bytearray(200 << 20)
    time.sleep(100)
print("done")
"""
    tests = [StdinTest(word, "done") for word in ("a", "grow", "b")]
    outcome = await sandbox.run(SandboxProgram("python", source, tests, stop_early=False))
    verdicts = [result.outcome for result in outcome.test_results]
    assert verdicts == [RewardOutcome.PASS, RewardOutcome.MEMORY, RewardOutcome.PASS]


@module_loop
async def test_total_s_limits_all_tests_together(sandbox: Sandbox):
    slow = SandboxProgram("python", "import time; time.sleep(0.3)", [StdinTest("", "")] * 9)
    limited = await Sandbox.start(replace(QUICK, total_s=1.65), jails=1)
    outcome = await limited.run(slow)
    await limited.close()
    assert outcome.outcome is RewardOutcome.TIMEOUT
    assert 2 <= len(outcome.test_results) <= 6
    assert outcome.test_results[0].outcome is RewardOutcome.PASS
    assert (await sandbox.run(slow)).outcome is RewardOutcome.PASS


@module_loop
async def test_python_programs_run_in_a_normal_environment(sandbox: Sandbox):
    source = """
import asyncio, collections, dataclasses, heapq, itertools, math, multiprocessing, numbers, re
import sys, threading, typing
from functools import lru_cache
@dataclasses.dataclass
class Point:
    x: int
async def later():
    await asyncio.sleep(0.01)
    return Point(1)
assert asyncio.run(later()) == Point(1)
assert multiprocessing.Pool(2).map(abs, [-1, -2]) == [1, 2]
thread = threading.Thread(target=lambda: print(sys.stdin.readline(), end=""))
if __name__ == "__main__":
    thread.start()
    thread.join()
    print(open("/dev/stdin").read(3), sys.argv)
    exit()
"""
    assert await verdict(sandbox, source, StdinTest("7\n8\n", "7\n7\n8 ['solution.py']")) is (
        RewardOutcome.PASS
    )


@module_loop
@pytest.mark.parametrize("language", INSTALLED)
async def test_built_in_languages_run(sandbox: Sandbox, language: str):
    source, broken = ADD_IN[language]
    tests = [StdinTest("1 2", "3"), StdinTest("3 4", "7"), StdinTest("1 1", "3")]
    outcome = await run(sandbox, source, *tests, language=language)
    verdicts = [result.outcome for result in outcome.test_results]
    assert verdicts == [RewardOutcome.PASS, RewardOutcome.PASS, RewardOutcome.WRONG], outcome
    outcome = await run(sandbox, broken, *tests, language=language)
    compiled = bool(LANGUAGES[language].compile)
    assert outcome.outcome is (
        RewardOutcome.COMPILE_ERROR if compiled else RewardOutcome.RUNTIME_ERROR
    )
    assert outcome.detail and "\n" not in outcome.detail


@module_loop
@pytest.mark.parametrize("long", LONG, ids=["text", "value"])
async def test_programs_run_in_order_without_blocking_the_event_loop(
    sandbox: Sandbox, long: SandboxProgram
):
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            # CPU time, not wall time: counts work in the loop and in threads that hold the GIL, but
            # not waiting for a core.
            before = time.process_time()
            await asyncio.sleep(0.005)
            longest = max(longest, time.process_time() - before)

    heartbeat = asyncio.create_task(beat())
    short = SandboxProgram("python", ADD, [StdinTest("1 2", "3")])
    outcomes = await asyncio.gather(*map(sandbox.run, [short, long] * 2))
    heartbeat.cancel()
    assert [o.outcome for o in outcomes] == [RewardOutcome.PASS, RewardOutcome.WRONG] * 2
    # Processing the whole text or list at once takes longer.
    assert longest < 0.3


@module_loop
async def test_cancelling_the_caller_kills_the_program(sandbox: Sandbox):
    sleeper = SandboxProgram("python", "import time; time.sleep(60)", [StdinTest("", "")])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.run(sleeper), 0.2)
    assert await verdict(sandbox, ADD, StdinTest("1 2", "3")) is RewardOutcome.PASS


async def test_closing_the_sandbox_leaves_no_process_and_refuses_programs():
    before = descendants()
    sandbox = await Sandbox.start(QUICK, jails=2)
    sleeper = SandboxProgram("python", "import time; time.sleep(60)", [StdinTest("", "")])
    running = [asyncio.create_task(sandbox.run(sleeper)) for _ in range(4)]
    await asyncio.sleep(0.2)
    await sandbox.close()
    assert not descendants() - before
    outcomes = await asyncio.gather(*running)
    assert {outcome.outcome for outcome in outcomes} == {RewardOutcome.INFRA_ERROR}
    await sandbox.close()


def test_jails_die_with_the_host_process():
    source = """
import asyncio, sys
from streamrl.user_code.sandbox.program import ProgramLimits, SandboxProgram, StdinTest
from streamrl.user_code.sandbox.sandbox import Sandbox
async def main():
    sandbox = await Sandbox.start(ProgramLimits(wall_s=100, total_s=100), jails=2)
    program = SandboxProgram("python", "import time\\nwhile True: pass", [StdinTest("", "")])
    running = asyncio.create_task(sandbox.run(program))
    await asyncio.sleep(0.3)
    print("running", flush=True)
    await running
asyncio.run(main())
"""
    host = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert host.stdout is not None
    assert host.stdout.readline() == b"running\n"
    deadline = time.monotonic() + 20
    while len(jails := psutil.Process(host.pid).children(recursive=True)) < 4:
        assert time.monotonic() < deadline, jails
        time.sleep(0.02)
    os.kill(host.pid, signal.SIGKILL)
    host.communicate()
    ended, alive = psutil.wait_procs(jails, timeout=10)
    assert alive == [], ended


async def test_the_probe_detects_a_bubblewrap_without_isolation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake_bubblewrap = tmp_path / "bwrap"
    fake_bubblewrap.write_text(FAKE_BUBBLEWRAP)
    fake_bubblewrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="no isolation holds here"):
        await Sandbox.start(QUICK, jails=1)


async def test_the_probe_lists_all_escapes():
    reason = await probe_isolation(make_jail_spec(NO_ISOLATION, QUICK, b""))
    assert reason is not None
    for escape in ("connect to", "read a file", "list the directories", "without limit", "signal"):
        assert escape in reason


async def test_allow_unsafe_runs_programs_within_limits_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    # Without isolation RLIMIT_NPROC counts all processes of the user, not those of a program.
    limits = replace(QUICK, processes=1 << 16)
    sandbox = await Sandbox.start(limits, jails=2, allow_unsafe=True)
    assert "no sandbox" in sandbox.user_warning
    tests = [StdinTest("1 2", "3"), StdinTest("3 3", "6")]
    assert await verdict(sandbox, ADD, *tests) is RewardOutcome.PASS
    loop = "import os\nos.fork()\nwhile True: pass"
    assert await verdict(sandbox, loop, StdinTest("", "")) is RewardOutcome.TIMEOUT
    assert (
        await verdict(sandbox, "x = bytearray(1 << 33)", StdinTest("", "")) is RewardOutcome.MEMORY
    )
    outcome = await run(sandbox, "import os; os.chdir('..'); print(os.getcwd())")
    folder = outcome.detail.removeprefix("wrote '").partition("\\n")[0]
    await sandbox.close()
    assert "streamrl-unsafe-" in folder
    assert not Path(folder).exists()


async def test_allow_unsafe_still_uses_available_isolation():
    sandbox = await Sandbox.start(QUICK, jails=1, allow_unsafe=True)
    await sandbox.close()
    assert sandbox.user_warning == ""


async def test_a_language_with_a_missing_tool_is_refused_by_name():
    languages = {"cobol": LanguageSpec("x.cob", run=["{dir}/x"], compile=["cobc", "{dir}/x.cob"])}
    with pytest.raises(
        ConfigError, match=r"^rewards.language=cobol: compile: cobc: not found in /"
    ):
        await Sandbox.start(QUICK, jails=1, languages=languages)


def test_an_infra_error_determines_the_outcome():
    results = (
        ProgramTestResult(RewardOutcome.WRONG),
        ProgramTestResult(RewardOutcome.INFRA_ERROR, "no jail"),
    )
    assert ProgramResult(results, 3).outcome is RewardOutcome.INFRA_ERROR
    assert ProgramResult(results, 3).detail == "no jail"


# Each layer of the sandbox in isolation: other layers would hide a missing layer.


LIMITS = ProgramLimits(wall_s=8.0, total_s=20.0, memory_mib=256, disk_mib=8, compile_s=0.3)
NUMBER = 7
#: Program that tries to reach the network.
REACH = """
import socket

def reach(port, name):
    reached = []
    def attempt(target, action, *arguments):
        try:
            action(*arguments)
        except OSError:
            return
        reached.append(target)
    def send(family, address):
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"x", address)
    def join(address):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
    attempt("the host's loopback", socket.create_connection, ("127.0.0.1", port), 1)
    attempt("the host's abstract sockets", join, "\\0" + name)
    attempt("a machine of the network", send, socket.AF_INET, ("192.0.2.1", 9))
    if {device for _, device in socket.if_nameindex()} - {"lo"}:
        reached.append("the network's devices")
    return reached
"""
#: Results of REACH without isolation, on a machine without network.
HOST_TARGETS = {"the host's loopback", "the host's abstract sockets"}


def permissive_filter() -> bytes:
    return _export_filter(pyseccomp.SyscallFilter(pyseccomp.ALLOW))


async def run_in(spec: JailSpec, source: str, test: CallTest) -> object:
    """Return the value of a function called in a jail."""
    jail = await Jail.start(spec, NUMBER)
    try:
        deadline = time.monotonic() + 20.0
        program = SandboxProgram("python", source, [test])
        await jail.request_report(
            make_program_message(program, LANGUAGES["python"], spec.limits), deadline
        )
        report = await jail.request_report(message_of(test, 8.0), deadline)
    finally:
        await jail.kill()
    return json.loads(report.out)


async def find_reachable_targets(isolation: IsolationMode) -> set[str]:
    """Return the reachable network targets without a seccomp filter."""
    spec = make_jail_spec(isolation, LIMITS, permissive_filter())
    name = f"streamrl-layers-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{name}")
        local.listen()
        targets = await run_in(spec, REACH, CallTest("reach", [server.getsockname()[1], name], []))
    assert isinstance(targets, list)
    return set(targets)


@pytest.mark.parametrize("isolation", list_isolation_modes(), ids=lambda isolation: isolation.name)
async def test_namespaces_block_the_network_even_without_the_syscall_filter(
    isolation: IsolationMode,
):
    reason = await probe_isolation(make_jail_spec(isolation, LIMITS, build_syscall_filter()))
    if reason is None:
        assert await find_reachable_targets(isolation) == set()
    else:
        # A machine may not support every mode; the sandbox never uses a mode that fails the probe.
        assert isolation != list_isolation_modes()[0], reason


async def test_the_network_probe_succeeds_without_isolation():
    assert await find_reachable_targets(NO_ISOLATION) >= HOST_TARGETS


@pytest_asyncio.fixture
async def jail() -> AsyncIterator[tuple[JailSpec, int]]:
    """Start a jail; return its spec and the pid of its process 1."""
    spec = make_jail_spec(list_isolation_modes()[0], LIMITS, build_syscall_filter())
    started = await Jail.start(spec, NUMBER)
    assert started._init_process is not None
    yield spec, started._init_process[0]
    await started.kill()


async def test_a_jail_has_its_own_namespaces(jail: tuple[JailSpec, int]):
    spec, pid = jail
    kinds = ["mnt", "pid", "net", "ipc", "uts"] + ["user"] * spec.isolation.has_user_namespace
    shared = [
        kind
        for kind in kinds
        if os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}")
    ]
    assert shared == []
    assert os.getsid(pid) != os.getsid(0), "it has no terminal"


async def test_a_jail_has_no_capabilities_and_cannot_gain_any(jail: tuple[JailSpec, int]):
    spec, pid = jail
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    for capability_set in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[capability_set][0], 16) == 0, capability_set
    assert status["NoNewPrivs"] == ["1"]
    assert status["Seccomp"] == ["2"], "a filter is in force"
    if os.geteuid() != 0:
        assert "0" not in {*status["Uid"], *status["Gid"]}
    if spec.isolation.has_dedicated_user:
        assert {*status["Uid"], *status["Gid"]} == {str(compute_jail_user(NUMBER))}
        assert status["Groups"] == []


async def outcome_of(
    language: LanguageSpec, source: str, *tests: StdinTest | CallTest
) -> ProgramResult:
    sandbox = await Sandbox.start(LIMITS, jails=1, languages={"custom": language})
    try:
        return await sandbox.run(SandboxProgram("custom", source, tests))
    finally:
        await sandbox.close()


async def test_a_compiler_beyond_compile_s_is_killed():
    slow = LanguageSpec("x.sh", run=["sh", "{dir}/x.sh"], compile=["sleep", "60"])
    outcome = await outcome_of(slow, "echo", StdinTest("", ""))
    assert outcome.outcome is RewardOutcome.COMPILE_ERROR
    assert outcome.detail == "the compiler took too long"


RESERVE = """
import mmap
def reserve(mib):
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    kept = mmap.mmap(-1, 2 << 30, flags=private)
    for page in range(0, mib << 20, 4096):
        kept[page] = 1
    import time
    time.sleep(0.2 if mib else 0)
    return mib
"""


@pytest.mark.parametrize(
    ("limited", "mib", "verdict"),
    [
        (False, 0, RewardOutcome.PASS),
        (False, 600, RewardOutcome.MEMORY),
        (True, 0, RewardOutcome.MEMORY),
    ],
    ids=["reserves", "uses", "may not reserve"],
)
async def test_a_language_without_address_space_limit_is_limited_by_memory_use(
    limited: bool, mib: int, verdict: RewardOutcome
):
    language = LanguageSpec("solution.py", limit_address_space=limited)
    outcome = await outcome_of(language, RESERVE, CallTest("reserve", [mib], [mib]))
    assert outcome.outcome is verdict, outcome


async def test_a_program_is_pinned_to_a_core_and_sees_no_installed_packages():
    source = f"""
import os, sys
from importlib.util import find_spec
def look():
    packages = [name for name in {["numpy", "torch", "ray", "streamrl"]} if find_spec(name)]
    return [len(os.sched_getaffinity(0)), packages]
"""
    outcome = await outcome_of(LANGUAGES["python"], source, CallTest("look", [], [[1, []]]))
    assert outcome.outcome is RewardOutcome.PASS, outcome
