"""Worker pools with failing calls, in real processes."""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from streamrl.errors import ConfigError
from streamrl.user_code.pool import pool as pool_module
from streamrl.user_code.pool.pool import (
    PoolSettings,
    WorkerCrashError,
    WorkerMemoryError,
    WorkerPool,
    WorkerTimeoutError,
)
from streamrl.user_code.pool.process import WorkerProcess, unpickle_response
from streamrl.user_code.pool.worker import pack_message
from tests.descendants import descendants

TARGET = "tests.user_code.pool.handlers:serve"
ASYNC_TARGET = "tests.user_code.pool.handlers:serve_async"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    monkeypatch.setattr(pool_module, "MONITOR_INTERVAL_S", 0.1)


@pytest.fixture
async def pool():
    """Create pools; close them at the end and check that no process is left."""
    before, pools = descendants(), []

    def make(at_load="", *, target=TARGET, timeout_s=30.0, memory_bytes=16 << 30, concurrency=1):
        settings = PoolSettings(2, concurrency, timeout_s=timeout_s, memory_bytes=memory_bytes)
        pools.append(WorkerPool("troubled", target, at_load, settings))
        return pools[-1]

    yield make
    for worker_pool in pools:
        await worker_pool.close()
    assert not descendants() - before


async def wait_until_exited(pids, *, within_s=15.0):
    deadline = time.monotonic() + within_s
    while remaining := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"still running: {remaining}"
        await asyncio.sleep(0.02)


async def test_workers_hash_text_alike(pool):
    hashes = set()
    for workers in (pool(), pool()):
        await workers.start()
        hashes.add(await workers.call(("hash_text", "word")))
    assert len(hashes) == 1


async def test_a_timeout_kills_the_child_processes_of_the_worker(pool, tmp_path):
    workers = pool(timeout_s=4.0)
    await workers.start()
    pid_file = tmp_path / "pids"
    with pytest.raises(WorkerTimeoutError, match="no result in 4 s"):
        await workers.call(("breed", str(pid_file)))
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert len(pids) == 50
    await wait_until_exited(pids)
    assert await workers.call(("square", 4)) == 16


async def test_workers_die_when_the_host_process_is_killed(tmp_path):
    pid_file = tmp_path / "pids"
    code = (
        "import asyncio\n"
        "from streamrl.user_code.pool.pool import WorkerPool, PoolSettings\n"
        "async def main():\n"
        f"    pool = WorkerPool('x', {TARGET!r}, '', PoolSettings(1, 1, 60.0))\n"
        "    await pool.start()\n"
        f"    await pool.call(('breed', {str(pid_file)!r}))\n"
        "asyncio.run(main())\n"
    )
    host = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not pid_file.exists():
        assert host.poll() is None and time.monotonic() < deadline
        await asyncio.sleep(0.02)
    child_pids = [process.pid for process in psutil.Process(host.pid).children(recursive=True)]
    assert set(map(int, pid_file.read_text().split())) < set(child_pids)
    os.kill(host.pid, signal.SIGKILL)
    host.wait()
    await wait_until_exited(child_pids)


async def test_a_worker_that_fails_to_load_raises_at_start_and_in_calls(pool, capfd):
    workers = pool(target="tests.user_code.pool.nowhere:serve")
    with pytest.raises(WorkerCrashError, match="worker process exited with code 1"):
        await workers.start()
    with pytest.raises(WorkerCrashError, match="worker does not start: worker process"):
        await workers.call(("square", 2))
    assert "No module named 'tests.user_code.pool.nowhere'" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"rewards\.path=x\.py: no such file"):
        await pool("refuse").start()


async def test_a_worker_that_hangs_while_loading_times_out(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 0.5)
    with pytest.raises(WorkerCrashError, match=r"worker was not ready in 0\.5 s"):
        await pool("hang").start()


async def test_cancelling_a_caller_keeps_the_worker_alive(pool):
    workers = pool()
    await workers.start()
    pid = await workers.call(("pid", None))
    cancelled = asyncio.create_task(workers.call(("work", 1)))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    async with asyncio.timeout(15):
        # Another worker answers until this one has finished the cancelled call.
        while await workers.call(("pid", None)) != pid:
            await asyncio.sleep(0.01)
    assert not workers.kill_counts


@pytest.mark.parametrize(
    ("operation", "data", "words"),
    [
        ("garble", b"\0" * 8 + b"x" * 99, ""),
        ("garble", b"\xff" * 99, "the limit is"),
        ("garble", b"\0" * 7 + b"\x05hello" * 9, ""),
        ("sly", None, "is not an allowed class"),
    ],
)
async def test_an_unreadable_response_is_a_crash_at_once(pool, operation, data, words):
    workers = pool()
    await workers.start()
    async with asyncio.timeout(25):
        with pytest.raises(WorkerCrashError, match=f"worker response cannot be read: .*{words}"):
            await workers.call((operation, data))
        assert await workers.call(("square", 3)) == 9
    assert workers.kill_counts == {"crash": 1}


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
async def test_a_worker_does_not_outlive_its_reaper(pool, monkeypatch, number):
    monkeypatch.setattr("streamrl.user_code.pool.process.EXIT_TIMEOUT_S", 0.5)
    workers = pool(timeout_s=3.0)
    await workers.start()
    pid = await workers.call(("pid", None))
    with pytest.raises((WorkerCrashError, WorkerTimeoutError)):
        await workers.call(("orphan", number))
    assert await workers.call(("square", 3)) == 9
    await wait_until_exited([pid])


