"""Plans from trainers of 8 to 128 ranks, FSDP2 over tensor parallelism or ZeRO-3, to vLLM's layout.

The model has two layers of the width of Llama 70B.
"""

import pytest

from streamrl.resharding.boxes import TensorBox, count_elements
from streamrl.resharding.grids import RankAssignment, RankGrid
from streamrl.resharding.layouts import ModelLayout, create_layout, partition_fsdp2, partition_zero3
from streamrl.resharding.plans import CopyPlan, NodeTopology, plan_copies
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec
from tests.resharding.models import count_union_elements

COLUMN_PARALLEL = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")
VOCABULARY_PARALLEL = ("embed_tokens", "lm_head")
HIDDEN, INNER, KEYS, WORDS = 8192, 28672, 1024, 32000
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
}
OUTSIDE = {"embed_tokens": (WORDS, HIDDEN), "lm_head": (WORDS, HIDDEN), "norm": (HIDDEN,)}
SIZES = [(8, 1, 2), (16, 2, 4), (32, 8, 4), (64, 4, 8), (128, 8, 8), (128, 1, 8)]
"""Ranks, tensor-parallel ranks of the trainer, tensor-parallel ranks of a generator."""
ITEMSIZE = 2
CLUSTER = NodeTopology(8)


def make_model() -> ModelSpec:
    """Make the model as the trainer and vLLM split it."""
    shapes = {f"{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()} | OUTSIDE
    return ModelSpec(
        tuple(
            TensorSpec(name, shape, (0,), find_split_dim(name), itemsize=ITEMSIZE)
            for name, shape in shapes.items()
        ),
        1,
    )


def find_split_dim(name: str) -> int | None:
    layer_name = name.partition(".")[2]
    if layer_name in COLUMN_PARALLEL or name in VOCABULARY_PARALLEL:
        return 0
    return 1 if layer_name in ROW_PARALLEL else None


def assign(ranks: int, tensor_parallel: int) -> RankAssignment:
    return RankGrid(1, tensor_parallel, ranks // tensor_parallel).assign_ranks()


def make_plan(kind: str, ranks: int, trained: int, served: int) -> CopyPlan:
    seats = assign(ranks, trained)
    partition = partition_fsdp2 if kind == "fsdp2" else partition_zero3
    source = partition(create_layout(make_model(), seats), seats.list_dp_groups())
    target = create_layout(make_model(), assign(ranks, served))
    return plan_copies(source, target, CLUSTER)


def intersect(*parts: tuple[int, int], size: int) -> float:
    """Return the length of what parts (index, count) of a dimension have in common."""
    start = max(index * size / count for index, count in parts)
    return max(0.0, min((index + 1) * size / count for index, count in parts) - start)


def count_kept_bytes(rank: int, ranks: int, trained: int, served: int) -> float:
    """Count what a rank of FSDP2 holds already of what its generator needs."""
    replicas, kept = ranks // trained, 0.0
    chunk, part = rank // trained, rank % trained
    served_part = (rank % served, served)
    for spec in make_model().tensors:
        rows, *columns = spec.shape
        width = columns[0] if columns else 1
        if spec.split_dim == 0:
            own = (part * replicas + chunk, trained * replicas)
            kept += intersect(own, served_part, size=rows) * width
        elif spec.split_dim == 1:
            kept += rows / replicas * intersect((part, trained), served_part, size=width)
        else:
            kept += rows / replicas
    return kept * ITEMSIZE


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_rank_receives_what_it_serves_and_does_not_train(sizes: tuple[int, int, int]):
    plan = make_plan("fsdp2", *sizes)
    report = plan.report_bytes()
    for rank, counts in report.rank_bytes.items():
        needed = plan.target.count_bytes(rank)
        assert counts.received_bytes == needed - count_kept_bytes(rank, *sizes), rank
    sent = sum(counts.sent_bytes for counts in report.rank_bytes.values())
    assert sent == sum(counts.received_bytes for counts in report.rank_bytes.values())


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_served_element_comes_once(kind: str, sizes: tuple[int, int, int]):
    plan = make_plan(kind, *sizes)
    for rank in (0, sizes[0] // 2 - 1, sizes[0] - 1):
        for name, moves in plan.moves.items():
            needed = plan.target.get_boxes(rank, name)
            received = [box for box, _ in moves[rank]]
            assert count_elements(received) == count_elements(needed)
            assert count_union_elements([*received, *needed]) == count_elements(needed)
            assert all(is_held(plan.source, source, name, box) for box, source in moves[rank])


def is_held(layout: ModelLayout, rank: int, name: str, box: TensorBox) -> bool:
    return any(held.intersect(box) == box for held in layout.get_boxes(rank, name))
