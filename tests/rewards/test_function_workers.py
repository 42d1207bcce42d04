"""Reward functions in worker processes: hangs, crashes and memory limits."""

import asyncio
import itertools
import textwrap

import pytest

from streamrl.errors import (
    RewardCrashError,
    RewardError,
    RewardMemoryError,
    RewardRaisedError,
    RewardTimeoutError,
)
from streamrl.rewards.interface.config import RewardConfig
from tests.rewards.judged import prompt, score_texts


@pytest.fixture
def running(start_rewards, tmp_path):
    """Start rewards of a file."""
    numbers = itertools.count()

    async def start(source, name="f", **options):
        path = tmp_path / f"reward{next(numbers)}.py"
        path.write_text(textwrap.dedent(source))
        config = RewardConfig("function", name, options={"path": str(path), **options})
        return await start_rewards(config, timeout_s=3.0)

    return start


async def test_a_sync_function_runs_in_the_main_thread_and_may_use_signals(running):
    rewards = await running("""
        import signal
        def f(prompt, completion):
            signal.signal(signal.SIGALRM, lambda *_: None)
            return float(completion)
    """)
    assert (await score_texts(rewards, prompt(), ["5", "6"]))["reward/f"].tolist() == [5.0, 6.0]


async def test_a_hanging_call_times_out_alone_and_is_counted(running):
    rewards = await running(
        """
        def f(prompt, completion):
            while completion == "hang": pass
            return 1.0
    """,
        attempts=1,
        replicas=1,
    )
    hung = asyncio.create_task(score_texts(rewards, prompt(), ["hang"]))
    await asyncio.sleep(0.01)
    assert (await score_texts(rewards, prompt(), ["x"]))["scores"].tolist() == [1.0]
    assert not hung.done()
    with pytest.raises(RewardTimeoutError, match="reward f, uid 0:4:0: no result in 3 s") as caught:
        await hung
    assert caught.value.cause == "reward_timeout"
    assert rewards.drain_counts()["scorer/killed/timeout"] == 1


@pytest.mark.parametrize(
    ("statement", "error", "words"),
    [
        ("os._exit(3)", RewardCrashError, "worker process exited with code 3"),
        (
            "hoard.append(bytearray(300 << 20)); time.sleep(60)",
            RewardMemoryError,
            r"used \d{3} MiB, the limit is 256",
        ),
        ("raise ValueError('no judge')", RewardRaisedError, r"reward\d.py:5: ValueError: no judge"),
    ],
)
async def test_crashes_and_exceptions_are_retried_then_named_by_cause(
    running, tmp_path, statement, error, words
):
    source = f"""
        import os, time
        hoard = []
        def f(prompt, completion):
            open({str(tmp_path / "tries")!r}, "a").write("x"); {statement}
    """
    rewards = await running(source, attempts=2, memory_gib=0.25, timeout_s=20.0)
    with pytest.raises(error, match=f"reward f, uid 0:4:0: .*{words}"):
        await score_texts(rewards, prompt(), ["5"])
    assert (tmp_path / "tries").read_text() == "xx"


@pytest.mark.parametrize("define", ["def", "async def"])
async def test_a_service_of_a_function_that_does_not_answer_is_waited_for_without_an_attempt(
    running, tmp_path, monkeypatch, define
):
    monkeypatch.setattr("streamrl.user_code.service_gate.FIRST_PAUSE_S", 0.01)
    path = tmp_path / "tries"
    source = f"""
        import os, urllib.request
        {define} f(prompt, completion):
            open({str(path)!r}, "a").write("x")
            if os.path.getsize({str(path)!r}) < 4:
                urllib.request.urlopen("http://127.0.0.1:9")
            return 1.0
    """
    rewards = await running(source, attempts=1)
    assert (await score_texts(rewards, prompt(), ["5"]))["scores"].tolist() == [1.0]
    assert path.read_text() == "xxxx"


async def test_an_invalid_result_is_not_retried(running, tmp_path):
    rewards = await running(f"""
        def f(prompt, completion):
            open({str(tmp_path / "tries")!r}, "a").write("x")
    """)
    with pytest.raises(RewardError, match=r"uid 0:4:0: f in .* returned None for completion 0"):
        await score_texts(rewards, prompt(), ["5"])
    assert (tmp_path / "tries").read_text() == "x"


async def test_async_calls_of_several_groups_share_a_worker_and_each_has_its_own_deadline(running):
    rewards = await running(
        """
        import asyncio
        met = asyncio.Barrier(3)
        async def f(prompt, completion):
            await (met.wait() if completion == "meet" else asyncio.sleep(600))
            return 1.0
    """,
        attempts=1,
        replicas=1,
    )
    late = asyncio.create_task(score_texts(rewards, prompt(), ["late"]))
    groups = [score_texts(rewards, prompt(), ["meet"]) for _ in range(3)]
    for columns in await asyncio.gather(*groups):
        assert columns["scores"].tolist() == [1.0]
    with pytest.raises(RewardTimeoutError):
        await late
