"""Findings on environments that raise, repeat nothing, reward nonsense or need much memory."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.host_protocol import EnvironmentDescription, EnvironmentShape
from streamrl.environments.interface import EnvironmentStep, Reply, ResetResult
from streamrl.environments.probing.environment_probe import (
    EnvironmentProbe,
    describe_episodes,
    judge_memory,
    judge_scores,
    judge_seconds,
)
from streamrl.environments.probing.episode_record import EpisodeRecord, find_first_difference
from streamrl.environments.probing.finding import FindingStatus
from streamrl.messages import Prompt
from tests.descendants import descendants
from tests.environments.episodes.in_process import InProcessHosts
from tests.environments.hosts.user_files import ANSWERS, make_leaning

PROMPT = Prompt("0:0:0", np.zeros(1, np.int32), messages=[{"role": "user", "content": ""}])
DESCRIPTION = EnvironmentDescription("Mine", "mine.py", EnvironmentShape.TURNS)
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
    assert {"crash", "memory", "time"} <= found.keys()


@pytest.mark.parametrize(
    ("observation", "status", "text"),
    [
        ("Say it.", FindingStatus.OK, "; two seeds gave the same first observation"),
        ("Say it.", FindingStatus.WARN, "4 seeds gave the same episode of each policy"),
    ],
)
async def test_a_seed_without_a_visible_effect_is_pointed_out(tmp_path, observation, status, text):
    source = SOUND.replace('f"Say {self.number}."', repr(observation))
    if status is FindingStatus.WARN:
        source = source.replace("random.Random(seed).randrange(1000)", "7")
    found, _ = await probe(tmp_path, source)
    assert found["other seed"][0] is status
    assert text in found["other seed"][1]


async def test_a_class_whose_reset_takes_no_seed_needs_no_other_seed(tmp_path):
    source = SOUND.replace("row, seed)", "row)").replace("random.Random(seed)", "random.Random(5)")
    found, _ = await probe(tmp_path, source)
    assert found["other seed"] == (
        FindingStatus.OK,
        "reset takes no seed: the row is the whole task",
    )


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
    monkeypatch.setattr("streamrl.environments.probing.environment_probe.NUM_OPEN_SESSIONS", 1)
    monkeypatch.setattr("streamrl.environments.probing.environment_probe.NUM_TOGETHER", 1)
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


@pytest.mark.parametrize("answer", ANSWERS)
async def test_episodes_that_read_what_others_have_changed_differ(tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SEED", "")
    path = tmp_path / "mine.py"
    path.write_text(make_leaning(tmp_path, answer))
    hosts = InProcessHosts(EnvironmentConfig(str(path)))

    async def play(seed):
        session = hosts.open_session(PROMPT, seed=seed)
        await session.reset()
        answers = [(await session.step(Reply("x"))).messages[0]["content"] for _ in range(2)]
        await session.close()
        return answers

    alone = [await play(seed) for seed in (1, 2)]
    assert await asyncio.gather(*map(play, (1, 2) * 4)) != alone * 4


async def test_settings_of_the_process_are_pointed_out_where_no_episode_differs(tmp_path):
    found, _ = await probe(tmp_path, make_leaning(tmp_path, "'x'"), max_turns=2)
    status, text = found["together"]
    assert status is FindingStatus.WARN and "by chance; a process shares os.environ" in text


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
    assert found["together"] == (
        FindingStatus.WARN,
        "8 side by side: none fails; not compared: two alone differ",
    )
    assert found["crash"][0] is FindingStatus.OK


def make_record(policy="silent", *, score=0.0, rewards=(0.0,), seconds=None):
    return EpisodeRecord(
        PROMPT,
        policy,
        ResetResult([{"role": "user", "content": "go"}]),
        [Reply("x") for _ in rewards],
        [EnvironmentStep([{"role": "user", "content": "y"}], reward) for reward in rewards],
        "stop",
        score,
        seconds=seconds or {},
    )


def test_the_first_difference_of_two_episodes_has_its_turn():
    first = make_record(rewards=(0.0, 0.5))
    assert find_first_difference(first, make_record(rewards=(0.0, 0.5))) == ""
    other = make_record(rewards=(0.0, 0.25))
    assert find_first_difference(first, other) == "turn 2: reward: 0.5, then 0.25"
    assert find_first_difference(first, make_record()) == "number of turns: 2, then 1"
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
    found = list(judge_scores(records, DESCRIPTION))
    assert len(found) == len(warnings)
    for finding, text in zip(found, warnings, strict=True):
        assert finding.status is FindingStatus.WARN and finding.text.startswith(text)


def test_answers_that_take_half_of_the_deadline_are_slow():
    config = EnvironmentConfig("mine.py", turn_timeout_s=2.0)
    records = [make_record(seconds={"reset": 0.1, "step": s}) for s in (0.5, 0.9)]
    assert [f.status for f in judge_seconds(records, config)] == [FindingStatus.OK]
    records.append(make_record(seconds={"step": 1.5}))
    (finding,) = judge_seconds(records, config)
    assert finding.status is FindingStatus.WARN and "step 1.5 s" in finding.text


def test_memory_of_the_open_episodes_is_compared_with_the_limit():
    config = EnvironmentConfig("mine.py", memory_gib=1.0)
    mib = 2**20
    assert judge_memory(100 * mib, mib, 100, config).status is FindingStatus.OK
    assert judge_memory(2048 * mib, 0, 1, config).status is FindingStatus.FAIL
    finding = judge_memory(100 * mib, 10 * mib, 100, config)
    assert finding.status is FindingStatus.WARN
    assert "each further episode 10.000 MiB; a run's 100 per process need 1100 MiB" in finding.text


def test_memory_of_a_process_per_episode_is_compared_with_the_machine():
    config, mib = EnvironmentConfig("mine.py", isolate=True), 2**20
    assert judge_memory(30 * mib, 0, 8, config).status is FindingStatus.OK
    finding = judge_memory(3000 * mib, 0, 10**6, config)
    assert finding.status is FindingStatus.WARN
    assert "1000000 open episodes are as many processes: 3000000000 MiB of" in finding.text


def test_an_episode_at_its_deadline_has_no_score():
    record = make_record()
    record.score, record.finish_reason = None, ""
    assert describe_episodes("silent", [record]).text.endswith("no score, ends: timeout")
