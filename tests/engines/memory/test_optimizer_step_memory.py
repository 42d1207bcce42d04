"""Transient memory of gradient reduction and updates, as sums a person can check."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.engines.memory.training_memory import TransientMemory, estimate_transient_memory
from streamrl.engines.trainer_config import TrainerConfig

MB = 1_000_000
#: A model of 200 M elements, four buckets, with a parameter of 10 M.
TRAINED, LARGEST = 200 * MB, 10 * MB


def estimate_memory(*, on_gpu: bool = False, **settings: Any) -> TransientMemory:
    trainer = TrainerConfig(**{"dtype": "float32", **settings})
    itemsize = 2 if trainer.dtype == "bfloat16" else 4
    return estimate_transient_memory(
        trainer, trained=TRAINED, largest=LARGEST, itemsize=itemsize, on_gpu=on_gpu
    )


def test_torch_adamw_takes_roots_of_one_parameter_on_a_cpu_and_of_all_on_a_gpu():
    assert estimate_memory(backend="torch") == TransientMemory(update=2 * 4 * LARGEST)
    assert estimate_memory(backend="torch", on_gpu=True) == TransientMemory(update=4 * TRAINED)
    assert estimate_memory(zero_stage=0, world_size=2) == estimate_memory(backend="torch")


@pytest.mark.parametrize(
    ("settings", "held", "backward", "update"),
    [
        # A flat tensor of all gradients, which are then freed, and two more of its size.
        ({"zero_stage": 1}, 0, 0, 1600),
        # A bucket of 200 MB and its copy.
        ({"zero_stage": 1, "world_size": 4}, 0, 0, 400),
        # The bucket exists from the first backward pass on; a GPU only needs the square roots.
        ({"zero_stage": 1, "on_gpu": True}, 200, 0, 800),
        # And a new shard of 200 MB, which is added to the accumulated one.
        ({"zero_stage": 2, "world_size": 4}, 0, 600, 400),
        ({"zero_stage": 3, "world_size": 4}, 200, 200, 600),
        ({"zero_stage": 3, "world_size": 4, "on_gpu": True}, 200, 200, 400),
    ],
)
def test_zero_reduces_in_buckets_and_updates_a_flat_tensor(
    settings: dict[str, Any], held: int, backward: int, update: int
):
    assert estimate_memory(**settings) == TransientMemory(held * MB, backward * MB, update * MB)


def test_zero_1_in_bfloat16_keeps_gradients_twice_and_no_bucket():
    memory = estimate_memory(zero_stage=1, world_size=2, dtype="bfloat16")
    assert memory == TransientMemory(between_micro_batches=2 * TRAINED, update=4 * TRAINED)
    assert estimate_memory(zero_stage=3, dtype="bfloat16").between_micro_batches == 100 * MB


@given(
    stage=st.integers(0, 3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    trained=st.integers(1, 10**10),
    world_size=st.integers(1, 64),
    on_gpu=st.booleans(),
)
def test_more_ranks_never_need_more_memory_each(
    stage: int, dtype: str, trained: int, world_size: int, on_gpu: bool
):
    dtype = dtype if stage else "float32"
    few, many = (
        estimate_transient_memory(
            TrainerConfig(zero_stage=stage, dtype=dtype, world_size=size),
            trained=trained,
            largest=trained,
            itemsize=2 if dtype == "bfloat16" else 4,
            on_gpu=on_gpu,
        )
        for size in (world_size, world_size + 1)
    )
    for name, size in vars(many).items():
        assert 0 <= size <= vars(few)[name]
