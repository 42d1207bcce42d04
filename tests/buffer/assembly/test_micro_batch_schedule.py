"""Schedule of a step: rounds, their order, and the optimizer updates between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer.assembly.micro_batch_schedule import (
    ScheduledRound,
    StepSchedule,
    StepScheduler,
    UpdatePlan,
)

GROUPS = {"a": (5, 3), "b": (4, 4), "c": (6,), "d": (2, 7)}


def schedule_of(pace: UpdatePlan, *, world_size: int = 1, tokens: int = 12) -> StepScheduler:
    return StepScheduler(pace, world_size=world_size, micro_batch_tokens=tokens)


def picked(turns: list[ScheduledRound]) -> list[tuple[str, int]]:
    return [pick for turn in turns for picks in turn.micro_batches for pick in picks]


EVERYTHING = sorted((uid, i) for uid, lengths in GROUPS.items() for i in range(len(lengths)))


def test_single_update_streams_full_rounds():
    schedule = schedule_of(UpdatePlan())
    turns = []
    for i, (uid, lengths) in enumerate(GROUPS.items()):
        schedule.add_group(uid, lengths)
        turns.append(schedule.take_rounds(complete=i == 3))
    assert any(turns[:3]), "nothing was trained before the step was complete"
    made = [turn for part in turns for turn in part]
    assert sorted(picked(made)) == EVERYTHING
    assert [turn.is_last_of_step for turn in made] == [False] * (len(made) - 1) + [True]
    assert list(schedule.step_schedule.iter_rounds()) == made


def test_full_step_plan_waits_for_all_groups():
    schedule = schedule_of(UpdatePlan(requires_full_step=True))
    schedule.add_group("a", GROUPS["a"])
    assert schedule.take_rounds(complete=False) == []
    schedule.add_group("b", GROUPS["b"])
    assert sorted(picked(schedule.take_rounds(complete=True))) == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]


@given(
    epochs=st.integers(1, 3),
    mini_batches=st.integers(1, 4),
    world_size=st.integers(1, 3),
    order=st.permutations(list(GROUPS)),
)
def test_every_epoch_trains_each_rollout_once(epochs, mini_batches, world_size, order):
    pace = UpdatePlan(requires_full_step=True, num_epochs=epochs, num_mini_batches=mini_batches)
    schedule = schedule_of(pace, world_size=world_size)
    for uid in order:
        schedule.add_group(uid, GROUPS[uid])
    turns = schedule.take_rounds(complete=True)
    for epoch in range(epochs):
        own = [turn for turn in turns if turn.epoch == epoch]
        assert sorted(picked(own)) == EVERYTHING
        assert sum(turn.is_last_of_update for turn in own) == mini_batches
    assert [turn.is_last_of_step for turn in turns] == [False] * (len(turns) - 1) + [True]
    assert all(len(turn.micro_batches) == world_size for turn in turns)
    # Ranks keep precomputed values of their rollouts, so a rollout must stay on its rank.
    for rank in range(world_size):
        seen = [
            {p for t in turns if t.epoch == e for p in t.micro_batches[rank]} for e in range(epochs)
        ]
        assert all(one == seen[0] for one in seen)


@given(order=st.permutations(list(GROUPS)))
def test_mini_batches_do_not_depend_on_order_of_arrival(order):
    def updates(uids):
        schedule = schedule_of(UpdatePlan(requires_full_step=True, num_mini_batches=2))
        for uid in uids:
            schedule.add_group(uid, GROUPS[uid])
        schedule.take_rounds(complete=True)
        return [
            {uid for work in rounds for picks in work for uid, _ in picks}
            for rounds in schedule.step_schedule.update_rounds
        ]

    assert updates(order) == updates(list(GROUPS))


def test_schedule_worked_example():
    one, two, three = ((("a", 0),),), ((("a", 1),),), ((("b", 0),),)
    turns = list(StepSchedule(((one, two), (three,)), num_epochs=2).iter_rounds())
    assert [turn.micro_batches for turn in turns] == [one, two, three, one, two, three]
    assert [turn.epoch for turn in turns] == [0, 0, 0, 1, 1, 1]
    assert [turn.is_last_of_update for turn in turns] == [False, True, True, False, True, True]
    assert [turn.is_last_of_step for turn in turns] == [False] * 5 + [True]


@pytest.mark.parametrize("num_shares", [1, 2, 3, 4])
def test_schedule_is_redistributed_by_micro_batch(num_shares):
    a, b, c, d = (((name, 0),) for name in "abcd")
    program = StepSchedule((((a, b), (c, ())), ((d, ()),)), num_epochs=2)
    dealt = program.redistribute_rounds(num_shares)
    assert dealt.num_epochs == 2
    for before, after in zip(program.update_rounds, dealt.update_rounds, strict=True):
        assert {len(work) for work in after} == {num_shares}
        kept = [[picks for work in rounds for picks in work if picks] for rounds in (before, after)]
        assert kept[0] == kept[1], "each once, in their order"
        assert all(any(work) for work in after), "no round is for nobody"
    assert program.redistribute_rounds(2) == program


def test_rollout_larger_than_a_micro_batch_raises():
    schedule = schedule_of(UpdatePlan(), tokens=6)
    with pytest.raises(ValueError, match="rollout 1 of d has 7 tokens; a micro-batch holds 6"):
        schedule.add_group("d", GROUPS["d"])
