"""What a rank holds for a while, to reduce gradients and to update, by arithmetic.

Of DeepSpeed and torch's AdamW as they are; a bucket is DeepSpeed's, and holds gradients that are
reduced together.
"""

from dataclasses import dataclass

import torch

from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.trainer_config import BUCKET_ELEMENTS, PARAMETER_SHARDING_STAGE, TrainerConfig

FLOAT32_BYTES = 4
ZERO0_REDUCE_ELEMENTS = 500_000_000
"""Elements, of ZeRO's stage 0."""
ZERO3_SUB_GROUP_ELEMENTS = 1_000_000_000
"""Elements, of ZeRO's stage 3."""


@dataclass(frozen=True)
class TransientMemory:
    """Bytes that come on top of weights, gradients and the optimizer's state.

    held: from micro-batch to micro-batch. backward: of a backward pass alone. update: of an update
    alone.
    """

    between_micro_batches: int = 0
    backward: int = 0
    update: int = 0


def estimate_transient_memory(
    trainer: TrainerConfig, *, trained: int, largest: int, on_gpu: bool
) -> TransientMemory:
    """Of a rank that trains so many elements, of which the largest parameter it keeps has some.

    Before ZeRO divides them: `trained` are those of the whole model, with backend torch those that
    the rank keeps.
    """
    # On a GPU AdamW takes the roots of all second moments at once, on a CPU of one parameter's, and
    # divides them into new memory.
    roots = (trained if on_gpu else 2 * largest) * FLOAT32_BYTES
    if trainer.backend != "deepspeed":
        return TransientMemory(update=roots)
    reduced = min(trained, ZERO0_REDUCE_ELEMENTS) * FLOAT32_BYTES
    if trainer.zero_stage == 0:
        return TransientMemory(update=max(reduced, roots))
    if trainer.zero_stage == 1 and resolve_trainer_dtype(trainer) is torch.bfloat16:
        # Gradients are there as they were computed, too; they are reduced without buckets.
        roots = _estimate_adamw_bytes(-(-trained // trainer.world_size), on_gpu=on_gpu)
        return TransientMemory(
            between_micro_batches=trained * resolve_trainer_dtype(trainer).itemsize,
            update=max(reduced, roots),
        )
    return _estimate_bucket_memory(trainer, trained, on_gpu=on_gpu)


def _estimate_adamw_bytes(elements: int, *, on_gpu: bool) -> int:
    """Of AdamW for what ZeRO updates as one parameter, in bytes."""
    return (1 if on_gpu else 2) * elements * FLOAT32_BYTES


def _estimate_bucket_memory(
    trainer: TrainerConfig, trained: int, *, on_gpu: bool
) -> TransientMemory:
    """A bucket is reduced in a copy. For the update a rank's gradients are put into one tensor."""
    itemsize = resolve_trainer_dtype(trainer).itemsize
    full = min(BUCKET_ELEMENTS, trained)
    # What a CPU has not written to yet takes no memory.
    bucket = (BUCKET_ELEMENTS if on_gpu else full) * itemsize
    share = -(-trained // trainer.world_size)
    flat = share * FLOAT32_BYTES
    if trainer.zero_stage == PARAMETER_SHARDING_STAGE:
        updated = min(share, ZERO3_SUB_GROUP_ELEMENTS)
        update = updated * FLOAT32_BYTES + _estimate_adamw_bytes(updated, on_gpu=on_gpu)
        return TransientMemory(
            between_micro_batches=bucket, backward=full * itemsize, update=update
        )
    # The gradients are freed once they are in that tensor, before AdamW begins.
    gradients = (trained if trainer.zero_stage == 1 else share) * FLOAT32_BYTES
    update = max(flat, flat + _estimate_adamw_bytes(share, on_gpu=on_gpu) - gradients)
    last = min(full, trained - full)
    if trainer.zero_stage == 1:
        # Gradients move into the bucket, and out of it into a rank's part. It is there from the
        # first backward pass of a step on.
        held = bucket if on_gpu else 0
        return TransientMemory(
            between_micro_batches=held, update=max(update, bucket + last * itemsize - held)
        )
    # A rank's part is made anew, and then added to what there was.
    backward = bucket + max(full * itemsize, last * itemsize + share * itemsize)
    return TransientMemory(backward=backward, update=update)
