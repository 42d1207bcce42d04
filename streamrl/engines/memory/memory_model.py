"""Sizes of a model that decide the memory of a trainer rank, from the model itself."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.nn import Parameter

from streamrl.engines.memory.training_memory import DTYPE_BYTES, TrainingSizes
from streamrl.engines.models.activation_checkpointing import iter_tokenwise_mlps
from streamrl.engines.models.forward import iter_layers
from streamrl.engines.models.lora import count_trained_params
from streamrl.engines.models.tensor_parallel import (
    iter_split_params,
    list_vocabulary_layers,
    list_vocabulary_params,
)
from streamrl.engines.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def measure_training_sizes(
    module: "PreTrainedModel", trainer: TrainerConfig, *, on_gpu: bool
) -> TrainingSizes:
    """Return the sizes of a model as a trainer splits it over tensor-parallel ranks."""
    config, ranks = module.config.get_text_config(), trainer.tensor_parallel
    elements = _count_elements(module.parameters())
    trained = count_trained_params(module, trainer)
    params = elements + (trained if trainer.lora_rank else 0)
    split = list(iter_split_params(module, ranks)) if ranks > 1 else []
    ids = {id(parameter) for parameter, _ in split}
    matrices = _count_elements(parameter for parameter, _ in split)
    layers = [_count_elements(layer.parameters()) for layer in iter_layers(module)]
    words = _count_elements(list_vocabulary_params(module, ranks))
    head = module.get_output_embeddings()
    is_split = head in list_vocabulary_layers(module, ranks)
    num_chunked = len(list(iter_tokenwise_mlps(module)))
    return TrainingSizes(
        params=params,
        base_params=elements,
        trained=trained,
        split_params=matrices,
        strided_params=_count_elements(parameter for parameter, dim in split if dim),
        vocabulary_params=words,
        rank_params=params - matrices + matrices // ranks,
        layer_params=max(layers, default=0) // ranks,
        root_params=params - sum(layers) - words + words // ranks,
        largest_param=max(p.numel() // (ranks if id(p) in ids else 1) for p in module.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        # Ranks split an MLP's columns, or the experts and so the tokens that pass through them.
        mlp_width=_find_intermediate_size(module) // ranks,
        head_rows=config.vocab_size // (ranks if is_split else 1) if head is not None else 1,
        has_chunked_mlps=ranks == 1 and num_chunked >= config.num_hidden_layers,
        has_experts=bool(_count_token_experts(module)),
        itemsize=DTYPE_BYTES[trainer.resolve_dtype(on_gpu=on_gpu)],
    )


def _count_elements(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


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
