"""Analytic memory model of a colocated worker: a trainer rank and its generator.

The transient memory of gradient reduction and the optimizer step is that of DeepSpeed 0.19 and
torch's AdamW as implemented. A reduce bucket is DeepSpeed's buffer of gradients that are reduced
together.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from streamrl.engines.activation_sizes import (
    CHUNK_TOKENS,
    LAYER_VALUES_PER_TOKEN,
    count_layer_values,
)
from streamrl.engines.dtypes import TORCH_DTYPES, resolve_trainer_dtype
from streamrl.engines.generator_config import KV_CACHE_MB_ON_CPU, GeneratorConfig
from streamrl.engines.memory.worker_memory import MIB, WorkerMemory
from streamrl.engines.models.activation_checkpointing import iter_tokenwise_mlps
from streamrl.engines.models.forward import iter_layers, load_skeleton
from streamrl.engines.models.lora import count_trained_params
from streamrl.engines.models.tensor_parallel import (
    iter_split_params,
    list_vocabulary_layers,
    list_vocabulary_params,
)
from streamrl.engines.trainer_config import (
    BUCKET_ELEMENTS,
    LIVE_ELEMENTS,
    OFFLOAD,
    PARAMETER_SHARDING_STAGE,
    TrainerConfig,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOAT32_BYTES = 4
ZERO0_REDUCE_ELEMENTS = 500_000_000
"""Elements that DeepSpeed reduces at a time in stage 0; a constant of DeepSpeed."""
ZERO3_SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's default sub_group_size of stage 3: elements per optimizer call."""
MOMENT_BYTES = 2 * FLOAT32_BYTES
"""AdamW's two float32 moments, bytes per trained element."""
LOGIT_VALUES_PER_TOKEN = 5
"""Vocabulary-sized float32 vectors per token of a chunk through the head: logits in the model's
dtype, logits over temperature, and temporaries of softmax, entropy and gradient."""
VLLM_VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it."""


def estimate_worker_memory(
    model_path: str,
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    *,
    micro_batch_tokens: int,
    on_gpu: bool,
) -> WorkerMemory:
    """Estimate the memory of a colocated worker: a trainer rank and its generator in a process.

    `micro_batch_tokens` bounds the tokens of a micro-batch, padding included. On a GPU,
    generator.kv_cache_mb must be set.
    """
    module = load_skeleton(model_path)
    elements = _count_elements(module.parameters())
    itemsize = resolve_trainer_dtype(trainer).itemsize
    trained = count_trained_params(module, trainer)
    total = elements + (trained if trainer.lora_rank else 0)
    local, gathered = _count_local_elements(module, trainer, total)
    served = 0
    if not has_shared_weights(trainer, generator, on_gpu=on_gpu):
        # Ignores that norms are replicated on every rank; they are negligible.
        served = elements // generator.tensor_parallel
        if not on_gpu:
            served -= _count_aliased_elements(module, trainer, generator)
        served *= _resolve_generator_dtype(generator, on_gpu=on_gpu).itemsize
    if trainer.backend == "torch":
        # The optimizer updates the rank's shard only.
        trained = trained * local // total
    optimizer, gradients = _estimate_state_bytes(trainer, trained)
    largest = min(trained, _count_largest_param(module, trainer))
    transient = estimate_transient_memory(trainer, trained=trained, largest=largest, on_gpu=on_gpu)
    if trainer.offload_optimizer and on_gpu:
        optimizer, update = 0, 0
        if trainer.zero_stage < PARAMETER_SHARDING_STAGE:
            # As measured: gradients leave in the backward pass, and an update holds two float32
            # copies of the rank's shard, and the new weights.
            gradients, update = 0, 2 * FLOAT32_BYTES * -(-trained // trainer.world_size)
            update += trained * itemsize
        transient = replace(transient, update=update)
    if trainer.has_sharded_params and _count_token_experts(module):
        # vLLM stores experts in a layout of its own: a version is gathered whole, then loaded.
        transient = replace(transient, update=max(transient.update, elements * itemsize))
    kv_mb = generator.kv_cache_mb or (0 if on_gpu else KV_CACHE_MB_ON_CPU)
    micro_batch_tokens = -(-micro_batch_tokens // trainer.sequence_parallel)
    tokens = micro_batch_tokens * _estimate_token_bytes(module, trainer, on_gpu=on_gpu)
    head = _estimate_head_bytes(module, trainer, micro_batch_tokens)
    return WorkerMemory(
        weights=local * itemsize,
        serving_weights=served,
        optimizer=optimizer,
        gradients=gradients + transient.between_micro_batches,
        activations=tokens + head + gathered * itemsize + transient.backward,
        update_buffers=transient.update,
        kv_cache=kv_mb * MIB,
    )


def has_shared_weights(trainer: TrainerConfig, generator: GeneratorConfig, *, on_gpu: bool) -> bool:
    same_dtype = resolve_trainer_dtype(trainer) is _resolve_generator_dtype(
        generator, on_gpu=on_gpu
    )
    is_split = trainer.has_sharded_params or generator.tensor_parallel > 1
    return same_dtype and not (is_split or trainer.lora_rank or on_gpu)


def _count_aliased_elements(
    module: "PreTrainedModel", trainer: TrainerConfig, generator: GeneratorConfig
) -> int:
    """Count the elements that trainer and generator of a CPU rank share without a copy."""
    size, generator_size = trainer.tensor_parallel, generator.tensor_parallel
    is_sharded = trainer.zero_stage == PARAMETER_SHARDING_STAGE and trainer.fsdp_size > 1
    same_dtype = resolve_trainer_dtype(trainer) is _resolve_generator_dtype(generator, on_gpu=False)
    if size == 1 or size % generator_size or is_sharded or not same_dtype:
        return 0
    # If the generator's shard is larger than the trainer's, the columns of a row-parallel matrix
    # are strided in the generator's, so these matrices cannot be aliased.
    has_strided = size != generator_size
    split = list(iter_split_params(module, size))
    aliased = sum(p.numel() for p, dim in split if dim == 0 or not has_strided) // size
    if generator_size > 1:
        words = list_vocabulary_params(module, size)
        has_same_rows = all(len(p) % VLLM_VOCABULARY_MULTIPLE == 0 for p in words)
        return aliased if has_same_rows else aliased - _count_elements(words) // size
    # Parameters that training does not split are served unsplit, too.
    matrices = _count_elements(p for p, _ in split)
    return aliased + _count_elements(module.parameters()) - matrices


def _count_elements(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _count_local_elements(
    module: "PreTrainedModel", trainer: TrainerConfig, elements: int
) -> tuple[int, int]:
    """Count the parameter elements in a rank's memory.

    Returns the elements of the rank's own shard, and the elements of gathered parameters that a
    forward pass needs in addition at the same time. `elements` counts the full model.
    """
    if not trainer.has_sharded_params:
        return elements, 0
    if trainer.backend != "torch":
        return elements // trainer.world_size, min(elements, LIVE_ELEMENTS)
    layers = [_count_elements(layer.parameters()) for layer in iter_layers(module)]
    local, tensor_parallel = elements, trainer.tensor_parallel
    if tensor_parallel > 1:
        matrices = _count_elements(p for p, _ in iter_split_params(module, tensor_parallel))
        local += matrices // tensor_parallel - matrices
    if trainer.zero_stage != PARAMETER_SHARDING_STAGE or trainer.fsdp_size == 1:
        return local, 0
    # FSDP2 keeps the root's parameters gathered for a whole pass and prefetches a layer while the
    # previous computes; a layer's gradient is reduced in a copy. So count four layers and the root.
    words = _count_elements(list_vocabulary_params(module, tensor_parallel))
    root = elements - sum(layers) - words + words // tensor_parallel
    four_layers = 4 * max(layers, default=0) // tensor_parallel
    return local // trainer.fsdp_size, root + four_layers


def _count_largest_param(module: "PreTrainedModel", trainer: TrainerConfig) -> int:
    """Count the elements of the largest parameter of a rank."""
    ranks, split = trainer.tensor_parallel, set[int]()
    if ranks > 1:
        split = {id(parameter) for parameter, _ in iter_split_params(module, ranks)}
    largest = max(p.numel() // (ranks if id(p) in split else 1) for p in module.parameters())
    is_sharded = trainer.has_sharded_params and trainer.zero_stage == PARAMETER_SHARDING_STAGE
    return -(-largest // trainer.fsdp_size) if is_sharded else largest


def _resolve_generator_dtype(generator: GeneratorConfig, *, on_gpu: bool) -> torch.dtype:
    """Return the generator's torch dtype; auto on a GPU is taken to be bfloat16."""
    extra_dtypes = {"auto": torch.bfloat16 if on_gpu else torch.float32, "float16": torch.float16}
    return {**TORCH_DTYPES, **extra_dtypes}[generator.dtype]


