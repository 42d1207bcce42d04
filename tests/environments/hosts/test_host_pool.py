"""Pool of environment hosts with real processes: crashes, hangs, memory, isolation, capacity."""

import asyncio
import contextlib
import time
from collections import Counter

import numpy as np
import psutil
import pytest
import pytest_asyncio

from streamrl.environments.config import EnvironmentConfig, EnvironmentSpec
from streamrl.environments.hosts import host_pool
from streamrl.environments.hosts.host_pool import EnvironmentHostPool, start_pools
from streamrl.environments.interface import EpisodeSummary, Reply
from streamrl.errors import ConfigError, EpisodeError, EpisodeTimeoutError
from streamrl.messages import Prompt
from streamrl.user_code.pool import pool as pool_module
from tests.descendants import descendants
from tests.environments.hosts.user_files import COMMANDS, GUESS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    monkeypatch.setattr(pool_module, "MONITOR_INTERVAL_S", 0.1)


@contextlib.asynccontextmanager
async def open_pools(folder):
    """Yield a function that starts pools; at the end close them: no process may be left."""
    before, pools = descendants(), []

    async def start(source=COMMANDS, *, name="Commands", **settings):
        path = folder / "mine.py"
        path.write_text(source)
        pools.append(EnvironmentHostPool(EnvironmentConfig(f"{path}:{name}", **settings)))
        await pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        await pool.close()
    assert not descendants() - before


@pytest_asyncio.fixture(loop_scope="module")
async def start_pool(tmp_path):
    async with open_pools(tmp_path) as start:
        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pools(tmp_path_factory):
    """Pools of one process that several tests use: of Commands, and of SyncCommands."""
    async with open_pools(tmp_path_factory.mktemp("shared")) as start:
        sync = await start(name="SyncCommands", processes=1, turn_timeout_s=1.0)
        yield await start(processes=1), sync


def count_claims(pool):
    return sum(process.num_claims for process in pool.processes)


async def use_pool(pool):
    """Yield a shared pool without counts, and wait until it has one host again."""
    pool.kill_counts.clear()
    yield pool
    await wait_until(lambda: len(pool.processes) == 1 and not host_is_hanging(pool))
    assert count_claims(pool) == 0


@pytest_asyncio.fixture(loop_scope="module")
async def pool(shared_pools):
    async for pool in use_pool(shared_pools[0]):
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def sync_pool(shared_pools):
    async for pool in use_pool(shared_pools[1]):
        yield pool


def make_prompt(**commands):
    return Prompt("u", np.zeros(1, np.int32), extra_info=commands, ground_truth="391")


def summarize(finish_reason="stop"):
    return EpisodeSummary((), (), finish_reason)


@contextlib.asynccontextmanager
async def open_session(pool, **commands):
    """Open a session; yield it and the pid of its host."""
    session = pool.open_session(make_prompt(**commands), seed=0)
    try:
        reset = await session.reset()
        yield session, int(reset.messages[0]["content"])
    finally:
        await session.close()


async def step(session, command):
    result = await session.step(Reply(command))
    return result.messages[0]["content"]


