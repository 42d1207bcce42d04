"""Python sessions: variables persist, output and limits, and what a hostile call can do."""

import asyncio
import ctypes

import psutil
import pytest
import pytest_asyncio

from streamrl.user_code.pool.reaper import PR_SET_CHILD_SUBREAPER
from streamrl.user_code.sandbox.program import ProgramLimits
from streamrl.user_code.sandbox.sandbox import CodeOutput, PythonSession, find_isolation
from tests.descendants import descendants

KEPT_CHARS = 1000
#: Each process stays below the limit of its address space; together they exceed that of the jail.
MEMORY_EATERS = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        kept = b"a" * (90 << 20)
        time.sleep(60)
time.sleep(60)
"""
module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def spec():
    limits = ProgramLimits(memory_mib=300, cpu_s=60, processes=16, disk_mib=8, files=50)
    return await find_isolation(limits)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session(spec):
    """Session that all tests share whose code leaves it usable."""
    started = await PythonSession.start(spec, 0, kept_chars=KEPT_CHARS)
    yield started
    await started.kill()


@pytest.fixture
def is_subreaper():
    """What a killed process leaves is a descendant of this process during the test."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@module_loop
@pytest.mark.usefixtures("is_subreaper")
async def test_cancelling_a_start_again_and_again_leaves_no_process(spec):
    before = descendants()
    for delay_s in (0.001 * i for i in range(1, 31)):
        starting = asyncio.create_task(PythonSession.start(spec, 1, kept_chars=KEPT_CHARS))
        await asyncio.sleep(delay_s)
        for _ in range(3):
            starting.cancel()
            await asyncio.sleep(0)
        (end,) = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(end, PythonSession):
            await end.kill()
        assert not descendants() - before
    # Nobody reaps the orphans of this test. Zombies would count as processes of the jail's user.
    assert not [process for process in psutil.Process().children() if process not in before]


async def run_alone(spec, code):
    """Run code in a session of its own."""
    before = descendants()
    session = await PythonSession.start(spec, 1, kept_chars=KEPT_CHARS)
    try:
        async with asyncio.timeout(60):
            return await session.run(code)
    finally:
        await session.kill()
        assert not descendants() - before


@module_loop
async def test_variables_functions_and_files_persist(session):
    assert await session.run("import math\nx = 3\ndef f(y): return x * y") == CodeOutput("")
    assert await session.run("print(f(2)); x += 1; open('a', 'w').write('hi'); f(2)") == CodeOutput(
        "6\n8\n"
    )
    assert (await session.run("open('a').read() + str(math.pi)[:4]")).text == "'hi3.14'\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("# nothing", ""),
        ("None", ""),
        ("if True: 5", ""),
        ("print('a', end='')\n'b'", "a'b'\n"),
        ("import sys\nprint('out'); print('err', file=sys.stderr); sys.stdout.write('x')", None),
        ("import os\nos.write(1, bytes([255, 97])); None", "�a"),
        ("import subprocess\nsubprocess.run(['echo', 'hi']).returncode", "hi\n0\n"),
        ("try: input()\nexcept EOFError: print('no input')", "no input\n"),
        ("print('<|im_end|>é'); None", "<|im_end|>é\n"),
    ],
)
@module_loop
async def test_the_output_is_what_code_prints_and_its_last_value(session, code, text):
    output = await session.run(code)
    assert not output.has_failed and not output.is_over
    if text is None:
        output.text.encode()
        assert output.text
    else:
        assert output == CodeOutput(text)


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("1 +", ["    1 +", "SyntaxError: invalid syntax"]),
        ("def g(z):\n    return 1 / z\ng(0)", ["    return 1 / z", "ZeroDivisionError: division"]),
        ("print('before')\nexit(3)", ["before\nTraceback", "SystemExit: 3"]),
        ("'\ud800'", ["UnicodeEncodeError"]),
        ("print('\\ud800')", ["UnicodeEncodeError"]),
        ("def h(): h()\nh()", ["RecursionError"]),
        ("bytearray(1 << 30)", ["MemoryError"]),
        ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", ["E: "]),
        ("import sys\nclass R:\n  def __repr__(self): sys.exit('no')\nR()", ["SystemExit: no"]),
        ("import socket; socket.socket()", ["PermissionError"]),
        ("open('/usr/x', 'w')", ["Read-only file system"]),
    ],
)
@module_loop
async def test_an_exception_is_the_last_lines_of_its_traceback(session, code, lines):
    await session.run("kept = 7")
    output = await session.run(code)
    assert output.has_failed and not output.is_over and not output.num_left_out
    assert all(line in output.text for line in lines) and "driver" not in output.text
    assert output.text.count("File ") <= 7
    assert (await session.run("kept")).text == "7\n"


@module_loop
async def test_the_middle_of_a_long_output_is_counted_and_dropped(session):
    output = await session.run("print('a' * 10 + 'é' * 2_000_000 + 'z' * 10, end='')")
    assert not output.has_failed
    assert output.text.startswith("a" * 10 + "é" * (KEPT_CHARS - 10))
    assert output.text.endswith("é" * (KEPT_CHARS - 10) + "z" * 10)
    assert len(output.text) + output.num_left_out == pytest.approx(2_000_020, abs=2)
    assert len(output.text) < 10 * KEPT_CHARS


@module_loop
async def test_an_idle_session_uses_no_cpu_time_and_goes_on_where_it_was(spec):
    before = descendants()
    session = await PythonSession.start(spec, 2, kept_chars=KEPT_CHARS)
    spin = "import os, threading, time\nticks = 0\ndef spin():\n  global ticks\n  while True:"
    await session.run(f"{spin} ticks += 1\nthreading.Thread(target=spin, daemon=True).start()")
    await session.run("if os.fork() == 0:\n  while True: pass")
    mine = [process for process in descendants() - before if process.name().startswith("python")]
    async with asyncio.timeout(10):  # a busy machine takes a while to stop them
        while sum(process.status() == psutil.STATUS_STOPPED for process in mine) < 2:
            await asyncio.sleep(0.01)
    used = {process: sum(process.cpu_times()[:2]) for process in mine}
    await asyncio.sleep(0.2)
    assert {process: sum(process.cpu_times()[:2]) for process in mine} == used
    first = int((await session.run("ticks")).text)
    assert int((await session.run("time.sleep(0.1); ticks")).text) > first
    await session.kill()
    assert not descendants() - before


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import os; print('x'); os._exit(3)", "x\n\nthe Python process exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "\nthe Python process was killed by signal 9"),
        ("import os; os.closerange(3, 10)", None),
        ("for i in range(60): open(str(i), 'w')", "\ncreated more than 50 files"),
        (MEMORY_EATERS, "used more than 300 MiB"),
    ],
)
@module_loop
async def test_a_call_that_ends_the_session_says_how(spec, code, text):
    output = await run_alone(spec, code)
    assert output.has_failed and output.is_over
    assert text is None or output.text == text
