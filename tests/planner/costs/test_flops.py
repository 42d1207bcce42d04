"""FLOPs, parameters and KV bytes against figures worked out by hand."""

import pytest

from streamrl.engines.models.model_shapes import MODEL_SHAPES
from streamrl.planner.costs.call_cost import (
    count_forward_flops,
    count_stage_params,
    find_max_stage_params,
)
from streamrl.planner.costs.call_timings import count_decode_step_params, count_kv_token_bytes
from streamrl.planner.costs.constants import CostConstants


def test_forward_flops_equal_reals_formula_without_embedding():
    shape, tokens, squares = MODEL_SHAPES["llama-7b"], 2 * 2048, 2 * 2048**2
    layers, hidden, intermediate, vocab = 32, 4096, 11008, 32000
    layer_flops = 4 * tokens * hidden**2 + 2 * hidden * squares + 3 * tokens * hidden * intermediate
    published = 2 * layers * layer_flops + 4 * tokens * vocab * hidden
    embedding = 2 * tokens * vocab * hidden
    assert count_forward_flops(shape, tokens, squares) == published - embedding


def test_critic_skips_the_vocabulary_head():
    shape = MODEL_SHAPES["llama-7b"]
    less = count_forward_flops(shape, 1, 0) - count_forward_flops(shape.to_critic(), 1, 0)
    assert less == 2 * 4096 * (32000 - 1)


@pytest.mark.parametrize(
    ("model", "num_bytes"),
    [("llama-7b", 524288), ("llama-13b", 819200), ("llama-70b", 327680), ("llama-34b", 196608)],
)
def test_kv_bytes_per_token(model: str, num_bytes: int):
    assert count_kv_token_bytes(MODEL_SHAPES[model], 1, 1, CostConstants()) == num_bytes
    assert count_kv_token_bytes(MODEL_SHAPES[model], 8, 2, CostConstants()) == num_bytes / 16


def test_pipeline_and_tensor_ranks_split_the_parameters():
    shape = MODEL_SHAPES["llama-7b"]
    norms = (2 * 32 + 1) * 4096
    assert sum(count_stage_params(shape, 4, 8)) == (shape.num_params - norms) / 8 + norms
    assert find_max_stage_params(shape, 4, 8) < 1.1 * shape.num_params / 32


def test_indivisible_tensor_is_named():
    with pytest.raises(ValueError, match=r"layer\.0\.qkv"):
        find_max_stage_params(MODEL_SHAPES["qwen2.5-0.5b"], 1, 8)
    with pytest.raises(ValueError, match="40 pipeline stages"):
        find_max_stage_params(MODEL_SHAPES["llama-7b"], 40, 1)


def test_decode_step_reads_more_experts_with_more_rollouts():
    shape = MODEL_SHAPES["qwen3-30b-a3b"]
    experts = 48 * 128 * 3 * 2048 * 768
    dense_params = count_decode_step_params(shape, 1, 1, 1e9) - experts
    # One token uses 8 of 128 experts.
    assert count_decode_step_params(shape, 1, 1, 1) == pytest.approx(dense_params + experts / 16)
    # Two tokens miss an expert with probability (15/16)^2.
    expected = dense_params + experts * (1 - (15 / 16) ** 2)
    assert count_decode_step_params(shape, 1, 1, 2) == pytest.approx(expected)
