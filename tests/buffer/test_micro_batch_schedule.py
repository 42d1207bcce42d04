"""Micro-batch schedule of a step: rounds, their order, and optimizer updates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer.micro_batch_schedule import (
    ScheduledRound,
    StepSchedule,
    StepScheduler,
    UpdatePlan,
)

GROUPS = {"a": (5, 3), "b": (4, 4), "c": (6,), "d": (2, 7)}


def make_scheduler(pace: UpdatePlan, *, dp_size: int = 1, tokens: int = 12) -> StepScheduler:
    return StepScheduler(pace, dp_size=dp_size, micro_batch_tokens=tokens)


def list_picks(all_rounds: list[ScheduledRound]) -> list[tuple[str, int]]:
    return [pick for r in all_rounds for picks in r.micro_batches for pick in picks]


EVERYTHING = sorted((uid, i) for uid, lengths in GROUPS.items() for i in range(len(lengths)))


def test_single_update_streams_full_rounds():
    schedule = make_scheduler(UpdatePlan())
    all_rounds = []
    for i, (uid, lengths) in enumerate(GROUPS.items()):
        schedule.add_group(uid, lengths)
        all_rounds.append(schedule.take_rounds(complete=i == 3))
    assert any(all_rounds[:3]), "nothing was trained before the step was complete"
    flat_rounds = [r for batch in all_rounds for r in batch]
    assert sorted(list_picks(flat_rounds)) == EVERYTHING
    assert [r.is_last_of_step for r in flat_rounds] == [False] * (len(flat_rounds) - 1) + [True]
    assert list(schedule.step_schedule.iter_rounds()) == flat_rounds


@given(
    epochs=st.integers(1, 3),
    mini_batches=st.integers(1, 4),
    dp_size=st.integers(1, 3),
    order=st.permutations(list(GROUPS)),
)
def test_every_epoch_trains_each_rollout_once(epochs, mini_batches, dp_size, order):
    pace = UpdatePlan(requires_full_step=True, num_epochs=epochs, num_mini_batches=mini_batches)
    schedule = make_scheduler(pace, dp_size=dp_size)
    for uid in order:
        schedule.add_group(uid, GROUPS[uid])
        assert schedule.take_rounds(complete=False) == [], "the step is not complete"
    all_rounds = schedule.take_rounds(complete=True)
    for epoch in range(epochs):
        of_epoch = [r for r in all_rounds if r.epoch == epoch]
        assert sorted(list_picks(of_epoch)) == EVERYTHING
        assert sum(r.is_last_of_update for r in of_epoch) == mini_batches
    assert [r.is_last_of_step for r in all_rounds] == [False] * (len(all_rounds) - 1) + [True]
    assert all(len(r.micro_batches) == dp_size for r in all_rounds)
    # Ranks cache values of their rollouts, so that a rollout must stay on its rank.
    for rank in range(dp_size):
        picks_by_epoch = [
            {p for t in all_rounds if t.epoch == e for p in t.micro_batches[rank]}
            for e in range(epochs)
        ]
        assert all(picks == picks_by_epoch[0] for picks in picks_by_epoch)


@given(order=st.permutations(list(GROUPS)))
def test_mini_batches_do_not_depend_on_order_of_arrival(order):
    def updates(uids):
        schedule = make_scheduler(UpdatePlan(requires_full_step=True, num_mini_batches=2))
        for uid in uids:
            schedule.add_group(uid, GROUPS[uid])
        schedule.take_rounds(complete=True)
        return [
            {uid for work in rounds for picks in work for uid, _ in picks}
            for rounds in schedule.step_schedule.update_rounds
        ]

    assert updates(order) == updates(list(GROUPS))


def test_schedule_worked_example():
    first, second, third = ((("a", 0),),), ((("a", 1),),), ((("b", 0),),)
    all_rounds = list(StepSchedule(((first, second), (third,)), num_epochs=2).iter_rounds())
    assert [r.micro_batches for r in all_rounds] == [first, second, third, first, second, third]
    assert [r.epoch for r in all_rounds] == [0, 0, 0, 1, 1, 1]
    assert [r.is_last_of_update for r in all_rounds] == [False, True, True, False, True, True]
    assert [r.is_last_of_step for r in all_rounds] == [False] * 5 + [True]


@pytest.mark.parametrize("num_shares", [1, 2, 3, 4])
def test_schedule_is_redistributed_by_micro_batch(num_shares):
    a, b, c, d = (((name, 0),) for name in "abcd")
    step_schedule = StepSchedule((((a, b), (c, ())), ((d, ()),)), num_epochs=2)
    dealt = step_schedule.redistribute_rounds(num_shares)
    assert dealt.num_epochs == 2
    for before, after in zip(step_schedule.update_rounds, dealt.update_rounds, strict=True):
        assert {len(work) for work in after} == {num_shares}
        micro_batches = [
            [picks for work in rounds for picks in work if picks] for rounds in (before, after)
        ]
        assert micro_batches[0] == micro_batches[1], "each micro-batch once, in order"
        assert all(any(work) for work in after), "no round is empty"
    assert step_schedule.redistribute_rounds(2) == step_schedule
