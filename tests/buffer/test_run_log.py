"""Ledger and run log: every prompt in one state; recovery restores the state before the crash."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import Ledger, RunLog
from streamrl.buffer.encoding import join_pieces
from streamrl.buffer.journal import Journal, JournalConfig, JournalRecord, get_segment_path
from streamrl.buffer.micro_batch_schedule import StepSchedule
from streamrl.buffer.run_log import (
    TrainedGroup,
    TrainedStep,
    check_checkpoint,
    read_log,
    recover_run_log,
)
from streamrl.errors import JournalError, LedgerError
from streamrl.messages import GroupInfo, GroupOutcome, make_uid, parse_uid
from tests.fake_shards import MemoryLog
from tests.virtual_time import in_virtual_time

FILTERED = GroupOutcome("filtered", "all 2 rewards are 1", filtered=True)
DROPPED = GroupOutcome("deadline", "the verifier is down")


def make_trained_group(uid: str, version: int = 0) -> TrainedGroup:
    return TrainedGroup(uid, GroupInfo((5, 7), 6, ((version, 6),)), version)


def make_step(version: int, *uids: str) -> TrainedStep:
    """Make a step for two ranks with one round per group: one rollout per rank."""
    groups = tuple(make_trained_group(uid, version) for uid in uids)
    rounds = tuple((((uid, 0),), ((uid, 1),)) for uid in uids)
    return TrainedStep(version, groups, {"policy": StepSchedule((rounds,))})


def round_trip_record(record: JournalRecord) -> JournalRecord:
    """Return the record as a journal reads it back."""
    return JournalRecord(json.loads(json.dumps(dict(record.meta))), join_pieces(record.payload))


# Steps

infos = st.builds(
    GroupInfo,
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=4).map(tuple),
    num_loss_tokens=st.integers(1, 100),
    version_tokens=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), max_size=3).map(
        tuple
    ),
)


@st.composite
def steps(draw: st.DrawFn) -> TrainedStep:
    uids = [f"0:{i}:0" for i in range(draw(st.integers(1, 5)))]
    groups = tuple(TrainedGroup(uid, draw(infos), draw(st.integers(0, 9))) for uid in uids)
    picks = st.lists(st.tuples(st.sampled_from(uids), st.integers(0, 7)), max_size=3).map(tuple)
    rounds = st.lists(st.lists(picks, max_size=2).map(tuple), max_size=3).map(tuple)
    step_schedule = st.builds(
        StepSchedule, st.lists(rounds, max_size=3).map(tuple), st.integers(1, 3)
    )
    schedules = st.dictionaries(st.sampled_from(["policy", "critic"]), step_schedule)
    return TrainedStep(draw(st.integers(0, 1000)), groups, draw(schedules))


@given(steps())
def test_step_record_has_the_whole_schedule(trained_step: TrainedStep):
    assert TrainedStep.from_record(round_trip_record(trained_step.to_record())) == trained_step


# Recovery

MOVES = ["admit", "admit", "admit", "step", "filter", "drop", "again", "checkpoint"]


@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 99)), max_size=40))
@in_virtual_time
async def test_recovered_ledger_equals_the_live_ledger(schedule: list[tuple[str, int]]):
    log = MemoryLog()
    run_log = RunLog(Ledger(), log)
    trained_steps: dict[int, TrainedStep] = {}
    drawn: list[str] = []
    state, cut, serial = None, 0, 0
    for move, seed in schedule:
        rng, in_flight = random.Random(seed), sorted(run_log.ledger.in_flight)
        if move == "admit":
            uids = [f"0:{serial + i}:0" for i in range(rng.randint(1, 4))]
            serial += len(uids)
            drawn += uids
            await run_log.record_admissions(uids, seed)
        elif move == "checkpoint":
            state, cut = json.loads(json.dumps(run_log.ledger.state_dict())), len(log.records)
            trained_steps, drawn = {}, []
        elif not in_flight:
            continue
        elif move == "step":
            uids = rng.sample(in_flight, min(2, len(in_flight)))
            version = max(trained_steps, default=seed) + 1
            trained_steps[version] = make_step(version, *uids)
            await run_log.record_step(trained_steps[version])
        elif move == "again":
            uid = rng.choice(in_flight)
            epoch, index, attempt = parse_uid(uid)
            retry_uid = make_uid(epoch, index, attempt + 1)
            await run_log.record_finished({uid: DROPPED}, readmitted=[retry_uid], version=seed)
        else:
            uids = rng.sample(in_flight, min(rng.randint(1, 2), len(in_flight)))
            await run_log.record_finished(
                dict.fromkeys(uids, FILTERED if move == "filter" else DROPPED)
            )
    recovered = recover_run_log([round_trip_record(r) for r in log.records[cut:]], state)
    assert recovered.ledger.state_dict() == run_log.ledger.state_dict()
    assert list(recovered.ledger.in_flight) == list(run_log.ledger.in_flight)
    recovered.ledger.check_balance(list(run_log.ledger.in_flight))
    assert recovered.steps_to_replay == trained_steps
    assert recovered.drawn_uids == tuple(drawn), "readmitted prompts are not drawn from the data"


@in_virtual_time
async def test_step_is_logged_before_the_ledger_changes():
    log = MemoryLog(write_s=5.0)
    run_log = RunLog(Ledger(), log)
    await run_log.record_admissions(["0:0:0"], 0)
    training = asyncio.create_task(run_log.record_step(make_step(0, "0:0:0")))
    await asyncio.sleep(1.0)
    assert run_log.ledger.counts.trained == 0
    await training
    assert run_log.ledger.counts.trained == 1


def test_contradicting_log_and_ledger_raise():
    with pytest.raises(LedgerError, match="prompt 0:0:0 is trained, but it is not in flight"):
        recover_run_log([make_step(0, "0:0:0").to_record()], None)


# On disk


async def write_run_log(folder: Path) -> RunLog:
    journal = Journal(folder, JournalConfig())
    run_log = RunLog(Ledger(), journal)
    await run_log.record_start(0)
    await run_log.record_admissions(["0:0:0", "0:1:0", "0:2:0"], 0)
    await journal.rotate()
    await run_log.record_step(make_step(0, "0:0:0"))
    await run_log.record_finished({"0:1:0": DROPPED}, readmitted=["0:1:1"], version=1)
    await run_log.record_finished({"0:2:0": FILTERED})
    await journal.close()
    return run_log


@pytest.mark.parametrize("change", ["", "trained", "version", "uid", "fork"])
def test_a_checkpoint_must_match_the_log_before_its_cut(tmp_path: Path, change: str):
    live = asyncio.run(write_run_log(tmp_path))
    state: dict[str, Any] = {"version": 1, "ledger": live.ledger.state_dict()}
    if change in ("trained", "fork"):
        state["ledger"]["trained"] += 1
    elif change == "version":
        state["version"] = 2
    elif change == "uid":
        state["ledger"]["in_flight"] = {"0:1:2": 1}
    if change == "fork":  # has no log of the steps before
        get_segment_path(tmp_path, 1).unlink()
    if change in ("", "fork"):
        check_checkpoint(tmp_path, state, cut=3)
        return
    with pytest.raises(LedgerError, match=r"state\.json does not match .* trained 1 \+ filtered 1"):
        check_checkpoint(tmp_path, state, cut=3)


def test_damaged_log_raises_with_file_and_offset(tmp_path: Path):
    asyncio.run(write_run_log(tmp_path))
    path = get_segment_path(tmp_path, 2)
    path.write_bytes(path.read_bytes().replace(b"deadline", b"reward_errer"))
    with pytest.raises(JournalError, match=r"00000002\.journal, byte \d+: the record does not"):
        list(read_log(tmp_path))


def make_ledger(*uids: str) -> Ledger:
    ledger = Ledger()
    for uid in uids:
        ledger.mark_admitted(uid, 0)
    return ledger


def test_ledger_counts_every_prompt_in_one_state():
    ledger = make_ledger(*"abcd")
    ledger.mark_trained("a")
    ledger.mark_filtered("b")
    ledger.mark_dropped("c", "deadline")
    assert ledger.num_credits_spent == 2, "a trained group's credit is not refunded"
    counts = ledger.check_balance(["d"])
    assert str(counts) == "admitted 4 = trained 1 + filtered 1 + dropped 1 + in flight 1"
    assert counts.drops == (("deadline", 1),)
    with pytest.raises(LedgerError, match="in flight already"):
        ledger.mark_admitted("d", 1)


def test_the_queue_holds_the_groups_in_flight():
    ledger = make_ledger(*"abc")
    ledger.mark_trained("a")
    ledger.check_balance(["b"], inserted=["b"])  # c is yet to be inserted
    with pytest.raises(LedgerError, match=r"lost from the queue: \['c'\]"):
        ledger.check_balance(["b"])
    with pytest.raises(LedgerError, match=r"ended but in it: \['a'\]"):
        ledger.check_balance([*"abc"])
