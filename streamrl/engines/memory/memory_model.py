"""What a trainer's rank and its generator hold, by arithmetic."""

from typing import TYPE_CHECKING

import torch

from streamrl.engines.dtypes import TORCH_DTYPES, resolve_trainer_dtype
from streamrl.engines.generator_config import KV_CACHE_MB_ON_CPU, GeneratorConfig
from streamrl.engines.memory.optimizer_step_memory import FLOAT32_BYTES, estimate_transient_memory
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.models.lora import count_trained_params
from streamrl.engines.models.tensor_parallel import (
    COLUMN_PARALLEL,
    ROW_PARALLEL,
    iter_layers,
    iter_parallel_params,
)
from streamrl.engines.trainer_config import PARAMETER_SHARDING_STAGE, TrainerConfig
from streamrl.placement.colocated_memory import MIB, WorkerMemory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOMENT_BYTES = 2 * FLOAT32_BYTES
"""AdamW's, bytes of a trained element."""
LAYER_VALUES_PER_TOKEN = 17
"""Values of the hidden size that a layer keeps of a token for the backward pass, as in
arXiv:2205.05198 without the attention's scores."""
LOGIT_VALUES_PER_TOKEN = 3
"""Values of the vocabulary's size of a token: logits, their log-softmax, and its gradient."""


def estimate_worker_memory(
    model_path: str,
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    *,
    micro_batch_tokens: int,
    on_gpu: bool,
) -> WorkerMemory:
    """What one hybrid worker holds of the model. On a GPU, generator.kv_cache_mb must be set."""
    module = load_skeleton(model_path)
    elements = sum(parameter.numel() for parameter in module.parameters())
    itemsize = resolve_trainer_dtype(trainer).itemsize
    trained = count_trained_params(module, trainer)
    total = elements + (trained if trainer.lora_rank else 0)
    kept, gathered = _count_local_elements(module, trainer, total)
    served = 0
    if not has_shared_weights(trainer, generator, on_gpu=on_gpu):
        # Norms are whole on every rank; they count for nothing.
        served = elements // generator.tensor_parallel
        if not on_gpu:
            served -= _count_aliased_elements(module, trainer, generator)
        served *= _resolve_generator_dtype(generator, on_gpu=on_gpu).itemsize
    if trainer.backend == "torch":
        # The optimizer works on what a rank keeps.
        trained = trained * kept // total
    optimizer, gradients = _estimate_state_bytes(trainer, trained)
    largest = min(trained, _count_largest_param(module, trainer))
    passing = estimate_transient_memory(trainer, trained=trained, largest=largest, on_gpu=on_gpu)
    kv_mb = generator.kv_cache_mb or (0 if on_gpu else KV_CACHE_MB_ON_CPU)
    tokens = micro_batch_tokens * _estimate_token_bytes(module, trainer)
    return WorkerMemory(
        weights=kept * itemsize,
        serving_weights=served,
        optimizer=optimizer,
        gradients=gradients + passing.between_micro_batches,
        activations=tokens + gathered * itemsize + passing.backward,
        update_buffers=passing.update,
        kv_cache=kv_mb * MIB,
    )


def has_shared_weights(trainer: TrainerConfig, generator: GeneratorConfig, *, on_gpu: bool) -> bool:
    """Whether a rank's generator has the trainer's weights, and none of its own."""
    of_one_type = resolve_trainer_dtype(trainer) is _resolve_generator_dtype(
        generator, on_gpu=on_gpu
    )
    in_parts = trainer.has_sharded_params or generator.tensor_parallel > 1
    return of_one_type and not (in_parts or trainer.lora_rank or on_gpu)


