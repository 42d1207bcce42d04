"""Small models to lay out: one that divides evenly, and one as models are; and grids for them."""

from hypothesis import strategies as st

from streamrl.resharding.grids import RankGrid
from streamrl.resharding.tensor_specs import FusedComponent, ModelSpec, TensorSpec

GRIDS = st.builds(
    RankGrid,
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from(["hf", "mcore"]),
)


def even(num_places: int, size: int = 16) -> ModelSpec:
    """In every place one matrix split by rows and one split by columns."""
    return ModelSpec(
        tuple(
            TensorSpec(f"{place}.{kind}", (size, size), (place,), dim)
            for place in range(num_places)
            for dim, kind in enumerate(("rows", "columns"))
        ),
        num_places,
    )


def transformer(
    *, layers: int = 3, heads: int = 4, kv_heads: int = 2, tied: bool = True
) -> ModelSpec:
    """A transformer with fused qkv and gate_up, norms that nobody splits, and a tied embedding."""
    width, head, inner, words = 8, 2, 24, 12
    last = layers + 1
    tensors = [TensorSpec("embed", (words, width), (0, last) if tied else (0,), 0)]
    for place in range(1, last):
        kv = FusedComponent(kv_heads * head, kv_heads)
        qkv = (FusedComponent(heads * head, heads), kv, kv)
        gate_up = (FusedComponent(inner), FusedComponent(inner))
        tensors += [
            TensorSpec(f"{place}.norm", (width,), (place,)),
            TensorSpec(f"{place}.qkv", ((heads + 2 * kv_heads) * head, width), (place,), 0, qkv),
            TensorSpec(f"{place}.o", (width, heads * head), (place,), 1, (qkv[0],)),
            TensorSpec(f"{place}.gate_up", (2 * inner, width), (place,), 0, gate_up),
            TensorSpec(f"{place}.down", (width, inner), (place,), 1),
        ]
    tensors.append(TensorSpec("norm", (width,), (last,)))
    if not tied:
        tensors.append(TensorSpec("head", (words, width), (last,), 0))
    return ModelSpec(tuple(tensors), last + 1)
