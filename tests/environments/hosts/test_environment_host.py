"""Sessions of a host, in this process: steps, tool calls, deadlines, exceptions of user code."""

import asyncio
import random
import threading

import pytest

from streamrl.environments.interface import (
    CallOutcome,
    ResetResult,
    ToolCall,
)
from tests.environments.hosts.user_files import (
    ASYNC_CALCULATOR,
    ASYNC_GUESS,
    CALCULATOR,
    GUESS,
)


def make_turns(body, *, before="", is_async=False):
    step = "async def step" if is_async else "def step"
    return (
        "import asyncio, threading, time\nfrom streamrl.environments import Turn\n"
        f"class Mine:\n    {before or 'pass'}\n    {step}(self, reply):\n        {body}\n"
    )


def make_tools(body, *, is_async=False, parameters="n: int"):
    define = "async def" if is_async else "def"
    return (
        "import asyncio, threading, time\nSTARTED = []\nclass Mine:\n"
        f'    {define} work(self, {parameters}):\n        """Work."""\n        {body}\n'
    )


def call(n=0, name="work", **arguments):
    return ToolCall(name, arguments or {"n": n})


@pytest.mark.parametrize("source", [GUESS, ASYNC_GUESS])
async def test_replies_are_answered_until_one_ends_the_episode(open_session, source):
    session, number = open_session(source), random.Random(7).randrange(64)
    reset = (await session.reset(7)).result
    assert reset == ResetResult([{"role": "user", "content": "0-63"}])
    low, high, right = [(await session.step(str(number + i))).result for i in (-1, 1, 0)]
    assert [step.messages[0]["content"] for step in (low, high)] == [">", "<"]
    assert right.done and right.reward == 1.0 and not right.messages
    assert (await session.score(rewards=[0.0, 0.25, 1.0])).result == 1.25


async def test_equal_states_have_equal_numbers_and_the_end_has_none(open_session):
    keys = "keys = iter(['\\ud800', 7, '\\ud800', b'?'])"
    keys += "\n    def state_key(self): return next(self.keys)"
    session = open_session(make_turns("return Turn('x', done=reply.text == 'end')", before=keys))
    states = [(await session.reset()).result.state]
    states += [(await session.step(text)).result.state for text in ("go", "go", "end")]
    assert states[0] == states[2] != states[1] and states[3] == 0 and all(states[:3])
    assert (await session.step("go")).error.endswith("returned b'?', not a text or an int")


@pytest.mark.parametrize("source", [CALCULATOR, ASYNC_CALCULATOR])
async def test_a_tool_is_called_and_the_answer_scored(open_session, source):
    session = open_session(source)
    (tool,) = (await session.reset()).result.tools
    assert tool["function"]["name"] == "multiply"
    result = (await session.step("", call(name="multiply", a=17, b=23))).result
    (message,) = result.messages
    call_id = {"tool_call_id": "call00000", "name": "multiply"}
    assert message == {"role": "tool", **call_id, "content": "391"}
    assert result.outcomes == [CallOutcome.OK] and not result.done
    assert (await session.step("391")).result.done
    answer = {"role": "assistant", "content": "391"}
    assert (await session.score(message, answer)).result == 1.0
    assert (await session.score(answer, {"role": "assistant", "content": "390"})).result == 0.0


OPTIONS = """
from streamrl.environments import Turn
class Mine:
    def __init__(self, method, words):
        self.words = words
    def step(self, reply):
        self.words.append(reply.text)
        return Turn(" ".join(self.words))
"""


async def test_each_object_has_options_of_its_own(open_session):
    for word in ("b", "c"):
        session = open_session(OPTIONS, options={"method": 1, "words": ["a"]})
        await session.reset()
        (message,) = (await session.step(word)).result.messages
        assert message["content"] == f"a {word}"


async def test_arguments_of_a_tool_may_have_any_name(open_session):
    names = ("name", "method", "function", "args", "kwargs")
    parameters = ", ".join(f"{name}: int" for name in names)
    session = open_session(make_tools("return name", parameters=parameters))
    await session.reset()
    result = (await session.step("", ToolCall("work", dict.fromkeys(names, 3)))).result
    assert result.outcomes == [CallOutcome.OK] and result.messages[0]["content"] == "3"


