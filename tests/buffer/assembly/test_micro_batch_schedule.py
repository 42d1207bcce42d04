"""The turns of a step: which rounds, in which order, and where the optimizer updates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer.assembly.micro_batch_schedule import Pace, Program, Schedule, Turn

GROUPS = {"a": (5, 3), "b": (4, 4), "c": (6,), "d": (2, 7)}


def schedule_of(pace: Pace, *, world_size: int = 1, tokens: int = 12) -> Schedule:
    return Schedule(pace, world_size=world_size, micro_batch_tokens=tokens)


def picked(turns: list[Turn]) -> list[tuple[str, int]]:
    return [pick for turn in turns for picks in turn.work for pick in picks]


EVERYTHING = sorted((uid, i) for uid, lengths in GROUPS.items() for i in range(len(lengths)))


def test_one_update_streams_full_rounds_as_their_groups_come():
    schedule = schedule_of(Pace())
    turns = []
    for i, (uid, lengths) in enumerate(GROUPS.items()):
        schedule.add(uid, lengths)
        turns.append(schedule.turns(complete=i == 3))
    assert any(turns[:3]), "nothing was trained before the step was complete"
    made = [turn for part in turns for turn in part]
    assert sorted(picked(made)) == EVERYTHING
    assert [turn.ends_step for turn in made] == [False] * (len(made) - 1) + [True]
    assert list(schedule.program.turns()) == made


def test_whole_steps_wait_for_all_groups():
    schedule = schedule_of(Pace(whole_steps=True))
    schedule.add("a", GROUPS["a"])
    assert schedule.turns(complete=False) == []
    schedule.add("b", GROUPS["b"])
    assert sorted(picked(schedule.turns(complete=True))) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


@given(
    epochs=st.integers(1, 3),
    mini_batches=st.integers(1, 4),
    world_size=st.integers(1, 3),
    order=st.permutations(list(GROUPS)),
)
def test_every_epoch_goes_through_all_rollouts_once_in_as_many_updates(
    epochs, mini_batches, world_size, order
):
    pace = Pace(whole_steps=True, epochs=epochs, mini_batches=mini_batches)
    schedule = schedule_of(pace, world_size=world_size)
    for uid in order:
        schedule.add(uid, GROUPS[uid])
    turns = schedule.turns(complete=True)
    for epoch in range(epochs):
        own = [turn for turn in turns if turn.epoch == epoch]
        assert sorted(picked(own)) == EVERYTHING
        assert sum(turn.ends_update for turn in own) == mini_batches
    assert [turn.ends_step for turn in turns] == [False] * (len(turns) - 1) + [True]
    assert all(len(turn.work) == world_size for turn in turns)
    # A rank meets the same rollouts in every epoch: it has noted things about them.
    for rank in range(world_size):
        seen = [{p for t in turns if t.epoch == e for p in t.work[rank]} for e in range(epochs)]
        assert all(one == seen[0] for one in seen)


@given(order=st.permutations(list(GROUPS)))
def test_when_a_group_came_has_no_say_in_which_update_it_is_part_of(order):
    def updates(uids):
        schedule = schedule_of(Pace(whole_steps=True, mini_batches=2))
        for uid in uids:
            schedule.add(uid, GROUPS[uid])
        schedule.turns(complete=True)
        return [
            {uid for work in rounds for picks in work for uid, _ in picks}
            for rounds in schedule.program.updates
        ]

    assert updates(order) == updates(list(GROUPS))


def test_a_program_by_hand():
    one, two, three = ((("a", 0),),), ((("a", 1),),), ((("b", 0),),)
    turns = list(Program(((one, two), (three,)), epochs=2).turns())
    assert [turn.work for turn in turns] == [one, two, three, one, two, three]
    assert [turn.epoch for turn in turns] == [0, 0, 0, 1, 1, 1]
    assert [turn.ends_update for turn in turns] == [False, True, True, False, True, True]
    assert [turn.ends_step for turn in turns] == [False] * 5 + [True]


@pytest.mark.parametrize("num_shares", [1, 2, 3, 4])
def test_a_program_goes_to_other_ranks_micro_batch_by_micro_batch(num_shares):
    a, b, c, d = (((name, 0),) for name in "abcd")
    program = Program((((a, b), (c, ())), ((d, ()),)), epochs=2)
    dealt = program.dealt_to(num_shares)
    assert dealt.epochs == 2
    for before, after in zip(program.updates, dealt.updates, strict=True):
        assert {len(work) for work in after} == {num_shares}
        kept = [[picks for work in rounds for picks in work if picks] for rounds in (before, after)]
        assert kept[0] == kept[1], "each once, in their order"
        assert all(any(work) for work in after), "no round is for nobody"
    assert program.dealt_to(2) == program


def test_a_rollout_that_fits_no_micro_batch_is_refused():
    schedule = schedule_of(Pace(), tokens=6)
    with pytest.raises(ValueError, match="rollout 1 of d has 7 tokens; a micro-batch holds 6"):
        schedule.add("d", GROUPS["d"])
