"""Analytic memory model of a trainer rank and a generator in its process, from model sizes.

Workers and preflight make the sizes from the model itself, the planner from a `ModelShape`. The
transient memory of gradient reduction and the optimizer step is that of DeepSpeed 0.19 and torch's
AdamW as implemented. A reduce bucket is DeepSpeed's buffer of gradients that are reduced together.
Does not import torch, which the planner does without.
"""

from dataclasses import dataclass, replace

from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.memory.worker_memory import (
    CUDA_CONTEXT_BYTES,
    MIB,
    NCCL_GROUP_BYTES,
    WorkerMemory,
)
from streamrl.engines.trainer_config import (
    BUCKET_ELEMENTS,
    HEAD_CHUNK_TOKENS,
    LIVE_ELEMENTS,
    OFFLOAD,
    PARAMETER_SHARDING_STAGE,
    TrainerConfig,
)

LAYER_VALUES_PER_TOKEN = 17
"""Activations per layer and token, in units of the hidden size: arXiv 2205.05198 without the
attention scores. A layer whose MLP computes in chunks has no more."""
GATED_LAYER_VALUES = (11, 4)
"""The same of a layer with RMSNorm and a gated MLP, in units of the hidden size and of the MLP's
intermediate size: float32 copies in the norms; gate, its activation, up and their product. On a GPU
1.5 B parameters take 10.6 hidden sizes besides the latter."""
FLOAT32_BYTES = 4
DTYPE_BYTES = {"float32": FLOAT32_BYTES, "bfloat16": 2, "float16": 2}
VLLM_VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it."""
REDUCE_ELEMENTS = 500_000_000
"""Elements that DeepSpeed's BF16_Optimizer reduces at a time; a constant of DeepSpeed."""
ZERO3_SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's default sub_group_size of stage 3: elements per optimizer call."""
MOMENT_BYTES = 2 * FLOAT32_BYTES
"""AdamW's two float32 moments, bytes per trained element."""
LOGIT_VALUES_PER_TOKEN = 5
"""Vocabulary-sized float32 vectors per token of a chunk through the head: logits in the model's
dtype, logits over temperature, and temporaries of softmax, entropy and gradient."""


@dataclass(frozen=True)
class TrainingSizes:
    """Sizes of a trained model that decide on the memory of a rank, in elements.

    params, base_params: parameters of the whole model with and without LoRA adapters.
    trained: those that are trained.
    split_params: those that tensor-parallel ranks split. strided_params: those of them that are cut
      along another axis than the first. vocabulary_params: those of them in embedding and head.
    Of a tensor-parallel rank, before ZeRO or FSDP2 shard anything further:
    rank_params: all parameters. layer_params: those of the largest layer. root_params: those
      outside of layers. largest_param: the largest one.
    mlp_width: columns of a token's MLP, of all experts that the token passes through.
    head_rows: rows of the output head.
    has_chunked_mlps: whether the MLPs of all layers compute in chunks if layers are checkpointed.
    has_experts: whether tokens pass through some of a layer's experts.
    itemsize: bytes of a weight.
    """

    params: int
    base_params: int
    trained: int
    split_params: int
    strided_params: int
    vocabulary_params: int
    rank_params: int
    layer_params: int
    root_params: int
    largest_param: int
    layers: int
    hidden: int
    mlp_width: int
    head_rows: int
    has_chunked_mlps: bool
    has_experts: bool
    itemsize: int


