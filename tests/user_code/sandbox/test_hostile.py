"""Hostile programs do not escape, do not choose to pass, and do not disturb other programs."""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox.program import ProgramLimits, SandboxProgram, StdinTest
from streamrl.user_code.sandbox.sandbox import Sandbox
from tests.descendants import descendants
from tests.user_code.sandbox.hostile import ATTACKS, LEFT, SECRET, Attack

LIMITS = ProgramLimits(
    wall_s=4.0,
    cpu_s=1.0,
    total_s=10.0,
    memory_mib=256,
    disk_mib=8,
    files=512,
    processes=16,
    output_kib=256,
)

ATTACK_PARAMS = [
    pytest.param(attack, id=attack.name, marks=[pytest.mark.slow] * ("slow" in attack.flags))
    for attack in ATTACKS
]
JAILS = 2
NEIGHBOR = SandboxProgram(
    "python", "print(sum(map(int, input().split())))", [StdinTest("1 2 3", "6")]
)
#: Directories that a program could write to without a jail.
WRITABLE_FOLDERS = (
    "/",
    "/tmp",
    "/var/tmp",
    "/dev",
    "/dev/shm",
    "/usr",
    "/usr/lib",
    "/etc",
    "/run",
    "/root",
)


@dataclass
class Host:
    """Targets of hostile programs: a file, a server, a process, an environment variable."""

    sandbox: Sandbox
    canary: Path
    server: socket.socket
    process: subprocess.Popen[bytes]
    other_processes: set[psutil.Process]

    @property
    def facts(self) -> dict[str, str]:
        port = str(self.server.getsockname()[1])
        return {"canary": str(self.canary), "port": port, "pid": str(self.process.pid)}

    def is_contacted(self) -> bool:
        """Return True if a program has connected to the server."""
        try:
            self.server.accept()
        except BlockingIOError:
            return False
        return True

    async def wait_until_only_jails(self, jails: int) -> None:
        """Wait until only jails remain: bubblewrap and driver of each."""
        deadline = time.monotonic() + 10
        while len(processes := descendants() - self.other_processes) != 2 * jails:
            assert time.monotonic() < deadline, [process.cmdline() for process in processes]
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    os.environ["STREAMRL_SECRET"] = SECRET
    canary = tmp_path_factory.mktemp("host") / "canary"
    canary.write_text(SECRET)
    process = subprocess.Popen(["sleep", "1000"])
    # Processes of other tests, such as Python's resource tracker.
    other_processes = descendants()
    sandbox = await Sandbox.start(LIMITS, jails=JAILS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        host = Host(sandbox, canary, server, process, other_processes)
        yield host
    await sandbox.close()
    await host.wait_until_only_jails(0)
    process.kill()
    process.wait()
    del os.environ["STREAMRL_SECRET"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("attack", ATTACK_PARAMS)
async def test_an_attack_gets_its_outcome_and_leaves_no_trace(host: Host, attack: Attack):
    outcome, neighbor = await asyncio.gather(
        host.sandbox.run(attack.make_program(host.facts)), host.sandbox.run(NEIGHBOR)
    )
    assert outcome.outcome in attack.outcomes, outcome
    assert neighbor.outcome is RewardOutcome.PASS, neighbor
    assert host.canary.read_text() == SECRET
    assert host.process.poll() is None
    assert not host.is_contacted()
    assert [folder for folder in WRITABLE_FOLDERS if Path(folder, LEFT).exists()] == []
    await host.wait_until_only_jails(JAILS)


def test_attack_names_are_unique():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) > 100
