"""The cost model as a whole: monotonicity, infeasible placements, weight transfers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES, add_adapter_params
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.placement.clusters import DEVICES, Cluster, NodeGroup
from streamrl.placement.placements import Placement
from streamrl.planner.costs.call_cost import CallCost
from streamrl.planner.costs.call_timings import estimate_train_timing
from streamrl.planner.costs.constants import HOST_FRACTION, CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.costs.memory import TrainStateBytes
from streamrl.planner.costs.traffic import WeightTraffic
from streamrl.planner.problem.problem import PlacementProblem, RunMemory
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from tests.planner.notations import make_assignment

PPO = build_dataflow(("scores", "ref_logprobs", "values", "generator_logprobs"))
GRPO = build_dataflow(("scores", "generator_logprobs"))
WORK = Workload(256, 1, 1024, make_fixed_lengths(1024), mini_batches=8)


def make_ppo_problem(model: str, cluster: Cluster, workload: Workload = WORK) -> PlacementProblem:
    shape = MODEL_SHAPES[model]
    critic = shape.to_critic()
    models = {"policy": shape, "reference": shape, "critic": critic, "reward": critic}
    return PlacementProblem(PPO, models, workload, cluster)


def make_grpo_problem(model: str, cluster: Cluster, workload: Workload = WORK) -> PlacementProblem:
    return PlacementProblem(GRPO, {"policy": MODEL_SHAPES[model]}, workload, cluster)


def colocate(problem: PlacementProblem, train: str, generate: str) -> Placement:
    calls = {stage: make_assignment(train) for stage in problem.placed_stages}
    return Placement({**calls, "generate": make_assignment(generate)})


A100 = Cluster.from_text("2x8xA100@200Gb")


def test_decode_step_by_hand():
    # 13.2 GB of weights and 0.5 MiB per token over 2 devices of 1000 GB/s, without overheads.
    plain = CostConstants(
        decode_memory_fraction=1.0,
        decode_step_s=0.0,
        decode_rollout_s=0.0,
        collective_s=0.0,
        link_hop_s=0.0,
        link_fraction=1.0,
    )
    device = replace(DEVICES["A100"], memory_bytes_per_s=1e12, link_bytes_per_s=1e11)
    problem = make_grpo_problem("llama-7b", Cluster((NodeGroup(device, 4),)))
    calls = {"train": make_assignment("1-2-1"), "generate": make_assignment("1-2-1", 2)}
    timing = CostModel(problem, plain).predict_timings(Placement(calls))
    norms = 65 * 4096 * 2
    weight_bytes = (MODEL_SHAPES["llama-7b"].num_params - 32000 * 4096) * 2
    generator = timing.generator
    assert generator.weights_s == pytest.approx((weight_bytes + norms) / 2 / 1e12)
    assert generator.kv_token_s == pytest.approx(524288 / 2 / 1e12)
    # 64 all-reduces of 8 KiB; each rank sends and receives the buffer once.
    assert generator.rollout_s == pytest.approx(64 * 8192 / 1e11)
    assert generator.step_s == 0.0


def test_adapters_shrink_training_state_and_skip_products():
    base, shape = MODEL_SHAPES["llama-7b"], add_adapter_params(MODEL_SHAPES["llama-7b"], 16)
    plain = replace(
        CostConstants(), update_s=0.0, collective_s=0.0, link_hop_s=0.0, recompute=False
    )
    device = replace(DEVICES["A100"], memory_bytes_per_s=1e12)
    cluster = Cluster((NodeGroup(device, 8),))
    assignment = make_assignment("1-1-8")
    full, adapted = (CallCost(item, assignment, WORK, cluster, plain) for item in (base, shape))
    fraction = shape.adapter_params / base.num_params
    # Gradient reduction and optimizer traffic cover only trained parameters.
    timings = [estimate_train_timing(item) for item in (full, adapted)]
    assert timings[1].update_s == pytest.approx(fraction * timings[0].update_s)
    # A token has three products per weight, two per frozen weight. Attention has no weights.
    products = full.compute_s(2 * base.active_matmul_params, plain.train_flops_fraction)
    adapter_s = products * shape.adapter_params / base.active_matmul_params
    saved = timings[0].token_s - timings[1].token_s
    assert saved == pytest.approx(products - 3 * adapter_s)
    # Weights stay, beside the adapters; gradients and optimizer are those of the adapters.
    states = [TrainStateBytes.from_call_cost(item) for item in (full, adapted)]
    assert states[1].weights == pytest.approx((1 + fraction) * states[0].weights)
    assert states[1].gradients == pytest.approx(fraction * states[0].gradients)
    assert states[1].optimizer == pytest.approx(fraction * states[0].optimizer)


def test_adapters_travel_alone_and_merge_into_host_weights():
    shape, base = add_adapter_params(MODEL_SHAPES["llama-7b"], 16), MODEL_SHAPES["llama-7b"]
    traffic = WeightTraffic(A100, CostConstants())
    train, generate = make_assignment("1-1-8"), make_assignment("1-1-8", 8)
    sent, full = (traffic.estimate_transfer(item, train, generate) for item in (shape, base))
    fraction = shape.adapter_params / base.num_params
    host = DEVICES["A100"].host_bytes_per_s
    reading_s = 2 * base.num_params / (host * HOST_FRACTION)
    assert sent.seconds == pytest.approx(fraction * full.seconds + reading_s)
    # On shared devices adapters are merged into a copy, too.
    shared = traffic.estimate_transfer(shape, train, train)
    assert shared.extra_bytes == 2 * base.num_params


def test_indivisible_model_is_explained():
    problem = make_grpo_problem("qwen2.5-0.5b", A100)
    model = CostModel(problem)
    assert "layer.0.qkv" in model.explain_infeasible(colocate(problem, "1-8-2", "1-1-16"))
    few = CostModel(
        make_grpo_problem("qwen2.5-0.5b", A100, replace(WORK, groups_per_step=8, mini_batches=1))
    )
    reason = few.explain_infeasible(colocate(problem, "1-1-16", "1-1-16"))
    assert reason == "generate as 1-1-16: 16 replicas for 8 rollouts"
    assert few.call_duration_s("train", make_assignment("1-1-16")) == float("inf")


def test_kv_cache_gets_the_memory_left_over():
    problem = make_ppo_problem("llama-7b", A100)
    model = CostModel(problem)
    ppo_tokens = model.predict_timings(colocate(problem, "1-8-2", "1-2-8")).generator.kv_tokens
    small = CostModel(make_grpo_problem("llama-7b", A100))
    grpo_tokens = small.predict_timings(
        colocate(small.problem, "1-8-2", "1-2-8")
    ).generator.kv_tokens
    assert grpo_tokens > ppo_tokens


@given(st.floats(1.0, 8.0), st.integers(1, 4))
def test_faster_networks_and_smaller_workloads_are_never_slower(factor: float, groups: int):
    slow, fast = (Cluster((NodeGroup(DEVICES["A100"], 8, 2, 25e9 * x),)) for x in (1.0, factor))
    larger = replace(WORK, groups_per_step=WORK.groups_per_step * groups)
    placement = colocate(make_ppo_problem("llama-7b", slow), "2-8-1", "1-8-2")
    for stage, assignment in placement.assignments.items():
        base, on_fast, of_larger = (
            CostModel(make_ppo_problem("llama-7b", *case)).call_duration_s(stage, assignment)
            for case in ((slow,), (fast,), (slow, larger))
        )
        assert on_fast <= base <= of_larger / 0.99
    pulls = [
        CostModel(make_ppo_problem("llama-7b", cluster))
        .predict_timings(placement)
        .weights["generate"]
        .pull_s
        for cluster in (slow, fast)
    ]
    assert pulls[1] <= pulls[0]


def test_a_run_on_cpus_scores_each_group_alone_except_with_reward_models():
    groups, run = 16, RunMemory({"policy": TrainerConfig(), "critic": TrainerConfig()})
    work = Workload(groups, 2, 16, make_fixed_lengths(16))
    batches = {}
    for devices in ("8xA100", "8xCPU"):
        problem = make_ppo_problem("llama-7b", Cluster.from_text(devices), work)
        costs = CostModel(replace(problem, run_memory=run))
        score = costs.predict_timings(colocate(problem, "1-1-8", "1-1-8")).score
        batches[devices] = {stage: timing.batch for stage, timing in score.items()}
    assert batches["8xA100"] == {"reward": groups, "reference": groups, "value": groups}
    assert batches["8xCPU"] == {"reward": groups, "reference": 1, "value": 1}