def estimate_rank_memory(
    sizes: TrainingSizes,
    trainer: TrainerConfig,
    generator: GeneratorConfig | None = None,
    *,
    tokens: int,
    on_gpu: bool,
) -> WorkerMemory:
    """Estimate the memory of a trainer rank, with a generator in its process if given.

    tokens: of a micro-batch on the rank. On a GPU, generator.kv_cache_mb must be set, or the KV
    cache counts as empty.
    """
    itemsize = sizes.itemsize
    local, gathered = _count_local_params(sizes, trainer)
    trained, largest = sizes.trained, sizes.largest_param
    is_sharded = trainer.has_sharded_params and trainer.zero_stage == PARAMETER_SHARDING_STAGE
    if is_sharded:
        largest = -(-largest // trainer.fsdp_size)
    if trainer.backend == "torch":
        # The optimizer updates the rank's shard only.
        trained = trained * local // sizes.params
    optimizer, gradients = _estimate_state_bytes(trainer, trained, itemsize)
    transient = estimate_transient_memory(
        trainer,
        trained=trained,
        largest=min(trained, largest),
        itemsize=itemsize,
        on_gpu=on_gpu,
    )
    if trainer.offload_optimizer and on_gpu:
        optimizer, update = 0, 0
        if trainer.zero_stage < PARAMETER_SHARDING_STAGE:
            # As measured: gradients leave in the backward pass, and an update holds two float32
            # copies of the rank's shard, and the new weights.
            gradients, update = 0, 2 * FLOAT32_BYTES * -(-trained // trainer.world_size)
            update += trained * itemsize
        transient = replace(transient, update=update)
    activations = tokens * itemsize * _count_token_values(sizes, trainer, on_gpu=on_gpu)
    activations += _estimate_head_bytes(sizes, trainer, tokens)
    served, gathered_experts, kv_cache = 0, 0, 0
    if generator is not None:
        served = _count_copied_params(sizes, trainer, generator, on_gpu=on_gpu)
        served *= DTYPE_BYTES[generator.resolve_dtype(on_gpu=on_gpu)]
        # vLLM stores experts in a layout of its own: a version is gathered whole, then loaded.
        if trainer.has_sharded_params and sizes.has_experts:
            gathered_experts = sizes.base_params * itemsize
        kv_cache = (generator.resolve_kv_cache_mb(on_gpu=on_gpu) or 0) * MIB
    return WorkerMemory(
        weights=local * itemsize,
        serving_weights=served,
        optimizer=optimizer,
        gradients=gradients + transient.between_micro_batches,
        activations=activations + gathered * itemsize + transient.backward,
        update_buffers=max(transient.update, gathered_experts),
        kv_cache=kv_cache,
        libraries=estimate_library_bytes(trainer) * on_gpu,
    )


def estimate_library_bytes(trainer: TrainerConfig) -> int:
    """Estimate the GPU memory of a trainer rank that holds no tensor: CUDA's context and NCCL.

    A rank is in a group of all ranks, and in one of each kind that has several.
    """
    sizes = (
        trainer.world_size,
        trainer.fsdp_size,
        trainer.tensor_parallel,
        trainer.sequence_parallel,
    )
    return CUDA_CONTEXT_BYTES + NCCL_GROUP_BYTES * sum(size > 1 for size in sizes)


def has_shared_weights(trainer: TrainerConfig, generator: GeneratorConfig, *, on_gpu: bool) -> bool:
    """Return whether a generator reads weights of the trainer in its process in place.

    Under tensor parallelism these are the weights that both split alike; else all weights.
    """
    is_deepspeed, is_fsdp = trainer.backend == "deepspeed", trainer.fsdp_size > 1
    is_sharded = trainer.zero_stage == PARAMETER_SHARDING_STAGE and (is_deepspeed or is_fsdp)
    dtypes = {config.resolve_dtype(on_gpu=on_gpu) for config in (trainer, generator)}
    is_split_finer = bool(trainer.tensor_parallel % generator.tensor_parallel)
    differs = is_sharded or is_split_finer or len(dtypes) > 1 or trainer.lora_rank > 0
    return not (on_gpu or differs)


def _count_copied_params(
    sizes: TrainingSizes, trainer: TrainerConfig, generator: GeneratorConfig, *, on_gpu: bool
) -> int:
    """Count the elements that a generator in the trainer's process holds in memory of its own."""
    size, generator_size = trainer.tensor_parallel, generator.tensor_parallel
    # Ignores that norms are replicated on every rank; they are negligible.
    served = sizes.base_params // generator_size
    if not has_shared_weights(trainer, generator, on_gpu=on_gpu):
        return served
    # If the generator's shard is larger than the trainer's, the columns of a row-parallel matrix
    # are strided in the generator's, so these matrices cannot be aliased.
    strided = sizes.strided_params if size != generator_size else 0
    aliased = (sizes.split_params - strided) // size
    if generator_size == 1:
        # Parameters that training does not split are served unsplit, too.
        return served - aliased - (sizes.params - sizes.split_params)
    has_padding = bool(sizes.head_rows * size % VLLM_VOCABULARY_MULTIPLE)
    return served - aliased + sizes.vocabulary_params // size * has_padding


def _count_local_params(sizes: TrainingSizes, trainer: TrainerConfig) -> tuple[int, int]:
    """Count the parameter elements in a rank's memory.

    Returns the elements of the rank's own shard, and the elements of gathered parameters that a
    forward pass needs in addition at the same time.
    """
    if not trainer.has_sharded_params:
        return sizes.params, 0
    if trainer.backend != "torch":
        return sizes.params // trainer.world_size, min(sizes.params, LIVE_ELEMENTS)
    if trainer.zero_stage != PARAMETER_SHARDING_STAGE or trainer.fsdp_size == 1:
        return sizes.rank_params, 0
    # FSDP2 keeps the root's parameters gathered for a whole pass and prefetches a layer while the
    # previous computes; a layer's gradient is reduced in a copy. So count four layers and the root.
    return sizes.rank_params // trainer.fsdp_size, sizes.root_params + 4 * sizes.layer_params


def _estimate_state_bytes(trainer: TrainerConfig, trained: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of a rank's optimizer state and the bytes of the rank's gradients.

    From ZeRO stage 1 on, the optimizer state includes float32 master weights. So does that of
    backend torch in bfloat16; with FSDP2 they take the place of the weights.
    """
    if trainer.backend != "deepspeed" or trainer.zero_stage == 0:
        is_fsdp = trainer.zero_stage == PARAMETER_SHARDING_STAGE and trainer.fsdp_size > 1
        master = 0 if itemsize == FLOAT32_BYTES else FLOAT32_BYTES - itemsize * is_fsdp
        return trained * (MOMENT_BYTES + master), trained * FLOAT32_BYTES
    shard = -(-trained // trainer.world_size)
    return shard * (MOMENT_BYTES + FLOAT32_BYTES), (
        trained if trainer.zero_stage == 1 else shard
    ) * FLOAT32_BYTES


def _count_token_values(sizes: TrainingSizes, trainer: TrainerConfig, *, on_gpu: bool) -> int:
    """Return the activations of all layers that the backward pass needs, elements per token."""
    per_hidden, per_column = GATED_LAYER_VALUES
    layer = max(
        LAYER_VALUES_PER_TOKEN * sizes.hidden,
        per_hidden * sizes.hidden + per_column * sizes.mlp_width,
    )
    if not trainer.gradient_checkpointing:
        return sizes.layers * layer
    if sizes.has_chunked_mlps:
        layer = LAYER_VALUES_PER_TOKEN * sizes.hidden
    has_offload = on_gpu and trainer.gradient_checkpointing == OFFLOAD
    return layer + sizes.hidden * sizes.layers * (not has_offload)


def _estimate_head_bytes(sizes: TrainingSizes, trainer: TrainerConfig, tokens: int) -> int:
    """Estimate the memory of a chunk through the head, and of the head's gradient.

    The gradient is summed over chunks in float32, and added or returned in the model's dtype.
    """
    chunk = min(tokens, HEAD_CHUNK_TOKENS) * LOGIT_VALUES_PER_TOKEN * FLOAT32_BYTES
    has_gradient = tokens > 0 and not trainer.lora_rank
    gradient = sizes.hidden * (FLOAT32_BYTES + sizes.itemsize) * has_gradient
    return sizes.head_rows * (chunk + gradient)


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
    trainer: TrainerConfig, *, trained: int, largest: int, itemsize: int, on_gpu: bool
) -> TransientMemory:
    """Estimate the transient memory of a rank for gradient reduction and the optimizer step.

    `trained` counts the trained elements: with DeepSpeed of the whole model, with backend torch of
    the rank's shard. `largest` counts the elements of the largest parameter. `itemsize` is that of
    the weights.
    """
    # AdamW's square roots of second moments: of all parameters at once on a GPU (foreach); on a CPU
    # of a single parameter, plus the quotient in new memory.
    roots = (trained if on_gpu else 2 * largest) * FLOAT32_BYTES
    if trainer.backend != "deepspeed" or trainer.zero_stage == 0:
        return TransientMemory(update=roots)
    is_float32 = itemsize == FLOAT32_BYTES
    if trainer.zero_stage == 1 and not is_float32 and not trainer.offload_optimizer:
        # BF16_Optimizer keeps the bfloat16 gradients besides float32 ones and uses no buckets.
        reduced = min(trained, REDUCE_ELEMENTS) * FLOAT32_BYTES
        roots = _estimate_adamw_bytes(-(-trained // trainer.world_size), on_gpu=on_gpu)
        return TransientMemory(between_micro_batches=trained * itemsize, update=max(reduced, roots))
    return _estimate_bucket_memory(trainer, trained, itemsize, on_gpu=on_gpu)


def _estimate_adamw_bytes(elements: int, *, on_gpu: bool) -> int:
    return (1 if on_gpu else 2) * elements * FLOAT32_BYTES


def _estimate_bucket_memory(
    trainer: TrainerConfig, trained: int, itemsize: int, *, on_gpu: bool
) -> TransientMemory:
    """Estimate the transient memory of stage 1 in float32, 2 and 3, which reduce in buckets.

    Reduction copies the bucket in float32. For the update, a rank's gradients are copied into a
    flat tensor.
    """
    full = min(BUCKET_ELEMENTS, trained)
    # On a CPU, untouched pages of the bucket take no memory.
    bucket = (BUCKET_ELEMENTS if on_gpu else full) * itemsize
    shard = -(-trained // trainer.world_size)
    flat = shard * FLOAT32_BYTES
    if trainer.zero_stage == PARAMETER_SHARDING_STAGE:
        updated = min(shard, ZERO3_SUB_GROUP_ELEMENTS)
        update = updated * FLOAT32_BYTES + _estimate_adamw_bytes(updated, on_gpu=on_gpu)
        return TransientMemory(
            between_micro_batches=bucket, backward=full * FLOAT32_BYTES, update=update
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
            update=max(update, bucket + last * FLOAT32_BYTES - persistent),
        )
    # A second bucket fills while the first is reduced. The rank's shard of new gradients is
    # allocated first, then added to the accumulated one.
    bucket *= 1 + trainer.overlaps_reduction(on_gpu=on_gpu)
    backward = bucket + max(full * FLOAT32_BYTES, last * FLOAT32_BYTES + shard * itemsize)
    return TransientMemory(backward=backward, update=update)
