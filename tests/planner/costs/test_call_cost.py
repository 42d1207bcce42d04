"""Parameters, FLOPs and KV bytes by hand; expert parallelism."""

from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES, ModelShape
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import Placement
from streamrl.planner.costs.call_cost import (
    count_forward_flops,
    count_stage_params,
    find_max_stage_params,
)
from streamrl.planner.costs.call_timings import count_kv_token_bytes
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


def test_pipeline_and_tensor_ranks_split_the_keys_and_values():
    shape, constants = MODEL_SHAPES["llama-70b"], CostConstants()
    assert count_kv_token_bytes(shape, 1, 1, constants) == 327680
    assert count_kv_token_bytes(shape, 8, 2, constants) == 327680 / 16


def test_pipeline_and_tensor_ranks_split_the_parameters():
    shape = MODEL_SHAPES["llama-7b"]
    norms = (2 * 32 + 1) * 4096
    assert sum(count_stage_params(shape, 4, 8)) == (shape.num_params - norms) / 8 + norms
    assert find_max_stage_params(shape, 4, 8) < 1.1 * shape.num_params / 32


GRPO = build_dataflow(("scores", "generator_logprobs"))
# 4 layers of 16 experts with 3 * 64 * 32 parameters; a token uses 2 experts.
SMALL = ModelShape("small", 4, 64, 32, 4, 4, 128, 16, experts=16, experts_per_token=2)
ROUTED = 4 * 16 * 3 * 64 * 32
CLUSTER = Cluster.from_text("2x8xH100")
WORKLOAD = Workload(64, 1, 64, make_fixed_lengths(64))


def test_expert_rank_holds_its_experts_and_the_rest():
    assert SMALL.routed_params == ROUTED
    assert find_max_stage_params(SMALL, 1, 1, 8) == SMALL.num_params - ROUTED + ROUTED // 8
    # Tensor-parallel ranks also split the rest, except norms and routers.
    unsplit = 9 * 64 + 4 * 64 * 16
    split_params = SMALL.num_params - ROUTED - unsplit
    assert find_max_stage_params(SMALL, 1, 2, 8) == split_params // 2 + unsplit + ROUTED // 8


def test_indivisible_experts_are_infeasible():
    for shape, ranks, experts in ((SMALL, 12, 16), (MODEL_SHAPES["llama-7b"], 8, 0)):
        costs = CostModel(PlacementProblem(GRPO, {"policy": shape}, WORKLOAD, CLUSTER))
        train = make_assignment(f"1-1-{ranks}", experts=ranks)
        placement = Placement({"train": train, "generate": make_assignment("1-1-1", ranks)})
        expected = f"train as 1-1-{ranks}: {experts} experts over {ranks} expert ranks"
        assert costs.explain_infeasible(placement) == expected
