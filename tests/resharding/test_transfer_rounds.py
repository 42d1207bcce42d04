"""Rounds contain every element once, fit into a bucket, and have no padding."""

from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from streamrl.resharding.boxes import TensorBox, count_elements
from streamrl.resharding.executors import plan_copy_rounds, plan_gather_rounds
from streamrl.resharding.plans import BoxCopy, NamedBox
from tests.resharding.models import count_union_elements

SIZES = {"wide": 8, "plain": 4, "narrow": 2, "bytes": 1}


@st.composite
def named_boxes(draw: st.DrawFn) -> list[NamedBox]:
    """Draw boxes of different tensors."""
    boxes_drawn = []
    for tensor in draw(st.lists(st.sampled_from(sorted(SIZES)), unique=True)):
        shape = draw(st.lists(st.integers(1, 4), max_size=3))
        start = [draw(st.integers(0, 3)) for _ in shape]
        stop = [low + size for low, size in zip(start, shape, strict=True)]
        boxes_drawn.append((tensor, TensorBox(tuple(start), tuple(stop))))
    return boxes_drawn


def num_bytes(named: Iterable[NamedBox]) -> int:
    return sum(box.numel * SIZES[tensor] for tensor, box in named)


def assert_partition(expected: list[NamedBox], parts: list[NamedBox]) -> None:
    """Assert that the parts contain every element of the whole exactly once."""
    for tensor, box in expected:
        tensor_boxes = [part for name, part in parts if name == tensor]
        assert (
            count_elements(tensor_boxes)
            == count_union_elements(tensor_boxes)
            == count_union_elements([*tensor_boxes, box])
            == box.numel
        )
    assert num_bytes(parts) == num_bytes(expected)


@given(st.lists(named_boxes(), min_size=1, max_size=4), st.integers(0, 100))
def test_gather_rounds_send_every_element_once_within_a_bucket(
    contributions: list[list[NamedBox]], extra_bytes: int
):
    bucket = 8 * len(contributions) + extra_bytes
    rounds = plan_gather_rounds(contributions, SIZES, bucket)
    for index, contribution in enumerate(contributions):
        assert_partition(
            contribution, [named_box for step in rounds for named_box in step.contributions[index]]
        )
    evens = [step.is_even for step in rounds]
    assert evens == sorted(evens, reverse=True), "even ones first"
    even_bytes = sum(step.contribution_bytes[0] for step in rounds if step.is_even)
    assert even_bytes == min(map(num_bytes, contributions)) // 8 * 8
    for step in rounds:
        assert 0 < sum(step.contribution_bytes) <= bucket
        assert list(step.contribution_bytes) == [num_bytes(boxes) for boxes in step.contributions]
        assert len(set(step.contribution_bytes)) == 1 or not step.is_even
        assert_aligned(step.contributions, step.buffer_offsets)


def assert_aligned(contributions: Iterable[tuple[NamedBox, ...]], starts: Iterable[int]) -> None:
    """Assert that contributions do not overlap and that every element is aligned."""
    end = 0
    for contribution, start in zip(contributions, starts, strict=True):
        assert start >= end
        end = start
        for tensor, box in contribution:
            assert end % SIZES[tensor] == 0
            end += box.numel * SIZES[tensor]


@given(
    st.lists(st.tuples(named_boxes(), st.integers(0, 3), st.integers(0, 3)), max_size=4),
    st.integers(8, 100),
)
def test_copy_rounds_send_every_element_once_within_a_bucket(
    transfers: list[tuple[list[NamedBox], int, int]], bucket: int
):
    for boxes, source, destination in transfers:
        copies = [BoxCopy(named_box, source, destination) for named_box in boxes]
        rounds = plan_copy_rounds(copies, SIZES, bucket)
        parts = [copy.named_box for copies in rounds for copy in copies]
        assert_partition([] if source == destination else boxes, parts)
    all_copies = [
        BoxCopy(named_box, source, receiver)
        for boxes, source, receiver in transfers
        for named_box in boxes
    ]
    for copies in plan_copy_rounds(all_copies, SIZES, bucket):
        sent: Counter[tuple[str, int]] = Counter()
        for copy in copies:
            sent["from", copy.source] += num_bytes([copy.named_box])
            sent["to", copy.destination] += num_bytes([copy.named_box])
        assert max(sent.values()) <= bucket