async def test_failed_calls_are_answered_by_text(open_session):
    body = "if n: time.sleep(n)\n        raise ValueError('no such\\nrow')"
    source = make_tools(body, parameters="n: float")
    session = open_session(source, turn_timeout_s=1.0)
    await session.reset()
    malformed = ToolCall("work", outcome=CallOutcome.MALFORMED, error="not JSON at character 3")
    response = await session.step("", call(0), malformed, call(1.0))
    texts = [message["content"] for message in response.result.messages]
    assert "ValueError: no such row" in texts[0] and "Traceback" not in texts[0]
    assert texts[1:] == ["not JSON at character 3", "work timed out after 0.5 s"]
    outcomes = [CallOutcome.TOOL_ERROR, CallOutcome.MALFORMED, CallOutcome.TIMED_OUT]
    assert response.result.outcomes == outcomes
    assert response.num_hanging == 1
    await session.wait_until_none_hangs()


async def test_a_tool_that_returns_no_json_fails_the_episode(open_session):
    session = open_session(make_tools("return {1, 2}"))
    await session.reset()
    response = await session.step("", call(0))
    assert (
        "Mine.work in" in response.error and "returned {1, 2}, not text or JSON" in response.error
    )


async def test_calls_beyond_the_deadline_of_the_turn_time_out_without_failing_the_episode(
    open_session,
):
    source = make_tools("await asyncio.sleep(n)\n        return n", is_async=True)
    session = open_session(source, turn_timeout_s=0.5)
    await session.reset()
    response = await session.step("", call(0), call(30), call(30), call(0))
    assert [message["content"] for message in response.result.messages] == [
        "0",
        *["work timed out after 0.25 s"] * 3,
    ]
    assert response.num_hanging == 0, "async methods are cancelled"