def _estimate_state_bytes(trainer: TrainerConfig, trained: int) -> tuple[int, int]:
    """Return the bytes of a rank's optimizer state and the bytes of the rank's gradients.

    From ZeRO stage 1 on, the optimizer state includes float32 master weights. So does that of
    backend torch in bfloat16; with FSDP2 they take the place of the weights.
    """
    if trainer.backend != "deepspeed" or trainer.zero_stage == 0:
        itemsize = resolve_trainer_dtype(trainer).itemsize
        is_fsdp = trainer.zero_stage == PARAMETER_SHARDING_STAGE and trainer.fsdp_size > 1
        master = 0 if itemsize == FLOAT32_BYTES else FLOAT32_BYTES - itemsize * is_fsdp
        return trained * (MOMENT_BYTES + master), trained * FLOAT32_BYTES
    shard = -(-trained // trainer.world_size)
    return shard * (MOMENT_BYTES + FLOAT32_BYTES), (
        trained if trainer.zero_stage == 1 else shard
    ) * FLOAT32_BYTES


def _estimate_token_bytes(
    module: "PreTrainedModel", trainer: TrainerConfig, *, on_gpu: bool
) -> int:
    config = module.config.get_text_config()
    layers, hidden = config.num_hidden_layers, config.hidden_size
    # Ranks split an MLP's columns, or the experts and so the tokens that pass through them.
    layer = count_layer_values(hidden, _find_intermediate_size(module) // trainer.tensor_parallel)
    if not trainer.gradient_checkpointing:
        saved = layers * layer
    else:
        has_offload = on_gpu and trainer.gradient_checkpointing == OFFLOAD
        if _has_chunked_mlps(module, trainer):
            layer = LAYER_VALUES_PER_TOKEN * hidden
        saved = layer + hidden * layers * (not has_offload)
    itemsize = resolve_trainer_dtype(trainer).itemsize
    return int(saved * itemsize)


def _has_chunked_mlps(module: "PreTrainedModel", trainer: TrainerConfig) -> bool:
    """Return whether the MLPs of all layers compute in chunks if the layers are checkpointed."""
    num_layers = module.config.get_text_config().num_hidden_layers
    return trainer.tensor_parallel == 1 and len(list(iter_tokenwise_mlps(module))) >= num_layers


def _count_token_experts(module: "PreTrainedModel") -> int:
    """Return the number of experts that a token passes through; 0 without experts."""
    fields = module.config.get_text_config().to_dict()
    return int(fields.get("num_experts_per_tok") or 0)


def _find_intermediate_size(module: "PreTrainedModel") -> int:
    """Return the width of a token's MLP: of all experts that it passes through, shared ones too."""
    fields = module.config.get_text_config().to_dict()
    intermediate = fields.get("intermediate_size") or 0
    if experts := _count_token_experts(module):
        experts += fields.get("n_shared_experts") or 0
        shared = fields.get("shared_expert_intermediate_size") or 0
        return int(experts * (fields.get("moe_intermediate_size") or intermediate) + shared)
    return int(intermediate)


def _estimate_head_bytes(module: "PreTrainedModel", trainer: TrainerConfig, tokens: int) -> int:
    """Estimate the memory of a chunk through the head, and of the head's gradient.

    The gradient is summed over chunks in float32, and added or returned in the model's dtype.
    """
    config = module.config.get_text_config()
    chunk = min(tokens, CHUNK_TOKENS) * LOGIT_VALUES_PER_TOKEN * FLOAT32_BYTES
    itemsize = resolve_trainer_dtype(trainer).itemsize
    has_gradient = tokens > 0 and not trainer.lora_rank
    gradient = config.hidden_size * (FLOAT32_BYTES + itemsize) * has_gradient
    split = list_vocabulary_layers(module, trainer.tensor_parallel)
    is_split = module.get_output_embeddings() in split
    words = config.vocab_size // (trainer.tensor_parallel if is_split else 1)
    return int(words * (chunk + gradient))


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
    is_bf16 = resolve_trainer_dtype(trainer) is torch.bfloat16
    if trainer.zero_stage == 1 and is_bf16 and not trainer.offload_optimizer:
        # BF16_Optimizer keeps the bfloat16 gradients besides float32 ones and uses no buckets.
        roots = _estimate_adamw_bytes(-(-trained // trainer.world_size), on_gpu=on_gpu)
        return TransientMemory(
            between_micro_batches=trained * resolve_trainer_dtype(trainer).itemsize,
            update=max(reduced, roots),
        )
    return _estimate_bucket_memory(trainer, trained, on_gpu=on_gpu)


def _estimate_adamw_bytes(elements: int, *, on_gpu: bool) -> int:
    return (1 if on_gpu else 2) * elements * FLOAT32_BYTES


def _estimate_bucket_memory(
    trainer: TrainerConfig, trained: int, *, on_gpu: bool
) -> TransientMemory:
    """Estimate the transient memory of stage 1 in float32, 2 and 3, which reduce in buckets.

    Reduction copies the bucket in float32. For the update, a rank's gradients are copied into a
    flat tensor.
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
    # The rank's shard of new gradients is allocated first, then added to the accumulated one.
    backward = bucket + max(full * FLOAT32_BYTES, last * FLOAT32_BYTES + shard * itemsize)
    return TransientMemory(backward=backward, update=update)
