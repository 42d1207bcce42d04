"""Episodes whose conversation the chat template rewrites: a new sample begins there."""

import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.messages import (
    EPISODE_COLUMN,
    EPISODE_COLUMNS,
    ROLLOUT_COLUMNS,
    STATE_COLUMN,
    FinishReason,
    GroupInfo,
    TokenSource,
    check_column_sizes,
    measure_columns,
    split_token_column,
)
from streamrl.planner.simulator.virtual_loop import run_virtual
from tests.environments.episodes.scripted import (
    DONE,
    ScriptedHosts,
    ScriptedSampler,
    ScriptedSession,
    make_driver,
    run_group,
    say,
    to_text,
)
from tests.virtual_time import in_virtual_time


@in_virtual_time
async def test_a_turn_after_a_dropped_thought_begins_a_new_sample():
    sampler = ScriptedSampler(lambda context, seed: "{so}3;" if "lower" in context else "{hm}5;")
    session = ScriptedSession([say("lower", reward=0.25), DONE], final_score=2.0)
    driver = make_driver(sampler, ScriptedHosts(lambda: session), max_samples=2)
    columns = await run_group(driver)
    assert sampler.contexts == ["?", "?5;[lower]"]
    assert to_text(columns["token_ids"]) == "?{hm}5;" + "?5;[lower]{so}3;"
    letters = "".join("PSCO"[code] for code in columns["token_source"].tolist())
    # What both samples show is the prompt of the second, except for the observation.
    assert letters == "PSSSSSS" + "PPPCOOOOOCSSSSSS"
    np.testing.assert_array_equal(columns["loss_mask"], [c == "S" for c in letters])
    assert columns["episode"].tolist() == [0, 0]
    assert columns["num_turns"].tolist() == [1, 1]
    assert columns["turn_ends"].tolist() == [7, 16]
    assert columns["turn_rewards"].tolist() == [0.25, 1.0]
    assert columns["environment_scores"].tolist() == [2.0, 2.0]
    assert columns["finish_reason"].tolist() == [FinishReason.STOP.value] * 2
    assert session.replies == ["{hm}5", "{so}3"]
    expected = {"samples": 2, "turns": 2, "sampled_tokens": 12, "observed_tokens": 5}
    counts = driver.meter.drain_counts()
    assert {name: counts[f"episode/{name}:sum"] for name in expected} == expected


@in_virtual_time
async def test_each_turn_keeps_its_sampling_masks(monkeypatch):
    sampler = ScriptedSampler()
    generate = sampler.generate

    async def generate_with_masks(*arguments, **options):
        (rollout,) = await generate(*arguments, **options)
        words = np.where(rollout.loss_mask, rollout.token_ids, -1)[:, None]
        return [replace(rollout, wide={"sampling_mask": words})]

    monkeypatch.setattr(sampler, "generate", generate_with_masks)
    session = ScriptedSession([say("again"), DONE])
    columns = await run_group(make_driver(sampler, ScriptedHosts(lambda: session)))
    assert columns["num_turns"].tolist() == [2]
    expected = np.where(columns["loss_mask"], columns["token_ids"], -1)
    assert columns["sampling_mask"].tolist() == expected.tolist()


@in_virtual_time
async def test_turns_without_thoughts_and_those_after_the_last_sample_are_appended():
    turns = iter(["5;", "{hm}6;", "7;", "{so}8;", "9;"])
    sampler = ScriptedSampler(lambda context, seed: next(turns))
    driver = make_driver(sampler, [*map(say, "abcd"), DONE], max_samples=2)
    columns = await run_group(driver)
    assert sampler.contexts == [
        *("?", "?5;[a]", "?5;[a]6;[b]", "?5;[a]6;[b]7;[c]", "?5;[a]6;[b]7;[c]{so}8;[d]"),
    ]
    assert columns["num_turns"].tolist() == [2, 3]


@given(seed=st.integers(0, 9999), max_tokens=st.integers(20, 80), max_samples=st.integers(2, 4))
def test_samples_change_neither_turns_nor_limits_nor_what_is_trained(seed, max_tokens, max_samples):
    rng = random.Random(seed)
    counts = [rng.randint(1, 6) for _ in range(3)]

    def write(context, turn_seed):
        turn = random.Random(turn_seed)
        thought = turn.choice(["", "{}", "{hm}"])
        return f"{thought}{'x' * turn.randint(1, 4)};"

    def open_sessions():
        for count in counts:
            steps = [say("y" * (count + i), reward=i) for i in range(count)]
            yield ScriptedSession([*steps, DONE])

    async def run(most):
        sessions = open_sessions()
        hosts = ScriptedHosts(lambda: next(sessions))
        limits = {"max_tokens": max_tokens, "max_turns": 5, "max_samples": most}
        columns = await run_group(
            make_driver(ScriptedSampler(write), hosts, **limits), seeds=range(3)
        )
        return columns, [session.replies for session in hosts.sessions]

    appended, replies = run_virtual(run(1))
    columns, replies_of_samples = run_virtual(run(max_samples))
    assert replies_of_samples == replies
    lengths = appended["lengths"]
    rows = (split_token_column(appended[name], lengths) for name in ("token_ids", "loss_mask"))
    for tokens, mask, said in zip(*rows, replies, strict=True):
        # A turn that was cut has no end and reaches no environment.
        assert to_text(tokens[mask]).split(";")[: len(said)] == said
    for name in ("token_ids", "generator_logprobs", "policy_version"):
        trained = [c[name][c["loss_mask"]].tolist() for c in (appended, columns)]
        assert trained[1] == trained[0]
    for name in ("turn_rewards", "turn_states", "turn_outcomes", "conversations"):
        np.testing.assert_array_equal(columns[name], appended[name])
    firsts = np.unique(columns["episode"], return_index=True)[1]
    for name in ("finish_reason", "environment_scores", "num_calls"):
        np.testing.assert_array_equal(columns[name][firsts], appended[name])
    assert appended.keys() == {*ROLLOUT_COLUMNS, *EPISODE_COLUMNS, STATE_COLUMN}
    assert columns.keys() == {*appended, EPISODE_COLUMN}
    info = GroupInfo.from_columns(columns)
    check_column_sizes(measure_columns(columns), info)
    assert len(info.samples) == 3
    assert max(info.samples) <= max_samples
    assert max(info.lengths) <= 1 + max_tokens
    observed = [
        int((c["token_source"] == TokenSource.OBSERVATION).sum()) for c in (appended, columns)
    ]
    assert observed[1] == observed[0]
