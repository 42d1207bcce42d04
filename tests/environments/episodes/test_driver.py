"""The driver of episodes: bookkeeping of tokens, limits, failures, slots and leases."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from streamrl.environments.episodes.driver import (
    derive_attempt_seed,
    make_environment_seed,
    open_conversation,
)
from streamrl.environments.interface import CallOutcome, ResetResult
from streamrl.errors import EpisodeError, EpisodeOutageError, GenerationError
from streamrl.messages import (
    FinishReason,
    TokenSource,
    TurnOutcome,
)
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.rewards.metric_means import sums_to_means
from streamrl.user_code import service_gate
from tests.environments.episodes.scripted import (
    DONE,
    PROMPT,
    CodePointRenderer,
    ScriptedHosts,
    ScriptedSampler,
    ScriptedSession,
    make_driver,
    no_lease,
    run_group,
    say,
    to_text,
)
from tests.virtual_time import in_virtual_time


def list_reasons(columns):
    return [FinishReason(code) for code in columns["finish_reason"].tolist()]


@in_virtual_time
async def test_a_worked_episode_of_two_turns():
    session = ScriptedSession(
        [replace(say("lower", reward=0.25), state=2**40), DONE],
        ResetResult(messages=[{"role": "system", "content": "0-9"}], state=5),
        final_score=2.0,
    )

    def write(context, seed):
        sampler.version = len(sampler.contexts)
        return "5;" if "lower" not in context else "3;"

    sampler = ScriptedSampler(write)
    columns = await run_group(make_driver(sampler, ScriptedHosts(lambda: session)))
    assert sampler.contexts == ["?0-9", "?0-95;[lower]"]
    assert to_text(columns["token_ids"]) == "?0-95;[lower]3;"
    source = TokenSource.PROMPT, TokenSource.SAMPLED, TokenSource.SCAFFOLD, TokenSource.OBSERVATION
    letters = "".join("PSCO"[source.index(code)] for code in columns["token_source"].tolist())
    assert letters == "PPPPSSCOOOOOCSS"
    np.testing.assert_array_equal(columns["loss_mask"], [c == "S" for c in letters])
    assert set(columns["generator_logprobs"][~columns["loss_mask"]].tolist()) == {0.0}
    assert columns["policy_version"].tolist() == [*[-1] * 4, 1, 1, *[-1] * 7, 2, 2]
    assert columns["turn_ends"].tolist() == [6, 15]
    assert columns["turn_rewards"].tolist() == [0.25, 1.0]
    assert columns["turn_states"].tolist() == [5, 2**40], "before each turn"
    assert columns["environment_scores"].tolist() == [2.0]
    assert list_reasons(columns) == [FinishReason.STOP]
    assert session.replies == ["5", "3"]
    assert [m["role"] for m in session.summary.messages] == [
        *("user", "system", "assistant", "user", "assistant")
    ]
    assert session.summary.answer == "3"
    assert session.is_closed


@in_virtual_time
async def test_a_turn_that_does_not_continue_the_episode_is_an_infrastructure_error(monkeypatch):
    sampler = ScriptedSampler()
    original = sampler.generate

    async def generate(prompt_ids, **options):
        return await original(np.where(prompt_ids == ord("?"), ord("!"), prompt_ids), **options)

    monkeypatch.setattr(sampler, "generate", generate)
    with pytest.raises(EpisodeError, match=r"token 0 of 1 differs; sent \[63\], got \[33\]"):
        await run_group(make_driver(sampler, [DONE], attempts=1))


@pytest.mark.parametrize(
    ("limits", "reason", "turns", "steps"),
    [
        ({"max_turns": 2}, FinishReason.TURNS, 2, 2),
        ({"max_turn_tokens": 3}, FinishReason.LENGTH, 1, 0),  # the environment sees no cut turn
        ({"max_tokens": 12}, FinishReason.TOKENS, 1, 1),  # no room for the observation
        ({"max_tokens": 14}, FinishReason.TOKENS, 2, 1),  # no room for the second turn
    ],
)
def test_limits_end_an_episode_as_truncated_and_it_is_still_scored(limits, reason, turns, steps):
    async def run():
        session = ScriptedSession([say("again", reward=0.5)] * 9, final_score=0.25)
        driver = make_driver(
            ScriptedSampler(lambda context, seed: "four;"), ScriptedHosts(lambda: session), **limits
        )
        columns = await run_group(driver)
        assert list_reasons(columns) == [reason]
        assert (columns["num_turns"].tolist(), len(session.replies)) == ([turns], steps)
        assert columns["environment_scores"].tolist() == [0.25]
        assert len(columns["token_ids"]) <= 1 + limits.get("max_tokens", 256)
        assert session.summary.finish_reason == reason.name.lower()

    run_virtual(run())


@in_virtual_time
async def test_time_in_engine_and_environment_ends_an_episode_waiting_for_a_slot_does_not():
    steps = [(4.0, say("slow", reward=0.5))] * 9
    driver = make_driver(ScriptedSampler(), steps, episode_timeout_s=10.0)
    columns = await run_group(driver, seeds=range(3))
    assert set(list_reasons(columns)) == {FinishReason.TIMEOUT}
    # Not the score of an environment that may still be busy, but the rewards before.
    assert columns["environment_scores"].tolist() == pytest.approx([1.0] * 3)
    assert TurnOutcome(columns["turn_outcomes"][-1]) is TurnOutcome.TIMED_OUT


@in_virtual_time
async def test_an_episodes_clock_stops_while_its_engine_is_suspended(monkeypatch):
    sampler = ScriptedSampler(token_s=1.0)
    sample = sampler.generate

    async def generate(*arguments, **options):
        await asyncio.sleep(1000.0)
        sampler.paused_s += 1000.0
        return await sample(*arguments, **options)

    monkeypatch.setattr(sampler, "generate", generate)
    driver = make_driver(sampler, [(3.0, say("x")), (3.0, DONE)], episode_timeout_s=12.0)
    columns = await run_group(driver)
    assert list_reasons(columns) == [FinishReason.STOP]
    # The engine samples 4 s of 2010 and is suspended for 2000; the environment works for 6.
    shares = sums_to_means(driver.meter.drain_counts())
    assert shares["episode/decode_frac"] == pytest.approx(4 / 2010)
    assert shares["episode/wait_frac"] == pytest.approx(2000 / 2010)
    assert shares["episode/environment_frac"] == pytest.approx(6 / 2010)


@in_virtual_time
async def test_every_turn_of_every_episode_has_a_seed_of_its_own():
    hosts = ScriptedHosts(lambda: ScriptedSession([say("more"), say("more"), DONE]))
    driver = make_driver(ScriptedSampler(lambda context, seed: f"{seed % 10**6};"), hosts)
    await run_group(driver, seeds=[5, 6])
    words = [word for session in hosts.sessions for word in session.replies]
    assert len(words) == len(set(words)) == 6
    assert {"5", "6"} <= set(words), "the first turn has the episode's seed itself"


@in_virtual_time
async def test_a_retry_writes_other_words_in_the_same_environment():
    """With the first seed, words that crash the environment would crash it at every attempt."""
    hosts = ScriptedHosts(
        lambda: ScriptedSession([DONE if hosts.sessions else EpisodeError("crash")])
    )
    driver = make_driver(ScriptedSampler(lambda context, seed: f"{seed};"), hosts)
    await run_group(driver, seeds=[5])
    words = [session.replies for session in hosts.sessions]
    assert words == [["5"], [str(derive_attempt_seed(5, 2))]]
    assert hosts.seeds == [7, 7] and all(session.is_closed for session in hosts.sessions)
    assert driver.meter.drain_counts()["episode/infra_errors"] == 1
    assert len({derive_attempt_seed(5, attempt) for attempt in range(1, 9)}) == 8


@in_virtual_time
async def test_an_episode_that_the_drivers_close_interrupts_is_left_to_another_generator():
    closed = EpisodeError("the environment's processes are closed")
    hosts = ScriptedHosts(lambda: ScriptedSession([(10.0, closed)]))
    driver = make_driver(ScriptedSampler(), hosts)
    group = asyncio.create_task(run_group(driver, seeds=range(2)))
    await asyncio.sleep(1.0)
    await driver.close()
    with pytest.raises(GenerationError, match="the driver of episodes was closed"):
        await group
    assert len(hosts.sessions) == 2, "no episode was tried again"
    assert driver.meter.drain_counts()["episode/infra_errors"] == 0


@in_virtual_time
async def test_an_evaluation_leaves_out_failed_samples_and_counts_in_no_metric_of_training():
    answers = iter([DONE, EpisodeError("refused"), DONE])
    hosts = ScriptedHosts(lambda: ScriptedSession([next(answers)]))
    driver = make_driver(ScriptedSampler(), hosts, attempts=1)
    columns, failure = await driver.run_evaluation(
        PROMPT, seeds=range(3), environment_seed=7, compute=no_lease, sampling=None
    )
    assert (len(columns["lengths"]), failure) == (2, "refused")
    assert not any(driver.meter.drain_counts().values())


@in_virtual_time
async def test_the_meter_tells_how_many_open_episodes_wait_for_their_environment():
    sampler = ScriptedSampler(token_s=1.0)
    driver = make_driver(sampler, [(500.0, DONE)], slots=1, episode_timeout_s=1000.0)
    group = asyncio.create_task(run_group(driver, seeds=range(3)))
    await asyncio.sleep(5.0)  # the third turn is being sampled
    assert driver.meter.describe_waits() == (
        "2 of 3 open episodes wait for their environment, the longest for 3 s"
    )
    await group
    assert driver.meter.describe_waits() == ""


@in_virtual_time
async def test_an_outage_of_a_server_delays_episodes_by_one_probe_and_costs_no_attempt():
    clock = asyncio.get_running_loop().time

    class ServerSession(ScriptedSession):
        """Session with a server that is down from second 5 to second 45."""

        async def reset(self):
            self.check_server()
            return await super().reset()

        async def step(self, reply):
            self.check_server()
            return await super().step(reply)

        def check_server(self):
            if 5.0 <= clock() < 45.0:
                raise EpisodeOutageError("http://tools/mcp: ended: ConnectError")

    hosts = ScriptedHosts(lambda: ServerSession([(1.0, say("x")), DONE]))
    sampler = ScriptedSampler(token_s=2.0)
    driver = make_driver(sampler, hosts, slots=8, attempts=1, episode_timeout_s=20.0)
    group = asyncio.create_task(run_group(driver, seeds=range(8)))
    await asyncio.sleep(30.0)
    (outage,) = await service_gate.list_outages("generate")
    assert (outage.stage, outage.reason) == ("generate", "http://tools/mcp: ended: ConnectError")
    columns = await group
    assert to_text(columns["token_ids"]) == "?a;[x]a;" * 8
    probes = len(hosts.sessions) - 16
    assert probes == 6, "tries after 0.5, 1, 2, 4, 8 and 15 s fail; all eight end after the next"
    assert all(session.is_closed for session in hosts.sessions)
    assert driver.meter.drain_counts()["episode/infra_errors"] == 0


@in_virtual_time
async def test_a_group_is_trained_only_whole():
    count = iter(range(9))

    def open_session():
        return ScriptedSession([EpisodeError("refused") if next(count) == 0 else DONE])

    sampler = ScriptedSampler()
    driver = make_driver(sampler, ScriptedHosts(open_session), attempts=1)
    with pytest.raises(EpisodeError, match="refused"):
        await run_group(driver, seeds=range(3))


@in_virtual_time
async def test_an_error_of_the_engine_is_no_fault_of_the_environment(monkeypatch):
    sampler = ScriptedSampler()

    async def generate(*arguments, seeds, **options):
        await asyncio.sleep(1.0 if seeds == [0] else 1000.0)
        raise GenerationError("the engine died")

    monkeypatch.setattr(sampler, "generate", generate)
    hosts = ScriptedHosts(lambda: ScriptedSession([DONE]))
    with pytest.raises(GenerationError):
        await run_group(make_driver(sampler, hosts), seeds=range(3))
    assert [s.is_closed for s in hosts.sessions] == [True] * 3, "two were cancelled meanwhile"


@in_virtual_time
async def test_an_episode_holds_slot_and_lease_only_while_it_samples():
    holders, most = 0, 0

    @asynccontextmanager
    async def lease(**facts):
        nonlocal holders, most
        holders += 1
        most = max(most, holders)
        try:
            yield {}
        finally:
            holders -= 1

    sampler = ScriptedSampler(token_s=0.5)
    driver = make_driver(sampler, [(30.0, say("x")), (30.0, DONE)], slots=2)
    group = asyncio.create_task(run_group(driver, seeds=range(8), compute=lease))
    await asyncio.sleep(4.5)  # all have had their first turn, two at a time
    assert (holders, sampler.num_running) == (0, 0)
    await group
    assert most == sampler.max_running == 2
    assert driver.meter.drain_counts()["episode/open"] == 0


@in_virtual_time
async def test_spans_of_turns_have_the_time_of_the_environment_so_far():
    turns = []

    @asynccontextmanager
    async def record(**facts):
        yield facts
        turns.append(facts)

    driver = make_driver(ScriptedSampler(token_s=0.5), [(2.0, say("xy")), (3.0, DONE)])
    await run_group(driver, compute=record)
    first, second = turns
    facts = [(turn["episode"], turn["turn"], turn["environment_s"]) for turn in turns]
    assert facts == [(0, 0, 0.0), (0, 1, 2.0)]
    assert second["context"] > first["context"] + first["tokens"]
    assert driver.meter.drain_counts()["episode/environment_s:sum"] == 5.0


@in_virtual_time
async def test_turns_of_earlier_groups_go_first():
    order = []

    def write(context, seed):
        order.append(seed)
        return "a;"

    sampler = ScriptedSampler(write, token_s=1.0)
    driver = make_driver(sampler, [say("x"), say("y"), DONE], slots=1)
    await asyncio.gather(*(run_group(driver, seeds=[seed]) for seed in (100, 200, 300)))
    assert order.index(100) < order.index(200) < order.index(300)
    assert order.index(300) >= 6  # all turns of the first two groups come before the third group


@in_virtual_time
@pytest.mark.parametrize("length", [300, 1_000_000])
async def test_a_first_observation_without_room_for_a_turn_is_no_episode(monkeypatch, length):
    start = ResetResult(messages=[{"role": "user", "content": "x" * length}])
    hosts = ScriptedHosts(lambda: ScriptedSession([DONE], start))
    driver = make_driver(ScriptedSampler(), hosts, attempts=1)
    if length > 300:
        monkeypatch.setattr(CodePointRenderer, "render_prompt", refuse_to_encode)
    with pytest.raises(EpisodeError, match=r"environment.max_tokens=256 leaves no room"):
        await run_group(driver)


@in_virtual_time
async def test_an_observation_that_cannot_fit_is_not_encoded(monkeypatch):
    monkeypatch.setattr(CodePointRenderer, "render_bridge", refuse_to_encode)
    columns = await run_group(make_driver(ScriptedSampler(), [say("x" * 1_000_000), DONE]))
    assert list_reasons(columns) == [FinishReason.TOKENS]


def refuse_to_encode(*arguments, **options):
    raise AssertionError("megabytes were encoded")


@in_virtual_time
async def test_the_worst_outcome_of_its_calls_is_that_of_the_turn():
    calls = [CallOutcome.OK, CallOutcome.TOOL_ERROR, CallOutcome.UNKNOWN_TOOL]
    driver = make_driver(ScriptedSampler(), [say("x", outcomes=calls), DONE])
    columns = await run_group(driver)
    assert columns["turn_outcomes"].tolist() == [TurnOutcome.TOOL_ERROR, TurnOutcome.SPOKE]
    assert (columns["num_calls"].tolist(), columns["num_invalid_calls"].tolist()) == ([3], [1])
    counts = driver.meter.drain_counts()
    assert counts["episode/malformed_frac:sum"] == 1
    assert counts["episode/malformed_frac:count"] == 3


def test_a_text_of_reset_joins_the_users_message_of_the_row():
    row = [{"role": "system", "content": "s"}, {"role": "user", "content": "Guess."}]
    system, joined = open_conversation(row, [{"role": "user", "content": "0-63"}])
    assert system == row[:1]
    assert joined == [{"role": "user", "content": "Guess.\n\n0-63"}]
    assert open_conversation(row, []) == (row, [])
    hint = [{"role": "system", "content": "x"}]
    assert open_conversation(row, hint) == (row, hint)


def test_the_environments_seed_depends_on_run_and_prompt_only():
    assert make_environment_seed(0, "0:1:0") == make_environment_seed(0, "0:1:0")
    assert len({make_environment_seed(s, u) for s in (0, 1) for u in ("0:1:0", "0:2:0")}) == 4
