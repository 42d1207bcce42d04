"""Packing: each rollout once, micro-batches within the token budget, balanced ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer.micro_batch_schedule import MicroBatchPacker, Round, pack_rollouts

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


@pytest.mark.parametrize(
    ("rollouts", "dp_size", "rounds"),
    [
        # 10 + 10, then 6 padded with 5 + 5: 20 against 18.
        (
            [("a", 0, 10), ("a", 1, 6), ("b", 0, 10), ("b", 1, 5), ("b", 2, 5)],
            2,
            [((("a", 0), ("b", 0)), (("a", 1), ("b", 1), ("b", 2)))],
        ),
        ([("a", 0, 4), ("a", 1, 3)], 2, [((("a", 0),), (("a", 1),))]),
        ([("a", 0, 4)], 3, [((("a", 0),), (), ())]),
    ],
    ids=["balanced", "a single micro-batch is split", "a single rollout leaves ranks idle"],
)
def test_packing_worked_examples(
    rollouts: list[tuple[str, int, int]], dp_size: int, rounds: list[Round]
):
    assert pack_rollouts(rollouts, dp_size=dp_size, micro_batch_tokens=20) == rounds


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


def test_streamed_packing_waits_for_a_full_micro_batch_per_rank():
    packer = MicroBatchPacker(dp_size=2, micro_batch_tokens=20)
    packer.add_group("a", [10, 10, 10])
    assert packer.take_rounds(final=False) == []
    packer.add_group("b", [10])
    assert packer.take_rounds(final=False) == [((("a", 0), ("a", 1)), (("a", 2), ("b", 0)))]
    assert packer.take_rounds(final=False) == []


def test_rollout_over_the_token_budget_raises():
    message = "rollout 1 of 3:7:0 has 21 tokens; a micro-batch holds 20"
    with pytest.raises(ValueError, match=message):
        MicroBatchPacker(dp_size=1, micro_batch_tokens=20).add_group("3:7:0", [20, 21])