async def test_only_the_faulty_call_of_a_shared_worker_fails(pool):
    workers = pool(target=ASYNC_TARGET, concurrency=16)
    await workers.start()
    calls = [workers.call(("square", number)) for number in range(24)]
    *results, failure = await asyncio.gather(
        *calls, workers.call(("crash", None)), return_exceptions=True
    )
    assert results == [number * number for number in range(24)]
    assert isinstance(failure, WorkerCrashError) and "exited with code 7" in str(failure)
    assert set(workers.kill_counts) == {"crash"}
    assert len(workers.processes) <= 2, "spare workers are retired"
    # Again on an exclusive worker: no other worker exits.
    with pytest.raises(WorkerCrashError):
        await asyncio.gather(
            workers.call(("crash", None), exclusive=True), workers.call(("square", 3))
        )
    assert await workers.call(("square", 4)) == 16
    assert len(workers.processes) <= 2


async def test_a_fork_of_a_worker_sends_no_response(pool):
    workers = pool()
    await workers.start()
    assert [await workers.call(("fork", None)) for _ in range(2)] == ["itself"] * 2


async def test_cancelling_a_start_leaves_no_process(pool):
    before = descendants()
    for delay_s in (0.0, 0.001, 0.003, 0.01, 0.05):
        starting = asyncio.create_task(WorkerProcess.start(TARGET, "", 30.0))
        await asyncio.sleep(delay_s)
        for _ in range(3):  # later ones meet the cleanup
            starting.cancel()
            await asyncio.sleep(0)
        (outcome,) = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(outcome, WorkerProcess):  # on a busy machine it was ready before
            await outcome.kill()
        assert not descendants() - before


@pytest.mark.parametrize("at_load", ["", "refuse"])
def test_a_worker_whose_pool_closes_while_it_loads_exits_without_a_traceback(at_load):
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(pack_message(at_load))
    code = (
        "import socket; from streamrl.user_code.pool.worker import run_worker;"
        f" run_worker(socket.socket(fileno={theirs.fileno()}), {TARGET!r})"
    )
    command = [sys.executable, "-c", code]
    with theirs:
        ended = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, b"")


async def test_the_monitor_survives_errors(pool, monkeypatch):
    workers = pool(memory_bytes=256 << 20)
    await workers.start()
    measure, faults = workers._process_table.measure_tree_memory, iter([OSError("no such table")])

    def memory_of_tree(pid):
        for fault in faults:
            raise fault
        return measure(pid)

    monkeypatch.setattr(workers._process_table, "measure_tree_memory", memory_of_tree)
    with pytest.raises(WorkerMemoryError):
        await workers.call(("leak", None))


async def test_a_claim_does_not_wait_for_ever_after_failed_starts(pool, monkeypatch):
    """Starts fail in the background while the only worker is busy; later they work again."""
    workers = pool(timeout_s=1.0)
    start = workers._start_process
    await workers.start()

    async def fail():
        raise OSError("no process")

    workers._start_process = fail
    hanging = asyncio.create_task(workers.call(("hang", 0)))
    while workers._num_failed_starts < pool_module.MAX_FAILED_STARTS:
        await asyncio.sleep(0.01)
    later = asyncio.create_task(workers.call(("square", 3)))
    workers._start_process = start
    assert await asyncio.wait_for(later, 20.0) == 9
    with pytest.raises(WorkerTimeoutError):
        await hanging


# Responses of workers, which run untrusted code.


def pickle_of_call(module: str, name: str, *arguments: object) -> bytes:
    """Return a pickle that calls a function when unpickled."""
    pickled_name = b"".join(pickle.dumps(text, protocol=4)[2:-1] for text in (module, name))
    pickled_arguments = pickle.dumps(arguments, protocol=2)[2:-1]
    return (
        b"\x80\x04"
        + pickled_name
        + pickle.STACK_GLOBAL
        + pickled_arguments
        + pickle.REDUCE
        + pickle.STOP
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("streamrl.user_code.sandbox.jail", "subprocess.Popen"),
        ("streamrl.user_code.reward_function", "FileFunction"),
        ("streamrl.user_code.reward_result", "Enum"),
        ("streamrl.user_code.reward_result", "RewardResult.from_correctness"),
        ("streamrl.user_code.reward_result", "math.__loader__.load_module"),
        ("streamrl.user_code.pool.process", "WorkerProcess"),
        ("streamrl.user_code.pool.process", "subprocess.Popen"),
    ],
)
def test_unpickling_a_response_rejects_other_classes_and_functions(
    module: str, name: str, tmp_path
):
    note = tmp_path / "ran"
    with pytest.raises(pickle.UnpicklingError, match=f"{name} is not an allowed class"):
        unpickle_response(pickle_of_call(module, name, ["touch", str(note)]))
    assert not note.exists()
