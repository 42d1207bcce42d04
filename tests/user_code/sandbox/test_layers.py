"""Each layer of the sandbox in isolation: other layers would hide a missing layer."""

import json
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pyseccomp
import pytest
import pytest_asyncio

from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox.backend_choice import (
    _export_filter,
    build_syscall_filter,
    probe_isolation,
)
from streamrl.user_code.sandbox.jail import (
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
    SandboxProgram,
    StdinTest,
)
from streamrl.user_code.sandbox.sandbox import Sandbox
from streamrl.user_code.sandbox.verdicts import make_program_message
from streamrl.user_code.sandbox.verdicts import make_test_message as message_of

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
