"""Memory of a colocated worker, a trainer rank and its generator, from the model itself."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from streamrl.engines.dtypes import TORCH_DTYPES, resolve_trainer_dtype
from streamrl.engines.generator_config import KV_CACHE_MB_ON_CPU, GeneratorConfig
from streamrl.engines.memory.training_memory import TrainingSizes, estimate_training_memory
from streamrl.engines.memory.worker_memory import MIB, WorkerMemory
from streamrl.engines.models.activation_checkpointing import iter_tokenwise_mlps
from streamrl.engines.models.forward import iter_layers, load_skeleton
from streamrl.engines.models.lora import count_trained_params
from streamrl.engines.models.tensor_parallel import (
    iter_split_params,
    list_vocabulary_layers,
    list_vocabulary_params,
)
from streamrl.engines.trainer_config import PARAMETER_SHARDING_STAGE, TrainerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    tokens = -(-micro_batch_tokens // trainer.sequence_parallel)
    sizes = measure_training_sizes(module, trainer)
    memory = estimate_training_memory(sizes, trainer, tokens=tokens, on_gpu=on_gpu)
    served, update = 0, memory.update_buffers
    if not has_shared_weights(trainer, generator, on_gpu=on_gpu):
        # Ignores that norms are replicated on every rank; they are negligible.
        served = elements // generator.tensor_parallel
        if not on_gpu:
            served -= _count_aliased_elements(module, trainer, generator)
        served *= _resolve_generator_dtype(generator, on_gpu=on_gpu).itemsize
    if trainer.has_sharded_params and _count_token_experts(module):
        # vLLM stores experts in a layout of its own: a version is gathered whole, then loaded.
        update = max(update, elements * sizes.itemsize)
    kv_mb = generator.kv_cache_mb or (0 if on_gpu else KV_CACHE_MB_ON_CPU)
    return replace(memory, serving_weights=served, update_buffers=update, kv_cache=kv_mb * MIB)


def measure_training_sizes(module: "PreTrainedModel", trainer: TrainerConfig) -> TrainingSizes:
    """Return the sizes of a model as a trainer splits it over tensor-parallel ranks."""
    config, ranks = module.config.get_text_config(), trainer.tensor_parallel
    elements = _count_elements(module.parameters())
    trained = count_trained_params(module, trainer)
    params = elements + (trained if trainer.lora_rank else 0)
    split = [parameter for parameter, _ in iter_split_params(module, ranks)] if ranks > 1 else []
    ids, matrices = {id(parameter) for parameter in split}, _count_elements(split)
    layers = [_count_elements(layer.parameters()) for layer in iter_layers(module)]
    words = _count_elements(list_vocabulary_params(module, ranks))
    is_split = module.get_output_embeddings() in list_vocabulary_layers(module, ranks)
    num_chunked = len(list(iter_tokenwise_mlps(module)))
    return TrainingSizes(
        params=params,
        trained=trained,
        rank_params=params - matrices + matrices // ranks,
        layer_params=max(layers, default=0) // ranks,
        root_params=params - sum(layers) - words + words // ranks,
        largest_param=max(p.numel() // (ranks if id(p) in ids else 1) for p in module.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        # Ranks split an MLP's columns, or the experts and so the tokens that pass through them.
        mlp_width=_find_intermediate_size(module) // ranks,
        head_rows=config.vocab_size // (ranks if is_split else 1),
        has_chunked_mlps=ranks == 1 and num_chunked >= config.num_hidden_layers,
        itemsize=resolve_trainer_dtype(trainer).itemsize,
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


def _resolve_generator_dtype(generator: GeneratorConfig, *, on_gpu: bool) -> torch.dtype:
    """Return the generator's torch dtype; auto on a GPU is taken to be bfloat16."""
    extra_dtypes = {"auto": torch.bfloat16 if on_gpu else torch.float32, "float16": torch.float16}
    return {**TORCH_DTYPES, **extra_dtypes}[generator.dtype]


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
