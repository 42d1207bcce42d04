"""Micro-batch schedule of a step: packing, rounds, their order, and optimizer updates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer.micro_batch_schedule import (
    MicroBatchPacker,
    Round,
    ScheduledRound,
    StepSchedule,
    StepScheduler,
    UpdatePlan,
    pack_rollouts,
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
    assert list(schedule.step_schedule.iter_rounds()) == all_rounds
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


BUDGET = 64
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=40)
WORLD = st.integers(1, 5)


def make_rollouts(lengths: list[int]) -> list[tuple[str, int, int]]:
    return [(f"g{i // 3}", i % 3, length) for i, length in enumerate(lengths)]


def count_padded_tokens(picks, size) -> int:
    return len(picks) * max((size[pick] for pick in picks), default=0)


def check_rounds(rounds: list[Round], rollouts: list[tuple[str, int, int]], dp_size: int) -> None:
    size = {(uid, index): length for uid, index, length in rollouts}
    dealt = [pick for work in rounds for picks in work for pick in picks]
    assert sorted(dealt) == sorted(size)
    assert all(len(work) == dp_size for work in rounds)
    assert all(count_padded_tokens(picks, size) <= BUDGET for work in rounds for picks in work)
    loads = [
        sum(count_padded_tokens(work[rank], size) for work in rounds) for rank in range(dp_size)
    ]
    assert max(loads) - min(loads) <= BUDGET


@given(LENGTHS, WORLD)
def test_packing_has_every_rollout_once_within_the_budget_and_balanced(lengths, dp_size):
    rollouts = make_rollouts(lengths)
    rounds = pack_rollouts(rollouts, dp_size=dp_size, micro_batch_tokens=BUDGET)
    check_rounds(rounds, rollouts, dp_size)


@given(LENGTHS, WORLD)
def test_rank_is_idle_only_if_every_micro_batch_is_a_single_rollout(lengths, dp_size):
    rounds = pack_rollouts(make_rollouts(lengths), dp_size=dp_size, micro_batch_tokens=BUDGET)
    micro_batches = [picks for work in rounds for picks in work]
    if not all(micro_batches):
        assert all(len(picks) <= 1 for picks in micro_batches)


def test_packing_is_balanced_by_padded_tokens():
    # 10 + 10, then 6 padded with 5 + 5: 20 against 18.
    rollouts = [("a", 0, 10), ("a", 1, 6), ("b", 0, 10), ("b", 1, 5), ("b", 2, 5)]
    rounds = [((("a", 0), ("b", 0)), (("a", 1), ("b", 1), ("b", 2)))]
    assert pack_rollouts(rollouts, dp_size=2, micro_batch_tokens=20) == rounds


@given(LENGTHS, WORLD, st.randoms())
def test_packing_does_not_depend_on_order_of_arrival(lengths, dp_size, random):
    rollouts = make_rollouts(lengths)
    plan = pack_rollouts(rollouts, dp_size=dp_size, micro_batch_tokens=BUDGET)
    random.shuffle(rollouts)
    assert pack_rollouts(rollouts, dp_size=dp_size, micro_batch_tokens=BUDGET) == plan


@given(st.lists(st.lists(st.integers(1, BUDGET), min_size=1, max_size=6), max_size=12), WORLD)
def test_streamed_packing_is_complete_and_early_rounds_are_well_filled(groups, dp_size):
    packer = MicroBatchPacker(dp_size=dp_size, micro_batch_tokens=BUDGET)
    rollouts = [(f"g{g}", i, n) for g, group in enumerate(groups) for i, n in enumerate(group)]
    size = {(uid, index): length for uid, index, length in rollouts}
    early = []
    for g, group in enumerate(groups):
        packer.add_group(f"g{g}", group)
        early += packer.take_rounds(final=False)
    assert all(2 * count_padded_tokens(picks, size) > BUDGET for work in early for picks in work)
    check_rounds(early + packer.take_rounds(final=True), rollouts, dp_size)
    assert packer.take_rounds(final=True) == []


@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=5),
        max_size=12,
    ),
    WORLD,
)
def test_samples_of_an_episode_are_in_one_micro_batch(groups, dp_size):
    packer = MicroBatchPacker(dp_size=dp_size, micro_batch_tokens=BUDGET)
    rollouts, episodes, rounds = [], [], []
    for g, group in enumerate(groups):
        lengths = [length for episode in group for length in episode]
        rollouts += [(f"g{g}", i, length) for i, length in enumerate(lengths)]
        firsts = [sum(map(len, group[:e])) for e in range(len(group))]
        episodes += [
            [(f"g{g}", first + i) for i in range(len(episode))]
            for first, episode in zip(firsts, group, strict=True)
        ]
        packer.add_group(f"g{g}", lengths, [len(episode) for episode in group])
        rounds += packer.take_rounds(final=False)
    rounds += packer.take_rounds(final=True)
    check_rounds(rounds, rollouts, dp_size)
    micro_batches = [picks for work in rounds for picks in work]
    for episode in episodes:
        (holder,) = [picks for picks in micro_batches if episode[0] in picks]
        start = holder.index(episode[0])
        assert list(holder[start : start + len(episode)]) == episode


def test_episode_whose_samples_exceed_a_micro_batch_together_raises():
    message = "rollouts 1 to 3 of 3:7:0 are samples of an episode and have up to 7 tokens each"
    with pytest.raises(ValueError, match=message):
        MicroBatchPacker(dp_size=1, micro_batch_tokens=20).add_group("3:7:0", [20, 5, 7, 6], [1, 3])


def test_rollout_over_the_token_budget_raises():
    message = "rollout 1 of 3:7:0 has 21 tokens; a micro-batch holds 20"
    with pytest.raises(ValueError, match=message):
        MicroBatchPacker(dp_size=1, micro_batch_tokens=20).add_group("3:7:0", [20, 21])
