"""Findings on environments that raise, hang, repeat nothing, share state or reward nonsense."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.check_environment import (
    EnvironmentProbe,
    EpisodeRecord,
    TextEnd,
    find_first_difference,
    judge_scores,
    make_random_policy,
    parse_turn,
)
from streamrl.environments.interface import (
    CallOutcome,
    EnvironmentStep,
    Message,
    Reply,
    ResetResult,
)
from streamrl.environments.tool_calls.tool_schema import make_tool_schema
from streamrl.messages import FinishReason, Prompt
from tests.descendants import descendants
from tests.environments.hosts.user_files import LEANING, SHARED_STATE
from tests.environments.tool_calls.test_tool_schema import Library

PROMPTS = [
    Prompt(uid, np.zeros(1, np.int32), messages=[{"role": "user", "content": ""}])
    for uid in ("0:0:0", "0:1:0")
]
SOUND = """
import random
from streamrl.environments import Turn

class Sound:
    def reset(self, row, seed):
        self.number = random.Random(seed).randrange(1000)
        return f"Say {self.number}."

    def step(self, reply):
        return Turn("No.", reward=float(reply.text == str(self.number)), done="No." in reply.text)

    def oracle(self, row, messages):
        return str(self.number) if len(messages) < 3 else "No."
"""
BAD = """
import itertools
from streamrl.environments import Turn

COUNTER = itertools.count()

class Bad:
    def reset(self, row):
        return f"Episode {next(COUNTER)}."

    def step(self, reply):
        if len(reply.text) > 0:
            raise ValueError(f"cannot parse {reply.text[:1]!r}")
        return Turn(reward=1.0, done=True)
"""
ENDLESS = """
import time
from streamrl.environments import Turn

class Endless:
    def reset(self, row):
        return "Go on."

    def step(self, reply):
        time.sleep(0.1)
        return Turn("Go on.", reward=1.0)
