"""Set operations of boxes keep every element exactly once."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from streamrl.resharding.boxes import TensorBox, count_elements, iter_flat_boxes, subtract_boxes
from tests.resharding.models import count_union_elements


def elements(box: TensorBox) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(low, high) for low, high in box.dim_ranges)))


@st.composite
def boxes(draw: st.DrawFn, dims: int = 3, size: int = 5) -> TensorBox:
    spans = []
    for _ in range(dims):
        low = draw(st.integers(0, size - 1))
        spans.append((low, draw(st.integers(low + 1, size))))
    return TensorBox(tuple(low for low, _ in spans), tuple(high for _, high in spans))


@given(boxes(), boxes())
def test_intersection_and_difference_partition_a_box(first_box: TensorBox, second_box: TensorBox):
    common, remainder = first_box.intersect(second_box), first_box.subtract_box(second_box)
    assert (elements(common) if common else set()) == elements(first_box) & elements(second_box)
    assert sum(box.numel for box in remainder) == len(elements(first_box) - elements(second_box))
    assert set().union(*map(elements, remainder)) == elements(first_box) - elements(second_box)


@given(st.lists(boxes(dims=2), max_size=4))
def test_subtraction_leaves_exactly_the_elements_in_no_removed_box(removed: list[TensorBox]):
    remainder = subtract_boxes([TensorBox.from_shape((5, 5))], removed)
    assert count_elements(remainder) == 25 - count_union_elements(removed)


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.data())
def test_a_flat_range_is_boxes_in_row_major_order(shape: tuple[int, ...], data: st.DataObject):
    indices = list(itertools.product(*map(range, shape)))
    start = data.draw(st.integers(0, len(indices)))
    stop = data.draw(st.integers(start, len(indices)))
    range_boxes = [sorted(elements(box)) for box in iter_flat_boxes(shape, start, stop)]
    assert list(itertools.chain(*range_boxes)) == indices[start:stop]
