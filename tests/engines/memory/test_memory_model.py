"""The analytic memory model against models that are built."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
)

from benchmarks.memory import GIB, count_peaks, make_config
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.memory.memory_model import measure_training_sizes
from streamrl.engines.memory.training_memory import (
    TransientMemory,
    estimate_rank_memory,
    estimate_transient_memory,
)
from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.trainer_config import TrainerConfig
from tests import forked
from tests.engines.memory_ranks import CASES, TOKENS, run_rank
from tests.engines.tiny_qwen import VOCABULARY, save, tiny_model
from tests.engines.trainer_layouts import Layout
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.xdist_group("ranks")

MB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tiny_model(tied=True, seed=0), tmp_path_factory.mktemp("policy"))


def count_bytes(*parts: str) -> int:
    """Return the bytes of the model's parameters whose names have one of these parts."""
    named = tiny_model(tied=True, seed=0).named_parameters()
    return sum(p.nbytes for name, p in named if any(part in name for part in parts))


FULL, CUT, COLUMNS = (
    count_bytes(""),
    count_bytes("_proj", "embed_tokens"),
    count_bytes("o_proj", "down_proj"),
)
"""Bytes of the model, of what ranks split, and of what they split by columns."""


def estimate_memory(
    path: str, trainer: TrainerConfig, *, tokens: int = 0, on_gpu: bool = False, **generator: Any
) -> WorkerMemory:
    config = GeneratorConfig(kv_cache_mb=3, **generator)
    sizes = measure_training_sizes(load_skeleton(path), trainer, on_gpu=on_gpu)
    tokens = -(-tokens // trainer.sequence_parallel)
    return estimate_rank_memory(sizes, trainer, config, tokens=tokens, on_gpu=on_gpu)


def test_torch_backend_holds_weights_gradients_and_two_moments(path: str):
    model = tiny_model(tied=True, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.ones(1, 4, dtype=torch.long)
    model(ids).logits.sum().backward()
    optimizer.step()
    moments = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    memory = estimate_memory(path, TrainerConfig(backend="torch"))
    assert memory.weights == sum(p.nbytes for p in model.parameters())
    assert memory.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert memory.optimizer == sum(moment.nbytes for moment in moments)
    assert (memory.serving_weights, memory.activations, memory.kv_cache) == (0, 0, 3 * MB)
    # Square roots of second moments, and the quotient.
    assert memory.update_buffers == 2 * max(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("stage", "sizes"),
    [
        # Weights, those of the generator, optimizer, gradients, activations, update.
        (1, (4, 0, 6, 4, 0, 4)),
        # A bucket as large as the model, and its copy.
        (2, (4, 0, 6, 2, 8, 4)),
        # The bucket persists; full parameters are gathered for a forward pass.
        (3, (2, 4, 6, 6, 8, 6)),
    ],
)
def test_bytes_per_element_on_two_ranks_of_each_zero_stage(
    path: str, stage: int, sizes: tuple[int, ...]
):
    memory = estimate_memory(path, TrainerConfig(world_size=2, zero_stage=stage))
    assert list(vars(memory).values())[:6] == [size * FULL // 4 for size in sizes]


@pytest.mark.parametrize(
    ("sharded", "world_size", "tensor_parallel"), [(True, 4, 1), (False, 2, 2), (True, 4, 2)]
)
def test_bytes_per_element_on_a_rank_of_a_mesh(
    path: str, sharded: bool, world_size: int, tensor_parallel: int
):
    local = FULL - CUT + CUT // tensor_parallel
    local //= world_size // tensor_parallel if sharded else 1
    trainer = TrainerConfig(
        backend="torch",
        zero_stage=3 if sharded else 1,
        world_size=world_size,
        tensor_parallel=tensor_parallel,
    )
    memory = estimate_memory(path, trainer)
    assert (memory.weights, memory.optimizer, memory.gradients) == (local, 2 * local, local)
    assert bool(memory.activations) is sharded
    # FSDP2's shards are not aliased; of the rest, all but columns are.
    aliased = 0 if sharded else local - COLUMNS // tensor_parallel
    assert memory.serving_weights == FULL - aliased


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_aliased_weights_count_once(path: str, tp_size: int):
    trained = {
        # A quarter of all matrices except columns, and all norms.
        1: (CUT - COLUMNS) // 4 + FULL - CUT,
        # Norms are not aliased.
        2: (CUT - COLUMNS) // 4,
        # All served elements but norms.
        4: CUT // 4,
    }[tp_size]
    trainer = TrainerConfig(backend="torch", world_size=4, tensor_parallel=4)

    def served(dtype: str, *, on_gpu: bool = False) -> int:
        memory = estimate_memory(path, trainer, on_gpu=on_gpu, tensor_parallel=tp_size, dtype=dtype)
        return memory.serving_weights

    assert served("auto") == FULL // tp_size - trained
    # Another dtype, or an unknown layout: nothing is aliased.
    assert served("bfloat16") == FULL // tp_size // 2
    assert served("float32", on_gpu=True) == FULL // tp_size


def test_unsplit_models_of_any_family_are_estimated(tmp_path: Path):
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=16, n_positions=8))
    model.save_pretrained(tmp_path)
    trainer = TrainerConfig(backend="torch", zero_stage=3, world_size=2)
    assert estimate_memory(str(tmp_path), trainer).weights == model.num_parameters() // 2 * 4


def test_lora_adapters_are_added_and_have_the_only_moments(path: str):
    full = estimate_memory(path, TrainerConfig())
    memory = estimate_memory(path, TrainerConfig(lora_rank=2))
    adapters = memory.weights - full.weights
    assert 0 < adapters < full.weights
    assert (memory.optimizer, memory.gradients) == (3 * adapters, adapters)


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
DENSE = Qwen2Config(**SIZES, **HEADS, intermediate_size=2048, architectures=["Qwen2ForCausalLM"])
# The first layer is dense.
MIXTURE = DeepseekV3Config(
    **SIZES,
    **{"n_routed_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 2048},
    **{"n_shared_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    architectures=["DeepseekV3ForCausalLM"],
)


@pytest.mark.parametrize(
    ("config", "tensor_parallel", "whole"),
    [
        pytest.param(DENSE, 1, 0, id="chunked"),
        pytest.param(DENSE, 2, 1024, id="tensor parallel"),
        pytest.param(MIXTURE, 1, 5 * 2048, id="mixture with shared experts"),
    ],
)
def test_the_recomputed_layer_has_its_whole_mlp_where_no_chunks_are_possible(
    tmp_path: Path, config: PreTrainedConfig, tensor_parallel: int, whole: int
):
    hidden, tokens = 64, 10
    config.save_pretrained(tmp_path)
    trainer = TrainerConfig(
        backend="torch",
        gradient_checkpointing=True,
        world_size=tensor_parallel,
        tensor_parallel=tensor_parallel,
    )
    twice, once = (
        estimate_memory(str(tmp_path), trainer, tokens=n).activations for n in (2 * tokens, tokens)
    )
    logits = 5 * 64 // tensor_parallel
    layer = max(17 * hidden, 11 * hidden + 4 * whole)
    assert twice - once == tokens * 4 * (2 * hidden + layer + logits)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_in_host_memory_takes_memory_of_a_gpu_only_in_updates(path: str, stage: int):
    plain = TrainerConfig(zero_stage=stage, dtype="float32")
    offloaded = replace(plain, offload_optimizer=True)
    held, freed = (estimate_memory(path, t, on_gpu=True) for t in (plain, offloaded))
    assert freed.optimizer == 0 < held.optimizer and freed.weights == held.weights
    if stage == 3:
        assert (freed.update_buffers, freed.gradients) == (0, held.gradients)
    else:
        # Moments and master weights take 12 bytes a parameter, two float32 copies 8.
        assert freed.update_buffers == held.optimizer * 8 // 12 + freed.weights
        assert freed.gradients < held.gradients
    assert estimate_memory(path, plain) == estimate_memory(path, offloaded)


def test_a_sharded_mixture_of_experts_is_whole_while_a_version_loads(tmp_path: Path):
    config = Qwen3MoeConfig(hidden_size=64, num_hidden_layers=2, num_experts=64, vocab_size=64)
    config.save_pretrained(tmp_path)
    plain = TrainerConfig(world_size=64, dtype="float32")
    whole, sharded = (
        estimate_memory(str(tmp_path), replace(plain, zero_stage=stage), on_gpu=True)
        for stage in (0, 3)
    )
    assert sharded.weights < whole.weights // 32
    assert sharded.update_buffers >= whole.weights


@pytest.mark.parametrize(("layers", "tokens"), [(0, 4096), (0, 16_384), (2, 8192)])
def test_the_counted_peak_of_a_large_vocabulary_is_estimated(
    tmp_path: Path, layers: int, tokens: int
):
    config = make_config("qwen2.5-0.5b", layers)
    config.save_pretrained(tmp_path)
    counted = count_peaks(config, tokens)["policy"]
    settings: dict[str, bool | str] = {"chunks": True, "offload": "offload"}
    for case, setting in settings.items():
        trainer = TrainerConfig(dtype="bfloat16", gradient_checkpointing=setting, zero_stage=1)
        memory = estimate_memory(str(tmp_path), trainer, tokens=tokens, on_gpu=True)
        assert 0.8 * counted[case] < memory.activations / GIB < 1.5 * counted[case]


MILLION = 1_000_000
#: A model of 200 M elements, four buckets, with a parameter of 10 M.
TRAINED, LARGEST = 200 * MILLION, 10 * MILLION


@pytest.mark.parametrize(
    ("settings", "held", "backward", "update"),
    [
        # AdamW of torch: roots of one parameter on a CPU, of all on a GPU.
        ({"backend": "torch"}, 0, 0, 80),
        ({"backend": "torch", "on_gpu": True}, 0, 0, 800),
        ({"zero_stage": 0, "world_size": 2}, 0, 0, 80),
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
        # In bfloat16 ZeRO 1 has the gradients twice and no bucket.
        ({"zero_stage": 1, "world_size": 2, "dtype": "bfloat16"}, 400, 0, 800),
    ],
)
def test_gradients_are_reduced_in_buckets_and_updated_as_a_flat_tensor(
    settings: dict[str, Any], held: int, backward: int, update: int
):
    chosen = {"dtype": "float32", **settings}
    on_gpu = bool(chosen.pop("on_gpu", False))
    trainer = TrainerConfig(**chosen)
    itemsize = 2 if trainer.dtype == "bfloat16" else 4
    memory = estimate_transient_memory(
        trainer, trained=TRAINED, largest=LARGEST, itemsize=itemsize, on_gpu=on_gpu
    )
    assert memory == TransientMemory(held * MILLION, backward * MILLION, update * MILLION)


SLACK = 1.25
"""Libraries loaded by the first step, and memory that the allocator keeps."""


@pytest.fixture(scope="module")
def grown(path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Mapping[str, Any]]:
    """Save a model of 29 M parameters and measure trainer ranks, by case."""
    folder = tmp_path_factory.mktemp("grown")
    sizes = {"hidden_size": 768, "intermediate_size": 2112, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = Qwen2Config(**sizes, **heads, num_hidden_layers=4, tie_word_embeddings=True)
    large = save(Qwen2ForCausalLM(config), folder / "model")
    ports = find_free_ports(len(CASES))
    results: dict[str, Any] = {}
    arguments = [(rank, large, path, ports) for rank in range(2)]
    for memory in forked.run(run_rank, arguments, timeout_s=900):
        results |= memory
    return large, results


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_measured_trainer_memory_matches_the_model(
    grown: tuple[str, Mapping[str, Any]], case: Layout
):
    path, results = grown
    estimated = replace(
        estimate_memory(path, case.make_config(), tokens=TOKENS), kv_cache=0, serving_weights=0
    )
    measured = results[case.label]
    assert (
        estimated.train_bytes / MB / SLACK < measured["peak"] < estimated.train_bytes / MB * SLACK
    )
    assert 0.8 < measured["offloaded"] / (estimated.optimizer / MB) < 1.2