async def wait_until(condition, *, within_s=30.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_failure_ends_its_own_episode_or_host_and_names_the_reason(pool):
    async with open_session(pool) as (session, pid):
        # Neither prints nor a fork that returns disturb the protocol.
        for command in ("print", "fork", ""):
            assert await step(session, command) == str(pid)
        assert await session.score(summarize()) == 0.5
        path = pool.description.file
        with pytest.raises(EpisodeError, match=rf"^Commands.step at {path}:\d+: RuntimeError: it"):
            await step(session, "raise")
        with pytest.raises(EpisodeError, match=r"Commands.score at"):
            await session.score(summarize("raise"))
        with pytest.raises(EpisodeError, match=r"Commands.reset at"):
            async with open_session(pool, reset="raise"):
                pass
        async with open_session(pool, close="raise") as (other, other_pid):
            assert other_pid == pid
            children = [int(child) for child in (await step(session, "breed")).split()]
            waiting = asyncio.create_task(step(other, "await 60"))
            with pytest.raises(EpisodeError, match=r"step: .* ended: .* was killed by SIGKILL"):
                await step(session, "kill")
            with pytest.raises(EpisodeError, match=r"was killed by SIGKILL"):
                await waiting
            await wait_until(lambda: not any(map(psutil.pid_exists, children)))
        with pytest.raises(EpisodeError, match=r"score: .* was killed by SIGKILL"):
            await session.score(summarize())
    async with open_session(pool) as (session, new_pid):
        assert new_pid != pid and await step(session, "") == str(new_pid)
    assert pool.kill_counts == Counter(crash=1) and count_claims(pool) == 0


async def test_a_host_above_its_memory_limit_is_killed_as_is_a_fork_bomb(start_pool, tmp_path):
    pool, pids = await start_pool(processes=1, memory_gib=0.3), tmp_path / "pids"
    for command in ("leak", f"fork_bomb {pids}"):
        async with open_session(pool) as (session, _):
            with pytest.raises(EpisodeError, match=r"process used \d+ MiB, the limit is 307"):
                await step(session, command)
    await wait_until(lambda: not any(map(psutil.pid_exists, map(int, pids.read_text().split()))))
    async with open_session(pool) as (session, pid):
        assert await step(session, "") == str(pid)
    assert pool.kill_counts == Counter(memory=2)


async def test_a_hanging_call_times_out_and_its_host_is_replaced(sync_pool):
    async with open_session(sync_pool) as (patient, old_pid):
        async with open_session(sync_pool) as (session, pid):
            assert pid == old_pid
            timeout = r"SyncCommands.step in .*mine.py: no result in 1 s"
            with pytest.raises(EpisodeTimeoutError, match=timeout):
                await step(session, "hang")
        # The next session gets a new host, while the old host goes on with its own.
        async with open_session(sync_pool) as (session, new_pid):
            assert new_pid != old_pid
            assert await step(session, "") == str(new_pid)
        assert await step(patient, "") == str(old_pid)
    await wait_until(lambda: not psutil.pid_exists(old_pid))
    assert sync_pool.kill_counts == Counter(hanging=1)


async def test_a_call_that_returns_late_leaves_its_host_in_use(sync_pool, tmp_path):
    event = tmp_path / "event"
    async with open_session(sync_pool) as (keeper, pid):
        async with open_session(sync_pool) as (session, _):
            with pytest.raises(EpisodeTimeoutError):
                await step(session, f"wait_for {event}")
        event.touch()
        await wait_until(lambda: len(sync_pool.processes) == 2)
        while host_is_hanging(sync_pool):
            assert await step(keeper, "sleep 0.01") == str(pid)
        await wait_until(lambda: len(sync_pool.processes) == 1)
    assert not sync_pool.kill_counts


def host_is_hanging(pool):
    return any(host.num_hanging for host in pool.processes)


async def test_a_host_with_many_hanging_calls_is_killed(sync_pool, monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_HANGING_CALLS", 2)
    async with contextlib.AsyncExitStack() as stack:
        sessions = [(await stack.enter_async_context(open_session(sync_pool)))[0] for _ in range(4)]
        waiting = asyncio.create_task(step(sessions[3], "sleep 60"))
        ends = await asyncio.gather(
            *(step(session, "hang") for session in sessions[:3]), return_exceptions=True
        )
        assert {type(end) for end in ends} <= {EpisodeTimeoutError, EpisodeError}
        with pytest.raises(EpisodeError):
            await waiting
    assert sync_pool.kill_counts == Counter(hanging=1)


async def test_a_blocked_event_loop_is_found(start_pool, monkeypatch):
    monkeypatch.setattr(host_pool, "REACTION_TIMEOUT_S", 0.3)
    pool = await start_pool(processes=1, turn_timeout_s=0.5)
    async with open_session(pool) as (session, _), open_session(pool) as (other, _):
        waiting = asyncio.create_task(step(other, "await 600"))
        with pytest.raises(EpisodeTimeoutError, match=r"async methods must not block the event"):
            await step(session, "block 600")
        with pytest.raises(EpisodeError):
            await waiting
    async with open_session(pool) as (session, pid):
        assert await step(session, "") == str(pid)
    assert pool.kill_counts == Counter(timeout=1)


async def test_an_isolated_session_has_a_process_that_dies_with_it_and_with_the_pool(start_pool):
    pool = await start_pool(processes=1, isolate=True)
    async with open_session(pool) as (first, first_pid), open_session(pool) as (second, pid):
        assert first_pid != pid
        child = int((await step(first, "breed")).split()[0])
        with pytest.raises(EpisodeError, match=r"SIGKILL"):
            await step(second, "kill")
        assert await step(first, "") == str(first_pid)
    await wait_until(lambda: not psutil.pid_exists(first_pid) and not psutil.pid_exists(child))
    await wait_until(lambda: len(pool.processes) == 1)
    assert pool.kill_counts == Counter(crash=1)
    # The pool's end fails an open session, and later ones.
    async with open_session(pool) as (session, _):
        stepping = asyncio.create_task(step(session, "await 600"))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(EpisodeError, match=r"processes of the environment are closed"):
            await stepping
        with pytest.raises(EpisodeError, match=r"processes of the environment are closed"):
            await pool.open_session(make_prompt(), seed=0).reset()


async def test_blocking_calls_of_async_methods_do_not_block_the_host(pool, tmp_path):
    event = tmp_path / "event"
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(open_session(pool)) for _ in range(40)]
        other, _ = opened.pop()
        # More calls of asyncio.to_thread than its executor has threads.
        blocked = [asyncio.create_task(step(session, f"wait_for {event}")) for session, _ in opened]
        await asyncio.sleep(0.2)  # the host has their requests
        assert await other.score(summarize()) == 0.5
        event.touch()
        assert await asyncio.gather(*blocked) == [str(pid) for _, pid in opened]


async def test_hundreds_of_sleeping_sessions_cost_no_thread_and_no_process(pool):
    async with contextlib.AsyncExitStack() as stack:
        opened = await asyncio.gather(
            *(stack.enter_async_context(open_session(pool)) for _ in range(300))
        )
        (pid,) = {pid for _, pid in opened}
        host, this_process = psutil.Process(pid), psutil.Process()
        threads, tasks = host.num_threads(), len(asyncio.all_tasks())
        here = this_process.num_threads()
        sleeping = [asyncio.create_task(step(session, "await 0.5")) for session, _ in opened]
        await asyncio.sleep(0.2)
        assert host.num_threads() <= threads and this_process.num_threads() <= here + 1
        assert await asyncio.gather(*sleeping) == [str(pid)] * 300
        await wait_until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert count_claims(pool) == 300


async def test_sessions_go_to_the_host_with_the_fewest(start_pool):
    pool = await start_pool(processes=2)
    await wait_until(lambda: len(pool.processes) == 2)
    async with contextlib.AsyncExitStack() as stack:
        pids = [(await stack.enter_async_context(open_session(pool)))[1] for _ in range(6)]
    assert sorted(Counter(pids).values()) == [3, 3]


async def test_a_class_that_cannot_be_used_is_named_by_its_setting_and_closes_all_pools(tmp_path):
    before, named = descendants(), {}
    for name, source in (("guess", GUESS), ("broken", "class A: pass")):
        (tmp_path / f"{name}.py").write_text(source)
        named[name] = EnvironmentSpec(path=str(tmp_path / f"{name}.py"))
    with pytest.raises(ConfigError, match=r"^environment.named.broken.path=.*no public method"):
        await start_pools(EnvironmentConfig(named=named, processes=1))
    assert not descendants() - before
