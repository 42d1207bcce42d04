"""Findings on environments that raise, repeat nothing, reward nonsense or need much memory."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.environment_probe import (
    EnvironmentProbe,
    EpisodeRecord,
    FindingStatus,
    describe_episodes,
    find_first_difference,
    judge_records,
    judge_scores,
    make_random_policy,
    sample_call,
)
from streamrl.environments.episodes.text_episode import parse_turn
from streamrl.environments.hosts.host_protocol import HostOperation
from streamrl.environments.interface import CallOutcome, EnvironmentStep, Reply
from streamrl.environments.tool_calls.tool_schema import make_tool_schema
from streamrl.messages import Prompt
from tests.descendants import descendants
from tests.environments.hosts.user_files import ANSWERS, make_leaning

PROMPT = Prompt("0:0:0", np.zeros(1, np.int32), messages=[{"role": "user", "content": ""}])
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


async def probe(tmp_path, source, **settings):
    """Return the findings by subject as (status, text), and the records."""
    path = tmp_path / "mine.py"
    path.write_text(source)
    before = descendants()
    probe = EnvironmentProbe(EnvironmentConfig(str(path), **settings), [PROMPT], open_episodes=8)
    found = [finding async for finding in probe.run()]
    assert not descendants() - before
    return {f.subject: (f.status, f.text) for f in found}, probe.records


async def test_a_sound_environment_passes_every_check(tmp_path):
    found, records = await probe(tmp_path, SOUND)
    assert {status for status, _ in found.values()} == {FindingStatus.OK}
    assert [(r.policy, r.score) for r in records] == [("silent", 0), ("random", 0), ("oracle", 1)]
    assert found["other seed"][1].startswith("changes the episode: first observation")
    assert {"crash", "time"} <= found.keys()


@pytest.mark.parametrize(
    ("observation", "status", "text"),
    [
        ("Say it.", FindingStatus.OK, "changes the episode: turn 1: reply"),
        ("Say it.", FindingStatus.WARN, "4 seeds gave the same episode"),
    ],
)
async def test_a_seed_without_a_visible_effect_is_pointed_out(tmp_path, observation, status, text):
    source = SOUND.replace('f"Say {self.number}."', repr(observation))
    if status is FindingStatus.WARN:
        source = source.replace("random.Random(seed).randrange(1000)", "7")
    found, _ = await probe(tmp_path, source)
    assert found["other seed"][0] is status
    assert text in found["other seed"][1]


async def test_the_first_example_of_the_docs_passes_every_check(tmp_path):
    page = Path("docs/environments.md").read_text()
    (source,) = re.findall(r"```python\n(# guess.py.*?)```", page, re.DOTALL)
    found, _ = await probe(tmp_path, source)
    assert {status for status, _ in found.values()} == {FindingStatus.OK}


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
    monkeypatch.setattr("streamrl.environments.episodes.environment_probe.NUM_TOGETHER", 1)
    found, _ = await probe(
        tmp_path, f"import time\n{SOUND}\n    def close(self):\n        {body}\n"
    )
    status, text = found["close"]
    assert status is FindingStatus.FAIL
    assert "3 of 3 episodes: " in text and problem in text


async def test_state_that_episodes_share_is_found_side_by_side_and_named(tmp_path):
    found, _ = await probe(tmp_path, make_leaning(tmp_path, *ANSWERS), max_turns=2)
    assert found["same seed"][0] is FindingStatus.OK, "alone nothing is wrong"
    status, text = found["together"]
    assert status is FindingStatus.FAIL and "episodes side by side are not as alone" in text
    assert not [name for name in ANSWERS.values() if name not in text]


async def test_failures_name_turn_and_line_and_a_group_whose_episodes_differ(tmp_path):
    found, _ = await probe(tmp_path, BAD, max_turns=2)
    status, text = found["random"]
    assert status is FindingStatus.FAIL
    assert "at turn 1: Bad.step at" in text and "ValueError: cannot parse" in text
    assert found["silent"][0] is FindingStatus.OK
    status, text = found["same seed"]
    assert status is FindingStatus.FAIL
    assert "first observation: [{'content': 'Episode 0.'" in text
    assert found["score"][1].startswith("gives 1 to nonsense: the silent policy")
    assert "together" not in found, "two alone differ"
    assert found["crash"][0] is FindingStatus.OK


def make_record(policy="silent", *, score=0.0, rewards=(0.0,), seconds=0.0):
    record = EpisodeRecord(PROMPT, policy, finish_reason="stop", score=score)
    for reward in rewards:
        step = EnvironmentStep([{"role": "user", "content": "y"}], reward)
        record.see(HostOperation.STEP, [Reply("x")], step, seconds)
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


@pytest.mark.parametrize(
    ("scores", "warnings"),
    [
        ({"silent": 0.0, "random": 0.9}, []),
        ({"silent": 1.0, "random": 0.0}, ["gives 1 to nonsense: the silent"]),
        ({"silent": 1.0, "random": 0.0, "oracle": 5.0}, []),
        ({"random": 5.0, "oracle": 5.0}, ["gives 5 to nonsense: the random", "the oracle's mean"]),
        ({"oracle": 0.0}, ["the oracle's mean is 0"]),
        # A maze that a random walk solves once in four.
        ({"random": (0.0, 0.0, 1.0, 0.0), "oracle": 1.0}, []),
        ({"random": (0.0, 0.0, 1.0, 0.0), "oracle": (1.0, 0.5)}, []),
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
        assert finding.status is FindingStatus.WARN and finding.text.startswith(text)


def test_answers_that_take_half_of_the_deadline_are_slow():
    config = EnvironmentConfig("mine.py", turn_timeout_s=2.0)
    records = [make_record(seconds=s) for s in (0.5, 0.9)]
    assert [f.status for f in judge_records(records, config)] == [FindingStatus.OK]
    records.append(make_record(seconds=1.5))
    (finding,) = judge_records(records, config)
    assert finding.status is FindingStatus.WARN and "step 1.5 s" in finding.text


def test_an_episode_at_its_deadline_has_no_score():
    record = make_record()
    record.score, record.finish_reason = None, ""
    assert describe_episodes("silent", [record]).text.endswith("no score, ends: timeout")


def search(
    query: str,
    tags: list[str],
    filters: dict[str, int],
    site: Literal["web", "news"],
    limit: int | None = None,
    exact: bool = False,
    weight: float = 1.0,
) -> str:
    """Search."""
    return query


TOOL = make_tool_schema(search)
SEEDS = st.integers(0, 2**32)


def test_random_calls_match_the_schema_or_have_one_of_the_faults_of_a_policy():
    outcomes = set()
    for seed in range(100):
        name, arguments = sample_call(TOOL, random.Random(seed))
        message = {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
        (call,) = parse_turn(message, [TOOL]).calls
        outcomes.add(call.outcome)
    faults = (CallOutcome.MALFORMED, CallOutcome.UNKNOWN_TOOL, CallOutcome.WRONG_ARGUMENTS)
    assert outcomes == {*faults, CallOutcome.OK}


@given(SEEDS, st.integers(0, 9), st.sampled_from([[], [TOOL]]))
def test_the_same_seed_and_turn_give_the_same_random_turn(seed, num_messages, tools):
    turns: list[Any] = [
        asyncio.run(make_random_policy(seed)([{}] * num_messages, tools))  # type: ignore[arg-type]
        for _ in range(2)
    ]
    assert json.dumps(turns[0]) == json.dumps(turns[1])
