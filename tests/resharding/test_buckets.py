"""Rounds: every element once, none larger than a bucket, and nothing to fill one up."""

from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from streamrl.resharding.boxes import Box, total, union_numel
from streamrl.resharding.buckets import copy_rounds, gather_rounds
from streamrl.resharding.plans import Copy, Gift

SIZES = {"wide": 8, "plain": 4, "narrow": 2, "bytes": 1}


@st.composite
def gifts(draw: st.DrawFn) -> list[Gift]:
    """Some boxes, of different tensors."""
    found = []
    for tensor in draw(st.lists(st.sampled_from(sorted(SIZES)), unique=True)):
        shape = draw(st.lists(st.integers(1, 4), max_size=3))
        start = [draw(st.integers(0, 3)) for _ in shape]
        stop = [low + size for low, size in zip(start, shape, strict=True)]
        found.append((tensor, Box(tuple(start), tuple(stop))))
    return found


def num_bytes(some: Iterable[Gift]) -> int:
    return sum(box.numel * SIZES[tensor] for tensor, box in some)


def check_cut(whole: list[Gift], parts: list[Gift]) -> None:
    """The parts are the whole, every element once."""
    for tensor, box in whole:
        mine = [part for name, part in parts if name == tensor]
        assert total(mine) == union_numel(mine) == union_numel([*mine, box]) == box.numel
    assert num_bytes(parts) == num_bytes(whole)


@given(st.lists(gifts(), min_size=1, max_size=4), st.integers(0, 100))
def test_a_gather_gives_every_element_once_in_rounds_within_a_bucket(
    gives: list[list[Gift]], more: int
) -> None:
    bucket = 8 * len(gives) + more
    rounds = gather_rounds(gives, SIZES, bucket)
    for index, whole in enumerate(gives):
        check_cut(whole, [gift for step in rounds for gift in step.gives[index]])
    evens = [step.is_even for step in rounds]
    assert evens == sorted(evens, reverse=True), "even ones first"
    even_bytes = sum(step.sizes[0] for step in rounds if step.is_even)
    assert even_bytes == min(map(num_bytes, gives)) // 8 * 8
    for step in rounds:
        assert 0 < sum(step.sizes) <= bucket
        assert list(step.sizes) == [num_bytes(parcel) for parcel in step.gives]
        assert len(set(step.sizes)) == 1 or not step.is_even
        check_places(step.gives, step.starts)


def check_places(gives: Iterable[tuple[Gift, ...]], starts: Iterable[int]) -> None:
    """No parcel reaches into the next one, and every element lies where it can be viewed."""
    end = 0
    for parcel, start in zip(gives, starts, strict=True):
        assert start >= end
        end = start
        for tensor, box in parcel:
            assert end % SIZES[tensor] == 0
            end += box.numel * SIZES[tensor]


def test_a_gather_of_equal_shares_is_even_to_the_end() -> None:
    gives = [[("plain", Box((rank, 0), (rank + 1, 10)))] for rank in range(3)]
    rounds = gather_rounds(gives, {"plain": 4}, 3 * 16)
    assert [step.sizes for step in rounds] == [(16,) * 3, (16,) * 3, (8,) * 3]
    assert all(step.is_even for step in rounds)
    gives[1] = [("plain", Box((1, 0), (2, 7)))]
    rounds = gather_rounds(gives, {"plain": 4}, 3 * 16)
    assert [step.sizes for step in rounds] == [(16,) * 3, (12,) * 3, (12, 0, 12)]
    assert [step.is_even for step in rounds] == [True, True, False]


@given(
    st.lists(st.tuples(gifts(), st.integers(0, 3), st.integers(0, 3)), max_size=4),
    st.integers(8, 100),
)
def test_copies_go_once_in_rounds_within_a_bucket(
    some: list[tuple[list[Gift], int, int]], bucket: int
) -> None:
    for whole, source, destination in some:
        copies = [Copy(gift, source, destination) for gift in whole]
        rounds = copy_rounds(copies, SIZES, bucket)
        parts = [copy.gift for copies in rounds for copy in copies]
        check_cut([] if source == destination else whole, parts)
    every = [Copy(gift, source, to) for whole, source, to in some for gift in whole]
    for copies in copy_rounds(every, SIZES, bucket):
        sent: Counter[tuple[str, int]] = Counter()
        for copy in copies:
            sent["from", copy.source] += num_bytes([copy.gift])
            sent["to", copy.destination] += num_bytes([copy.gift])
        assert max(sent.values()) <= bucket