"""
HANGING = '''
import time

class Hanging:
    def search(self, text: str) -> str:
        """Search."""
        time.sleep(600)
'''


async def probe(tmp_path, source, **settings):
    """Return the findings by subject as (status, text)."""
    path = tmp_path / "mine.py"
    path.write_text(source)
    before = descendants()
    probe = EnvironmentProbe(EnvironmentConfig(str(path), **settings), PROMPTS, open_episodes=8)
    found = {f.subject: (f.status, f.text) async for f in probe.run()}
    assert not descendants() - before
    return found


async def test_a_sound_environment_and_the_first_example_of_the_docs_pass_every_check(tmp_path):
    page = Path("docs/environments.md").read_text()
    (source,) = re.findall(r"```python\n(# guess.py.*?)```", page, re.DOTALL)
    assert {status for status, _ in (await probe(tmp_path, source)).values()} == {"ok"}
    found = await probe(tmp_path, SOUND)
    assert {status for status, _ in found.values()} == {"ok"}
    subjects = ["class", "silent", "random", "oracle", "same seed", "together"]
    assert [*found] == subjects
    assert "scores 0 to 0" in found["random"][1] and "scores 1 to 1" in found["oracle"][1]


@pytest.mark.parametrize(
    ("body", "problem"),
    [("raise ValueError('no')", "ValueError: no"), ("time.sleep(600)", "no result in 0.2 s")],
)
async def test_a_close_that_fails_or_hangs_is_a_finding(
    tmp_path, monkeypatch, body: str, problem: str
):
    monkeypatch.setattr("streamrl.environments.hosts.host_pool.CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("streamrl.environments.hosts.host_pool.REACTION_TIMEOUT_S", 0.3)
    # A process whose close hangs is replaced, which takes a second.
    monkeypatch.setattr("streamrl.environments.episodes.check_environment.NUM_TOGETHER", 1)
    found = await probe(tmp_path, f"import time\n{SOUND}\n    def close(self):\n        {body}\n")
    status, text = found["silent"]
    assert status == "fail"
    assert "2 of 2 episodes failed" in text and problem in text


@pytest.mark.parametrize("answer", SHARED_STATE)
async def test_state_that_episodes_share_is_found_side_by_side(tmp_path, answer):
    source = LEANING.replace("FOLDER", str(tmp_path)).replace("ANSWER", answer)
    found = await probe(tmp_path, source, max_turns=2)
    assert found["same seed"][0] == "ok", "alone nothing is wrong"
    status, text = found["together"]
    assert status == "fail" and "episodes side by side are not as alone" in text
    assert "environment.isolate" in text


async def test_failures_name_turn_and_line_and_a_group_whose_episodes_differ(tmp_path):
    found = await probe(tmp_path, BAD, max_turns=2)
    status, text = found["random"]
    assert status == "fail"
    assert "after 0 turns: Bad.step at" in text and "ValueError: cannot parse" in text
    assert found["silent"][0] == "ok"
    status, text = found["same seed"]
    assert status == "fail"
    assert "first observation: [{'content': 'Episode 0.'" in text
    assert found["score"][1].startswith("gives 1 to nonsense: the silent policy")
    assert "together" not in found, "two alone differ"


async def test_calls_that_time_out_are_named_and_not_taken_for_shared_state(tmp_path):
    found = await probe(tmp_path, HANGING, turn_timeout_s=0.2, max_turns=3)
    status, text = found["random"]
    assert status == "warn" and re.search(
        r"calls past half of .* time out; .*: search \(\d+\)$", text
    )
    status, text = found["together"]
    assert status == "fail" and re.search(r"calls hang in it; calls past .*: search \(\d+\)$", text)
    assert "os.environ" not in text


async def test_an_episode_past_its_deadline_counts_in_no_finding(tmp_path):
    found = await probe(tmp_path, ENDLESS, episode_timeout_s=0.3)
    assert "ends: timeout" in found["silent"][1]
    assert "score" not in found
    assert found["repeat"] == ("warn", "not compared: no episode came to its end")


def make_record(policy="silent", *, score=0.0, rewards=(0.0,)):
    end = TextEnd(FinishReason.STOP, rewards, score)
    record = EpisodeRecord(PROMPTS[0], policy, 0, end=end)
    for reward in rewards:
        step = EnvironmentStep([{"role": "user", "content": "y"}], reward)
        record.see_turn(Reply("x"), step)
    record.events.append(("score", score))
    return record


def test_the_first_difference_of_two_episodes_has_its_turn():
    first = make_record(rewards=(0.0, 0.5))
    assert find_first_difference(first, make_record(rewards=(0.0, 0.5))) == ""
    other = make_record(rewards=(0.0, 0.25))
    assert find_first_difference(first, other) == "turn 2: reward: 0.5, then 0.25"
    assert find_first_difference(first, make_record()) == "turn 2: reply: ('x', []), then 0.0"
    scored = make_record(rewards=(0.0, 0.5), score=1.0)
    assert find_first_difference(first, scored) == "score: 0.0, then 1.0"
    named = [make_record(), make_record()]
    for state, record in enumerate(named, start=1):
        record.see_start(record.prompt, ResetResult(state=state))
    assert find_first_difference(*named) == "first state: 1, then 2"


@pytest.mark.parametrize(
    ("scores", "warnings"),
    [
        ({"silent": 0.0, "random": 0.9}, []),
        ({"silent": 1.0, "random": 0.0}, ["gives 1 to nonsense: the silent"]),
        ({"random": 5.0, "oracle": 5.0}, ["gives 5 to nonsense: the random", "the oracle's mean"]),
        ({"oracle": 0.0}, ["the oracle's mean is 0"]),
        # A maze that a random walk solves once in four.
        ({"random": (0.0, 0.0, 1.0, 0.0), "oracle": 1.0}, []),
        ({"random": (0.5, 1.0), "oracle": (1.0, 0.5)}, ["the oracle's mean is 0.75, no more"]),
    ],
)
def test_means_of_policies_without_sense_are_compared_with_a_solved_episode(scores, warnings):
    records = [
        make_record(policy, score=score)
        for policy, given in scores.items()
        for score in (given if isinstance(given, tuple) else [given])
    ]
    found = list(judge_scores(records))
    assert len(found) == len(warnings)
    for finding, text in zip(found, warnings, strict=True):
        assert finding.status == "warn" and finding.text.startswith(text)


TOOL = make_tool_schema(Library().search)


@given(st.integers(0, 2**32), st.integers(0, 9), st.sampled_from([[], [TOOL]]))
def test_a_random_turn_depends_on_seed_and_turn_and_its_calls_match_the_schema(
    seed, num_messages, tools
):
    policy = make_random_policy(seed)
    messages: list[Message] = [{} for _ in range(num_messages)]

    async def write_turn():
        return await policy(messages, tools)

    turn = asyncio.run(write_turn())
    assert repr(turn) == repr(asyncio.run(write_turn()))
    if not isinstance(turn, str):
        (call,) = parse_turn(turn, tools).calls
        assert call.outcome is CallOutcome.OK