async def test_an_episode_ends_after_malformed_replies_in_a_row(open_session):
    session = open_session(make_tools("return n"))
    await session.reset()
    unknown = ToolCall("play", outcome=CallOutcome.UNKNOWN_TOOL, error="there is no tool play")
    for calls in ([unknown], [unknown, call(1)], [unknown], [unknown]):
        assert not (await session.step("", *calls)).result.done
    result = (await session.step("", unknown, unknown)).result
    assert result.done and result.outcomes == [CallOutcome.UNKNOWN_TOOL] * 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 'x'", "Mine.step in {path} returned 'x', not a Turn"),
        ("return Turn([{'role': 'user'}])", "not a text or a list of chat messages"),
        ("return Turn([{'role': 'user', 'content': [{1}]}])", "not plain JSON data (Object of"),
        ("return Turn('x' * (17 << 20))", "an observation of 17.0 MiB; the limit is 16 MiB"),
        ("return Turn('', reward=float('nan'))", "returned nan, not a finite number"),
        ("raise SystemExit(3)", "Mine.step at {path}:6: SystemExit: 3"),
        ("raise TimeoutError('server')", "Mine.step at {path}:6: TimeoutError: server"),
        ("raise asyncio.CancelledError", "Mine.step at {path}:6: CancelledError"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_exceptions_and_wrong_results_name_the_method(open_session, body, words, is_async):
    session = open_session(make_turns(body, is_async=is_async))
    await session.reset()
    response = await session.step()
    expected = words.format(path=session.host._class.description.file)
    assert expected in response.error and not response.is_timeout
    assert len(response.error) < 1000 and "\n" not in response.error


async def test_a_float_of_numpy_and_messages_pass_as_plain_data(open_session):
    body = "return Turn(({'role': 'user', 'content': _Text('hi')},), reward=np.float32(0.5))"
    source = "import numpy as np\nclass _Text(str): pass\n" + make_turns(body)
    session = open_session(source)
    await session.reset()
    result = (await session.step()).result
    (message,) = result.messages
    assert message == {"role": "user", "content": "hi"} and type(message["content"]) is str
    assert type(result.reward) is float and result.reward == 0.5


@pytest.mark.parametrize("method", ["step", "close"])
async def test_a_hanging_method_counts_until_it_returns(open_session, monkeypatch, method):
    monkeypatch.setattr("streamrl.environments.hosts.environment_host.CLOSE_TIMEOUT_S", 0.2)
    bodies = {"step": "return Turn('')", "close": "pass", method: "self.EVENT.wait(60)"}
    before = f"EVENT = threading.Event()\n    def close(self): {bodies['close']}"
    session = open_session(make_turns(bodies["step"], before=before), turn_timeout_s=0.5)
    await session.reset()
    response = await (session.step() if method == "step" else session.close())
    assert "no result in" in response.error
    assert response.is_timeout and response.num_hanging == 1
    session.host._class.class_object.EVENT.set()
    await session.wait_until_none_hangs()


async def test_an_async_method_is_cancelled_at_its_deadline(open_session, monkeypatch):
    monkeypatch.setattr("streamrl.environments.hosts.environment_host.CANCEL_TIMEOUT_S", 0.1)
    stubborn = (
        "try: await asyncio.sleep(60)\n        finally:\n"
        "            if reply.text: await asyncio.sleep(60)"
    )
    session = open_session(make_turns(stubborn, is_async=True), turn_timeout_s=0.1)
    await session.reset()
    response = await session.step()
    assert response.is_timeout and response.num_hanging == 0
    response = await session.step("cleans up for a minute")
    assert response.is_timeout and response.num_hanging == 1


THREAD_BOUND = """
import asyncio, decimal, sqlite3, threading
LOCAL = threading.local()
class ThreadBound:
    def __init__(self):
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("create table numbers (n integer)")
    def reset(self, row, seed):
        self.connection.execute("insert into numbers values (?)", [seed])
        self.loop = asyncio.new_event_loop()
        LOCAL.number = seed
        decimal.getcontext().prec = seed
    def query(self) -> str:
        \"""Query.\"""
        (number,) = self.connection.execute("select n from numbers").fetchone()
        later = self.loop.run_until_complete(asyncio.sleep(0.001, LOCAL.number))
        return f"{number} {later} {decimal.getcontext().prec}"
    def hold(self, seconds: float) -> str:
        \"""Hold.\"""
        HOLDING.wait(seconds)
        return "held"
    def score(self, episode):
        return self.connection.execute("select n from numbers").fetchone()[0]
    def close(self):
        self.loop.close()
        self.connection.close()
HOLDING = threading.Event()
"""


async def test_an_episode_keeps_its_thread_from_constructor_to_close_side_by_side(open_session):
    def count_threads():
        return sum(thread.name.startswith("ThreadBound") for thread in threading.enumerate())

    sessions = {seed: open_session(THREAD_BOUND) for seed in range(2, 18)}
    await asyncio.gather(*(session.reset(seed) for seed, session in sessions.items()))
    for _ in range(4):
        responses = await asyncio.gather(
            *(session.step("", ToolCall("query")) for session in sessions.values())
        )
        answers = [response.result.messages[0]["content"] for response in responses]
        assert answers == [f"{seed} {seed} {seed}" for seed in sessions]
    scores = await asyncio.gather(*(session.score() for session in sessions.values()))
    assert [response.result for response in scores] == list(sessions)
    assert count_threads() == len(sessions)
    closed = await asyncio.gather(*(session.close() for session in sessions.values()))
    assert not any(response.error for response in closed)
    async with asyncio.timeout(30):
        while count_threads():
            await asyncio.sleep(0.001)


async def test_the_policy_never_reads_what_a_call_raises_because_the_thread_hangs(open_session):
    session = open_session(THREAD_BOUND, turn_timeout_s=0.2)
    await session.reset(5)
    response = await session.step("", ToolCall("hold", {"seconds": 60.0}))
    assert response.result.messages[0]["content"] == "hold timed out after 0.1 s"
    response = await session.step("", ToolCall("query"))
    assert "ProgrammingError" in response.error and "still runs in its thread" in response.error
    session.host._class.methods["hold"].function.__globals__["HOLDING"].set()
    await session.wait_until_none_hangs()
    answer = (await session.step("", ToolCall("query"))).result.messages[0]["content"]
    assert answer == "5 5 5", "the thread serves the episode again"
    await session.close()


async def test_closing_gives_up_a_running_step(open_session):
    source = make_turns(
        "await asyncio.sleep(600)",
        before="CLOSED = []\n    def close(self): self.CLOSED.append(self)",
        is_async=True,
    )
    session = open_session(source)
    await session.reset()
    stepping = asyncio.create_task(session.step())
    await asyncio.sleep(0.01)
    assert not (await session.close()).error
    assert stepping.cancelled()
    assert len(session.host._class.class_object.CLOSED) == 1


@pytest.mark.parametrize("make", [make_turns, make_tools])
async def test_an_environment_and_its_tools_may_report_an_outage(open_session, make):
    body = "from streamrl.errors import ServiceOutageError as Out; raise Out('http://x: no answer')"
    session = open_session(make(body))
    await session.reset()
    response = await session.step("a", *([call()] if make is make_tools else []))
    assert response.is_outage and "http://x: no answer" in response.error