def _count_aliased_elements(
    module: "PreTrainedModel", trainer: TrainerConfig, generator: GeneratorConfig
) -> int:
    """Elements of what a rank's generator serves, on a CPU, that are those the rank trains."""
    size, parts = trainer.tensor_parallel, generator.tensor_parallel
    is_sharded = trainer.zero_stage == PARAMETER_SHARDING_STAGE and trainer.dp_size > 1
    of_one_type = resolve_trainer_dtype(trainer) is _resolve_generator_dtype(
        generator, on_gpu=False
    )
    if size == 1 or size % parts or is_sharded or not of_one_type:
        return 0
    # Columns of a matrix that is served whole, or in larger parts, are not in one piece there.
    cut = (*COLUMN_PARALLEL, *ROW_PARALLEL) if size == parts else COLUMN_PARALLEL
    layers = list(iter_layers(module))
    there = sum(p.numel() for layer in layers for p in iter_parallel_params(layer, cut)) // size
    if parts > 1:
        return there
    # What training does not cut is served whole, too.
    matrices = sum(p.numel() for layer in layers for p in iter_parallel_params(layer))
    return there + sum(p.numel() for p in module.parameters()) - matrices


def _count_local_elements(
    module: "PreTrainedModel", trainer: TrainerConfig, elements: int
) -> tuple[int, int]:
    """Of so many elements those that a rank keeps, and that come for a forward pass at most."""
    if not trainer.has_sharded_params:
        return elements, 0
    if trainer.backend != "torch":
        return elements // trainer.world_size, elements
    layers = [sum(p.numel() for p in layer.parameters()) for layer in iter_layers(module)]
    kept = elements
    if trainer.tensor_parallel > 1:
        matrices = sum(
            p.numel() for layer in iter_layers(module) for p in iter_parallel_params(layer)
        )
        kept += matrices // trainer.tensor_parallel - matrices
    if trainer.zero_stage != PARAMETER_SHARDING_STAGE or trainer.dp_size == 1:
        return kept, 0
    # The outermost stays for a whole pass, layers come one by one, each while the last computes;
    # a layer's gradient is reduced in a copy.
    outermost = elements - sum(layers)
    four_layers = 4 * max(layers, default=0) // trainer.tensor_parallel
    return kept // trainer.dp_size, outermost + four_layers


def _count_largest_param(module: "PreTrainedModel", trainer: TrainerConfig) -> int:
    """Elements of the largest parameter that a rank of backend torch keeps."""
    of_all = max(parameter.numel() for parameter in module.parameters())
    is_sharded = trainer.has_sharded_params and trainer.zero_stage == PARAMETER_SHARDING_STAGE
    return -(-of_all // trainer.dp_size) if is_sharded else of_all


def _resolve_generator_dtype(generator: GeneratorConfig, *, on_gpu: bool) -> torch.dtype:
    """What the generator holds weights in; the model's own type on a GPU is taken for bfloat16."""
    types = {"auto": torch.bfloat16 if on_gpu else torch.float32, "float16": torch.float16}
    return {**TORCH_DTYPES, **types}[generator.dtype]


def _estimate_state_bytes(trainer: TrainerConfig, trained: int) -> tuple[int, int]:
    """Bytes of a rank's optimizer and gradients. From stage 1 on, ZeRO keeps master weights."""
    if trainer.backend != "deepspeed" or trainer.zero_stage == 0:
        return trained * MOMENT_BYTES, trained * FLOAT32_BYTES
    share = -(-trained // trainer.world_size)
    return share * (MOMENT_BYTES + FLOAT32_BYTES), (
        trained if trainer.zero_stage == 1 else share
    ) * FLOAT32_BYTES


def _estimate_token_bytes(module: "PreTrainedModel", trainer: TrainerConfig) -> int:
    """What the activations of a token take."""
    config = module.config.get_text_config()
    layers, hidden = config.num_hidden_layers, config.hidden_size
    kept = (
        layers + LAYER_VALUES_PER_TOKEN
        if trainer.gradient_checkpointing
        else layers * LAYER_VALUES_PER_TOKEN
    )
    itemsize = resolve_trainer_dtype(trainer).itemsize
    return int(
        kept * hidden * itemsize + LOGIT_VALUES_PER_TOKEN * config.vocab_size * FLOAT32_BYTES
    )
