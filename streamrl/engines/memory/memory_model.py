"""What a trainer's rank and its generator hold, by arithmetic."""

from typing import TYPE_CHECKING

import torch

from streamrl.engines.dtypes import DTYPES, trained_dtype
from streamrl.engines.generator_config import KV_CACHE_MB_ON_CPU, GeneratorConfig
from streamrl.engines.memory.optimizer_step_memory import FLOAT, passing_memory
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.models.lora import num_trained
from streamrl.engines.models.tensor_parallel import (
    CUT_BY_INPUTS,
    CUT_BY_OUTPUTS,
    layers_of,
    matrices_of,
)
from streamrl.engines.trainer_config import SHARDS_PARAMETERS, TrainerConfig
from streamrl.placement.colocated_memory import MB, WorkerMemory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOMENTS = 2 * FLOAT
"""AdamW's, bytes of a trained element."""
LAYER_VALUES = 17
"""Values of the hidden size that a layer keeps of a token for the backward pass, as in
arXiv:2205.05198 without the attention's scores."""
LOGIT_VALUES = 3
"""Values of the vocabulary's size of a token: logits, their log-softmax, and its gradient."""


def worker_memory(
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
    itemsize = trained_dtype(trainer).itemsize
    trained = num_trained(module, trainer)
    total = elements + (trained if trainer.lora_rank else 0)
    kept, gathered = _kept(module, trainer, total)
    served = 0
    if not shares_weights(trainer, generator, on_gpu=on_gpu):
        # Norms are whole on every rank; they count for nothing.
        served = elements // generator.tensor_parallel
        if not on_gpu:
            served -= _trained_there(module, trainer, generator)
        served *= _served_type(generator, on_gpu=on_gpu).itemsize
    if trainer.backend == "torch":
        # The optimizer works on what a rank keeps.
        trained = trained * kept // total
    optimizer, gradients = _states(trainer, trained)
    largest = min(trained, _largest(module, trainer))
    passing = passing_memory(trainer, trained=trained, largest=largest, on_gpu=on_gpu)
    kv_mb = generator.kv_cache_mb or (0 if on_gpu else KV_CACHE_MB_ON_CPU)
    tokens = micro_batch_tokens * _token_bytes(module, trainer)
    return WorkerMemory(
        weights=kept * itemsize,
        served=served,
        optimizer=optimizer,
        gradients=gradients + passing.held,
        activations=tokens + gathered * itemsize + passing.backward,
        update=passing.update,
        kv=kv_mb * MB,
    )


def shares_weights(trainer: TrainerConfig, generator: GeneratorConfig, *, on_gpu: bool) -> bool:
    """Whether a rank's generator has the trainer's weights, and none of its own."""
    of_one_type = trained_dtype(trainer) is _served_type(generator, on_gpu=on_gpu)
    in_parts = trainer.gathers or generator.tensor_parallel > 1
    return of_one_type and not (in_parts or trainer.lora_rank or on_gpu)


def _trained_there(
    module: "PreTrainedModel", trainer: TrainerConfig, generator: GeneratorConfig
) -> int:
    """Elements of what a rank's generator serves, on a CPU, that are those the rank trains."""
    size, parts = trainer.tensor_parallel, generator.tensor_parallel
    is_sharded = trainer.zero_stage == SHARDS_PARAMETERS and trainer.num_shares > 1
    of_one_type = trained_dtype(trainer) is _served_type(generator, on_gpu=False)
    if size == 1 or size % parts or is_sharded or not of_one_type:
        return 0
    # Columns of a matrix that is served whole, or in larger parts, are not in one piece there.
    cut = (*CUT_BY_OUTPUTS, *CUT_BY_INPUTS) if size == parts else CUT_BY_OUTPUTS
    layers = list(layers_of(module))
    there = sum(p.numel() for layer in layers for p in matrices_of(layer, cut)) // size
    if parts > 1:
        return there
    # What training does not cut is served whole, too.
    matrices = sum(p.numel() for layer in layers for p in matrices_of(layer))
    return there + sum(p.numel() for p in module.parameters()) - matrices


def _kept(module: "PreTrainedModel", trainer: TrainerConfig, elements: int) -> tuple[int, int]:
    """Of so many elements those that a rank keeps, and that come for a forward pass at most."""
    if not trainer.gathers:
        return elements, 0
    if trainer.backend != "torch":
        return elements // trainer.world_size, elements
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(module)]
    kept = elements
    if trainer.tensor_parallel > 1:
        matrices = sum(p.numel() for layer in layers_of(module) for p in matrices_of(layer))
        kept += matrices // trainer.tensor_parallel - matrices
    if trainer.zero_stage != SHARDS_PARAMETERS or trainer.num_shares == 1:
        return kept, 0
    # The outermost stays for a whole pass, layers come one by one, each while the last computes;
    # a layer's gradient is reduced in a copy.
    outermost = elements - sum(layers)
    four_layers = 4 * max(layers, default=0) // trainer.tensor_parallel
    return kept // trainer.num_shares, outermost + four_layers


def _largest(module: "PreTrainedModel", trainer: TrainerConfig) -> int:
    """Elements of the largest parameter that a rank of backend torch keeps."""
    of_all = max(parameter.numel() for parameter in module.parameters())
    is_sharded = trainer.gathers and trainer.zero_stage == SHARDS_PARAMETERS
    return -(-of_all // trainer.num_shares) if is_sharded else of_all


def _served_type(generator: GeneratorConfig, *, on_gpu: bool) -> torch.dtype:
    """What the generator holds weights in; the model's own type on a GPU is taken for bfloat16."""
    types = {"auto": torch.bfloat16 if on_gpu else torch.float32, "float16": torch.float16}
    return {**DTYPES, **types}[generator.dtype]


def _states(trainer: TrainerConfig, trained: int) -> tuple[int, int]:
    """Bytes of a rank's optimizer and gradients. From stage 1 on, ZeRO keeps master weights."""
    if trainer.backend != "deepspeed" or trainer.zero_stage == 0:
        return trained * MOMENTS, trained * FLOAT
    share = -(-trained // trainer.world_size)
    return share * (MOMENTS + FLOAT), (trained if trainer.zero_stage == 1 else share) * FLOAT


def _token_bytes(module: "PreTrainedModel", trainer: TrainerConfig) -> int:
    """What the activations of a token take."""
    config = module.config.get_text_config()
    layers, hidden = config.num_hidden_layers, config.hidden_size
    kept = layers + LAYER_VALUES if trainer.gradient_checkpointing else layers * LAYER_VALUES
    itemsize = trained_dtype(trainer).itemsize
    return int(kept * hidden * itemsize + LOGIT_VALUES * config.vocab_size * FLOAT)
