"""The sandbox as an ordinary user; if run as root, these tests switch to another user."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

import streamrl
from streamrl.user_code.sandbox.jail import find_python
from tests.user_code.sandbox.hostile import ATTACKS
from tests.user_code.sandbox.test_hostile import LIMITS

NOBODY = 65534
USER_ATTACKS = [attack for attack in ATTACKS if "user" in attack.flags]
#: Runs programs in a Python without streamrl's other dependencies.
SCRIPT = """
import asyncio, json, sys, types
for name in ("streamrl", "streamrl.rewards"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.path[0] + "/" + name.replace(".", "/")]
from streamrl.user_code.sandbox.program import CallTest, ProgramLimits, SandboxProgram, StdinTest
from streamrl.user_code.sandbox.sandbox import Sandbox

async def main(limits, programs):
    sandbox = await Sandbox.start(ProgramLimits(**limits), jails=2)
    async def run(calls, source, test):
        test = (CallTest if calls else StdinTest)(**test)
        outcome = await sandbox.run(SandboxProgram("python", source, [test]))
        return outcome.outcome.value, outcome.detail
    outcomes = await asyncio.gather(*(run(*program) for program in programs))
    await sandbox.close()
    print(json.dumps([sandbox._jail_spec.isolation.name, *outcomes]))

asyncio.run(main(*json.load(sys.stdin)))
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Copy the sandbox's files to a world-readable folder."""
    target = Path(tempfile.mkdtemp())
    package = Path(streamrl.__file__).parent
    shutil.copytree(package / "user_code", target / "streamrl" / "user_code")
    shutil.copy(package / "errors.py", target / "streamrl")
    module_spec = find_spec("pyseccomp")
    assert module_spec is not None
    assert module_spec.origin is not None
    shutil.copy(module_spec.origin, target)
    bubblewrap = shutil.which("bwrap") or f"{sys.prefix}/bubblewrap/bwrap"
    shutil.copy(bubblewrap, target / "bwrap")
    (target / "main.py").write_text(SCRIPT)
    target.chmod(0o755)
    yield target
    shutil.rmtree(target)


def is_world_executable(python: str) -> bool:
    """Return True if every user may run this interpreter."""
    return all(folder.stat().st_mode & 1 for folder in Path(python).resolve().parents)


PYTHON = find_python() if is_world_executable(find_python()) else "/usr/bin/python3"
#: Commands that switch to another user, by the isolation mode available to that user.
COMMANDS_BY_MODE: dict[str, list[str]] = {"user namespace": []}
if os.geteuid() == 0:
    switch_user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    COMMANDS_BY_MODE = {
        "user namespace": ["setpriv", *switch_user],
        "user namespace of a user of its own": ["setpriv", "--bounding-set=-sys_admin"],
    }


@pytest.mark.parametrize(
    "isolation",
    [
        pytest.param(mode, marks=[pytest.mark.slow] * (i > 0))
        for i, mode in enumerate(COMMANDS_BY_MODE)
    ],
)
def test_attacks_are_contained_for_an_ordinary_user(folder: Path, isolation: str):
    facts = {"canary": str(folder / "main.py"), "port": "9", "pid": str(os.getpid())}
    programs = []
    for attack in USER_ATTACKS:
        program = attack.make_program(facts)
        programs.append(["calls" in attack.flags, program.source, asdict(program.tests[0])])
    process = subprocess.run(
        [*COMMANDS_BY_MODE[isolation], PYTHON, str(folder / "main.py")],
        input=json.dumps([asdict(LIMITS), programs]),
        env={"PATH": f"{folder}:{os.environ['PATH']}"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    used_mode, *outcomes = json.loads(process.stdout)
    assert used_mode == isolation
    assert len(outcomes) == len(USER_ATTACKS) == 31
    assert [
        (attack.name, outcome)
        for attack, outcome in zip(USER_ATTACKS, outcomes, strict=True)
        if outcome[0] not in {verdict.value for verdict in attack.outcomes}
    ] == []
