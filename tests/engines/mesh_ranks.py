"""Four ranks of a trainer in meshes of several shapes.

Runs in child processes, because torch.distributed must not be initialized in pytest's process.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from streamrl.distributed.process_group import join_process_group
from streamrl.engines.checkpoint.sharded_state import view_piece
from streamrl.engines.models import activation_checkpointing
from streamrl.engines.models.activation_checkpointing import checkpoint_layers
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.model_trainer import make_backend
from streamrl.engines.training.training_backend import TrainingBackend
from tests.engines.tiny_qwen import fill

WORLD = 4
UPDATES = 3
MICRO_BATCHES = 2
ROWS = 4
LR = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MESHES: dict[str, dict[str, Any]] = {
    "data 2, tensor 2": {"tensor_parallel": 2},
    "sharded data 2, tensor 2": {"tensor_parallel": 2, "zero_stage": 3},
    "sharded data 4": {"zero_stage": 3},
    "tensor 4": {"tensor_parallel": 4},
}
MODELS = ("qwen2", "qwen2 tied", "llama", "mistral")
WIDE = "sharded data 2, tensor 2"


class MeshCase(NamedTuple):
    """A model in a mesh, with or without activation checkpointing."""

    model: str
    mesh: str
    recomputes: bool = False
    dtype: str = "float32"

    @property
    def label(self) -> str:
        bfloat16 = "; bfloat16" * (self.dtype == "bfloat16")
        return f"{self.model}; {self.mesh}{'; recomputed' * self.recomputes}{bfloat16}"


CASES = [MeshCase("qwen2 tied", mesh) for mesh in MESHES]
CASES += [MeshCase(model, WIDE) for model in MODELS if model != "qwen2 tied"]
CASES += [MeshCase("qwen2 tied", mesh, recomputes=True) for mesh in (WIDE, "sharded data 4")]
BFLOAT16_CASES = [MeshCase("qwen2 tied", mesh, dtype="bfloat16") for mesh in MESHES]


def make_model(model: str) -> PreTrainedModel:
    """Build a model with all biases that its family supports."""
    if model == "llama":
        module: Any = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    elif model == "mistral":
        module = MistralForCausalLM(MistralConfig(**SIZES))
    else:
        module = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings="tied" in model))
    fill(module, seed=0)
    return module.train()


def make_single_rank_key(model: str) -> str:
    """Return the key of the single-rank results of a case."""
    return f"{model}; alone"


def run_rank(rank: int, ports: Sequence[int], cases: Sequence[MeshCase]) -> dict[str, Any]:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    results = {}
    # Each rank computes the single-rank results of some of the models.
    for model in list(dict.fromkeys(case.model for case in cases))[rank::WORLD]:
        results[make_single_rank_key(model)] = train(
            0, make_model(model), TrainerConfig(backend="torch", world_size=1)
        )
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = TrainerConfig(
            backend="torch", world_size=WORLD, dtype=case.dtype, **MESHES[case.mesh]
        )
        module = make_model(case.model)
        if case.recomputes:
            activation_checkpointing.CHUNK_TOKENS = 5
            checkpoint_layers(module, offload=False, chunk_mlps=config.tensor_parallel == 1)
        results[case.label] = train(rank, module, config)
    return results


def train(rank: int, module: PreTrainedModel, config: TrainerConfig) -> dict[str, Any]:
    """Run some updates and one with a non-finite gradient."""
    join_process_group(rank=rank, world_size=config.world_size, timeout_s=60.0)
    backend = make_backend(module, config)
    generator = torch.Generator().manual_seed(1)
    norms = []
    for update in range(UPDATES + 1):
        for _ in range(MICRO_BATCHES):
            ids = torch.randint(0, 64, (ROWS, 12), generator=generator)
            rows = ids[config.get_dp_rank(rank) :: config.dp_size]
            loss = backend.forward(rows, use_cache=False).logits.log_softmax(-1).square().sum()
            backend.backward(loss * (torch.nan if update == UPDATES else 1.0))
        norms.append(backend.step(divisor=float(ROWS), lr=LR))
        if update == UPDATES - 1:
            before = {name: tensor.clone() for name, tensor in backend.full_state()}
    with torch.no_grad():
        # Gathered parameters of a forward pass without a backward pass must not interfere.
        backend.forward(ids)
    full_state = {name: tensor.clone() for name, tensor in backend.full_state()}
    results = {
        "norms": norms,
        "unchanged": all(full_state[name].equal(before[name]) for name in before),
        "parameters": full_state,
        "misplaced": find_misplaced(backend, full_state),
        "masters": [
            (fragment.shard.tensor, piece.box.slices, view_piece(block, piece).clone())
            for fragment in backend.iter_fragments()
            for block in [fragment.slice_block(fragment.optimizer_tensor)]
            for piece in fragment.shard.pieces
        ],
        "kept_bytes": sum(tensor.nbytes for _, tensor, _ in backend.iter_shards()),
        "memory_bytes": count_memory_bytes(backend),
    }
    backend.close()
    return results


def count_memory_bytes(backend: TrainingBackend) -> int:
    """Return the bytes of the distinct storages of the local shards."""
    blocks = [tensor.untyped_storage() for _, tensor, _ in backend.iter_shards()]
    return sum({block.data_ptr(): block.nbytes() for block in blocks}.values())


def find_misplaced(backend: TrainingBackend, full_state: dict[str, torch.Tensor]) -> list[str]:
    """Return parameters whose shards differ from the full tensor or lie elsewhere."""
    wrong_names = []
    for name, local, shard in backend.iter_forward_shards():
        for piece in shard.pieces:
            offset = local.storage_offset() + piece.offset
            view = torch.as_strided(local, piece.box.shape, piece.strides, offset)
            if tuple(local.shape) != shard.shape or not view.equal(
                full_state[name][piece.box.slices]
            ):
                wrong_names.append(name)
    return wrong_names
