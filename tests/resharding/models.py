"""Small models for layouts, their grids and stages; the elements that boxes cover."""

from collections.abc import Iterable

from hypothesis import strategies as st

from streamrl.resharding.boxes import TensorBox, count_elements, subtract_boxes
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.layouts import ModelLayout
from streamrl.resharding.tensor_specs import FusedComponent, ModelSpec, TensorSpec

GRIDS = st.builds(
    RankGrid,
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from(["hf", "mcore"]),
)


def even(num_places: int, size: int = 16) -> ModelSpec:
    """Return a model with a row-split and a column-split matrix at every pipeline position."""
    return ModelSpec(
        tuple(
            TensorSpec(f"{position}.{kind}", (size, size), (position,), dim)
            for position in range(num_places)
            for dim, kind in enumerate(("rows", "columns"))
        ),
        num_places,
    )


def transformer(
    *, layers: int = 3, heads: int = 4, kv_heads: int = 2, tied: bool = True
) -> ModelSpec:
    """Return a transformer with fused qkv and gate_up, unsplit norms and a tied embedding."""
    width, head, inner, words = 8, 2, 24, 12
    head_position = layers + 1
    tensors = [TensorSpec("embed", (words, width), (0, head_position) if tied else (0,), 0)]
    for position in range(1, head_position):
        kv = FusedComponent(kv_heads * head, kv_heads)
        qkv = (FusedComponent(heads * head, heads), kv, kv)
        gate_up = (FusedComponent(inner), FusedComponent(inner))
        tensors += [
            TensorSpec(f"{position}.norm", (width,), (position,)),
            TensorSpec(
                f"{position}.qkv", ((heads + 2 * kv_heads) * head, width), (position,), 0, qkv
            ),
            TensorSpec(f"{position}.o", (width, heads * head), (position,), 1, (qkv[0],)),
            TensorSpec(f"{position}.gate_up", (2 * inner, width), (position,), 0, gate_up),
            TensorSpec(f"{position}.down", (width, inner), (position,), 1),
        ]
    tensors.append(TensorSpec("norm", (width,), (head_position,)))
    if not tied:
        tensors.append(TensorSpec("head", (words, width), (head_position,), 0))
    return ModelSpec(tuple(tensors), head_position + 1)


def shift_ranks(layout: ModelLayout, first: int) -> ModelLayout:
    """Return the layout on ranks from `first` on."""
    return ModelLayout(layout.model, {first + rank: s for rank, s in layout.shards.items()})


def count_union_elements(boxes: Iterable[TensorBox]) -> int:
    """Return the number of elements in at least one of the boxes, which may overlap."""
    disjoint: list[TensorBox] = []
    for box in boxes:
        disjoint.extend(subtract_boxes([box], disjoint))
    return count_elements(disjoint)
