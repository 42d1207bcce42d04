"""Analytic model of a rank's transient memory for gradient reduction and the optimizer step.

Describes DeepSpeed 0.19 and torch's AdamW as implemented. A reduce bucket is DeepSpeed's buffer of
gradients that are reduced together.
"""

from dataclasses import dataclass

import torch

from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.trainer_config import BUCKET_ELEMENTS, PARAMETER_SHARDING_STAGE, TrainerConfig

FLOAT32_BYTES = 4
ZERO0_REDUCE_ELEMENTS = 500_000_000
"""Elements that DeepSpeed reduces at a time in stage 0; a constant of DeepSpeed."""
ZERO3_SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's default sub_group_size of stage 3: elements per optimizer call."""


@dataclass(frozen=True)
class TransientMemory:
    """Bytes that training needs for some time on top of weights, gradients and optimizer state.

    between_micro_batches: during the whole training step. backward: additionally in a backward
    pass. update: additionally in an optimizer update.
    """

    between_micro_batches: int = 0
    backward: int = 0
    update: int = 0


def estimate_transient_memory(
    trainer: TrainerConfig, *, trained: int, largest: int, on_gpu: bool
) -> TransientMemory:
    """Estimate the transient memory of a rank for gradient reduction and the optimizer step.

    `trained` counts the trained elements: with DeepSpeed of the whole model, with backend torch of
    the rank's shard. `largest` counts the elements of the largest parameter.
    """
    # AdamW's square roots of second moments: of all parameters at once on a GPU (foreach); on a CPU
    # of a single parameter, plus the quotient in new memory.
    roots = (trained if on_gpu else 2 * largest) * FLOAT32_BYTES
    if trainer.backend != "deepspeed":
        return TransientMemory(update=roots)
    reduced = min(trained, ZERO0_REDUCE_ELEMENTS) * FLOAT32_BYTES
    if trainer.zero_stage == 0:
        return TransientMemory(update=max(reduced, roots))
    if trainer.zero_stage == 1 and resolve_trainer_dtype(trainer) is torch.bfloat16:
        # BF16_Optimizer keeps the bfloat16 gradients besides float32 ones and uses no buckets.
        roots = _estimate_adamw_bytes(-(-trained // trainer.world_size), on_gpu=on_gpu)
        return TransientMemory(
            between_micro_batches=trained * resolve_trainer_dtype(trainer).itemsize,
            update=max(reduced, roots),
        )
    return _estimate_bucket_memory(trainer, trained, on_gpu=on_gpu)


def _estimate_adamw_bytes(elements: int, *, on_gpu: bool) -> int:
    """Estimate the bytes of AdamW's temporaries for a flat ZeRO parameter."""
    return (1 if on_gpu else 2) * elements * FLOAT32_BYTES


def _estimate_bucket_memory(
    trainer: TrainerConfig, trained: int, *, on_gpu: bool
) -> TransientMemory:
    """Estimate the transient memory of the ZeRO stages that reduce gradients in buckets.

    These are stage 1 in float32, 2 and 3. Reduction copies the bucket. For the update, a rank's
    gradients are copied into a flat tensor.
    """
    itemsize = resolve_trainer_dtype(trainer).itemsize
    full = min(BUCKET_ELEMENTS, trained)
    # On a CPU, untouched pages of the bucket take no memory.
    bucket = (BUCKET_ELEMENTS if on_gpu else full) * itemsize
    shard = -(-trained // trainer.world_size)
    flat = shard * FLOAT32_BYTES
    if trainer.zero_stage == PARAMETER_SHARDING_STAGE:
        updated = min(shard, ZERO3_SUB_GROUP_ELEMENTS)
        update = updated * FLOAT32_BYTES + _estimate_adamw_bytes(updated, on_gpu=on_gpu)
        return TransientMemory(
            between_micro_batches=bucket, backward=full * itemsize, update=update
        )
    # Gradients are freed after the copy into the flat tensor, before AdamW runs.
    gradients = (trained if trainer.zero_stage == 1 else shard) * FLOAT32_BYTES
    update = max(flat, flat + _estimate_adamw_bytes(shard, on_gpu=on_gpu) - gradients)
    last = min(full, trained - full)
    if trainer.zero_stage == 1:
        # Gradients pass through the bucket into the rank's shard. The bucket exists from the first
        # backward pass of a step on.
        persistent = bucket if on_gpu else 0
        return TransientMemory(
            between_micro_batches=persistent,
            update=max(update, bucket + last * itemsize - persistent),
        )
    # The rank's shard of new gradients is allocated first, then added to the accumulated one.
    backward = bucket + max(full * itemsize, last * itemsize + shard * itemsize)
    return TransientMemory(backward=backward, update=update)
