"""Parameters, FLOPs and KV bytes by hand; expert parallelism."""

from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES, ModelShape
from streamrl.placement.clusters import DEVICES, Cluster, NodeGroup
from streamrl.placement.placements import Placement
from streamrl.planner.costs.call_cost import (
    count_forward_flops,
    count_stage_params,
    find_max_stage_params,
)
from streamrl.planner.costs.call_timings import count_decode_step_params, count_kv_token_bytes
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from tests.planner.notations import make_assignment


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


def test_decode_step_reads_more_experts_with_more_rollouts():
    shape = MODEL_SHAPES["qwen3-30b-a3b"]
    experts = 48 * 128 * 3 * 2048 * 768
    dense_params = count_decode_step_params(shape, 1, 1, 1e9) - experts
    # One token uses 8 of 128 experts.
    assert count_decode_step_params(shape, 1, 1, 1) == pytest.approx(dense_params + experts / 16)
    # Two tokens miss an expert with probability (15/16)^2.
    expected = dense_params + experts * (1 - (15 / 16) ** 2)
    assert count_decode_step_params(shape, 1, 1, 2) == pytest.approx(expected)


GRPO = build_dataflow(("scores", "generator_logprobs"))
# 4 layers of 16 experts with 3 * 64 * 32 parameters; a token uses 2 experts.
SMALL = ModelShape("small", 4, 64, 32, 4, 4, 128, 16, experts=16, experts_per_token=2)
ROUTED = 4 * 16 * 3 * 64 * 32
CLUSTER = Cluster((NodeGroup(replace(DEVICES["H100"], link_bytes_per_s=1e11), 8, 2, 8e10),))
PLAIN = CostConstants(link_fraction=1.0, network_fraction=1.0)
WORKLOAD = Workload(64, 1, 64, make_fixed_lengths(64))


def make_problem(shape: ModelShape = SMALL) -> PlacementProblem:
    return PlacementProblem(GRPO, {"policy": shape}, WORKLOAD, CLUSTER)


def place_experts(expert: int) -> Placement:
    """Train with expert ranks on devices 0 to 7; generate without on 8 to 15."""
    train = make_assignment("1-1-8", experts=expert)
    return Placement({"train": train, "generate": make_assignment("1-1-8", 8)})


def test_expert_rank_holds_its_experts_and_the_rest():
    assert SMALL.routed_params == ROUTED
    assert find_max_stage_params(SMALL, 1, 1, 8) == SMALL.num_params - ROUTED + ROUTED // 8
    # Tensor-parallel ranks also split the rest, except norms and routers.
    unsplit = 9 * 64 + 4 * 64 * 16
    split_params = SMALL.num_params - ROUTED - unsplit
    assert find_max_stage_params(SMALL, 1, 2, 8) == split_params // 2 + unsplit + ROUTED // 8


def test_indivisible_experts_are_infeasible():
    costs = CostModel(make_problem())
    train = make_assignment("1-1-12", experts=12)
    calls = {"train": train, "generate": make_assignment("1-1-1", 12)}
    expected = "train as 1-1-12: 16 experts over 12 expert ranks"
    assert costs.explain_infeasible(Placement(calls)) == expected
    dense = CostModel(make_problem(MODEL_SHAPES["llama-7b"]))
    assert "0 experts over 8 expert ranks" in dense.explain_infeasible(place_experts(8))


def test_expert_layer_host_time_counts_per_pass():
    slow = replace(PLAIN, expert_layer_s=0.01, recompute=False)
    times = [
        CostModel(make_problem(), constants)
        .predict_timings(place_experts(8))
        .train["policy"]
        .micro_batch_s
        for constants in (slow, replace(slow, expert_layer_s=0.0))
    ]
    # 3 passes over 4 layers.
    assert times[0] - times[1] == pytest.approx(0.12)
