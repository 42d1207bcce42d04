"""The cost model as a whole: what more of something does, what does not fit, and who is told."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.dataflow import build_dataflow
from streamrl.placement.clusters import DEVICES, Cluster, DeviceSpec, NodeGroup
from streamrl.placement.costs import CostConstants, CostModel
from streamrl.placement.costs.call_cost import CallCost
from streamrl.placement.costs.call_memory import TrainStateBytes
from streamrl.placement.costs.train import train_timing
from streamrl.placement.lora_params import add_lora_adapters
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import MODEL_SHAPES
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.steady_state.estimator import PlacementEstimator
from streamrl.placement.workload import FixedLength, Workload
from streamrl.resharding import RankGrid

PPO = build_dataflow(("scores", "ref_logprobs", "values", "generator_logprobs"))
GRPO = build_dataflow(("scores", "generator_logprobs"))
WORK = Workload(256, 1, 1024, FixedLength(1024), mini_batches=8)


def assigned(text: str, first: int = 0, *, zero_stage: int = 1) -> CallAssignment:
    grid = RankGrid.from_text(text)
    return CallAssignment(Mesh(first, grid.num_ranks), grid, zero_stage)


def ppo(model: str, cluster: Cluster, workload: Workload = WORK) -> PlacementProblem:
    shape = MODEL_SHAPES[model]
    critic = shape.to_critic()
    models = {"policy": shape, "reference": shape, "critic": critic, "reward": critic}
    return PlacementProblem(PPO, models, workload, cluster)


def grpo(model: str, cluster: Cluster, workload: Workload = WORK) -> PlacementProblem:
    return PlacementProblem(GRPO, {"policy": MODEL_SHAPES[model]}, workload, cluster)


def colocated(problem: PlacementProblem, train: str, generate: str) -> Placement:
    calls = {stage: assigned(train) for stage in problem.placed_stages}
    return Placement({**calls, "generate": assigned(generate)})


A100 = Cluster.from_text("2x8xA100@200Gb")


def test_every_call_and_every_version_has_its_seconds() -> None:
    problem = ppo("llama-7b", A100)
    timings = CostModel(problem).predict_timings(colocated(problem, "1-8-2", "1-2-8"))
    assert timings.generator.replicas == 8
    assert set(timings.score) == {"reward", "reference", "value"}
    assert set(timings.train) == {"policy", "critic"}
    assert set(timings.weights) == {"generate", "value"}
    assert timings.train["policy"].dp_size == 2


def test_a_reward_that_is_a_rule_takes_no_devices() -> None:
    problem = grpo("llama-7b", A100)
    timings = CostModel(problem).predict_timings(colocated(problem, "1-8-2", "1-2-8"))
    assert set(timings.score) == {"reward"}
    assert timings.score["reward"].token_s == 0.0


def test_one_decode_step_by_hand() -> None:
    # 13.2 GB of weights and 0.5 MiB a token over 2 devices of 1000 GB/s, without anything else.
    plain = CostConstants(
        decode_memory_fraction=1.0,
        decode_step_s=0.0,
        decode_rollout_s=0.0,
        collective_s=0.0,
        link_hop_s=0.0,
        link_fraction=1.0,
    )
    device = replace(DEVICES["A100"], memory_bytes_per_s=1e12, link_bytes_per_s=1e11)
    problem = grpo("llama-7b", Cluster((NodeGroup(device, 4),)))
    timing = CostModel(problem, plain).predict_timings(
        Placement({"train": assigned("1-2-1"), "generate": assigned("1-2-1", 2)})
    )
    norms = 65 * 4096 * 2
    read = (MODEL_SHAPES["llama-7b"].num_params - 32000 * 4096) * 2
    generator = timing.generator
    assert generator.weights_s == pytest.approx((read + norms) / 2 / 1e12)
    assert generator.kv_token_s == pytest.approx(524288 / 2 / 1e12)
    # 64 sums of 8 KiB, each rank sends and receives all of it once.
    assert generator.rollout_s == pytest.approx(64 * 8192 / 1e11)
    assert generator.step_s == 0.0


def test_pipelined_sampling_reads_the_weights_once_for_each_part() -> None:
    problem = grpo("llama-7b", A100)
    model = CostModel(problem)
    of = {
        text: model.predict_timings(
            Placement({"train": assigned("1-8-1"), "generate": assigned(text, 8)})
        ).generator
        for text in ("1-4-2", "2-4-1")
    }
    assert of["2-4-1"].weights_s == pytest.approx(of["1-4-2"].weights_s, rel=0.01)
    assert of["2-4-1"].kv_token_s == of["1-4-2"].kv_token_s / 2
    assert of["2-4-1"].kv_tokens > 2 * of["1-4-2"].kv_tokens


def lora(cluster: Cluster, rank: int = 16) -> PlacementProblem:
    return PlacementProblem(
        GRPO, {"policy": add_lora_adapters(MODEL_SHAPES["llama-7b"], rank)}, WORK, cluster
    )


def test_adapters_shrink_gradients_optimizer_and_what_is_reduced_and_skip_products() -> None:
    whole, shape = MODEL_SHAPES["llama-7b"], add_lora_adapters(MODEL_SHAPES["llama-7b"], 16)
    plain = replace(
        CostConstants(), update_s=0.0, collective_s=0.0, link_hop_s=0.0, recompute=False
    )
    device = replace(DEVICES["A100"], memory_bytes_per_s=1e12)
    cluster = Cluster((NodeGroup(device, 8),))
    of = assigned("1-1-8")
    full, some = (CallCost(each, of, WORK, cluster, plain) for each in (whole, shape))
    part = shape.adapter_params / whole.num_params
    # Reduction, and reading and writing the optimizer's state, are of what is trained.
    timings = [train_timing(each) for each in (full, some)]
    assert timings[1].update_s == pytest.approx(part * timings[0].update_s)
    # A token has its products three times; of frozen weights twice. Attention has no weights.
    products = full.compute_s(2 * whole.active_matmul_params, plain.train_flops_fraction)
    pairs = products * shape.adapter_params / whole.active_matmul_params
    saved = timings[0].token_s - timings[1].token_s
    assert saved == pytest.approx(products - 3 * pairs)
    # Weights stay, with the adapters beside them; the rest is the adapters' alone.
    states = [TrainStateBytes.from_call_cost(each) for each in (full, some)]
    assert states[1].weights == pytest.approx((1 + part) * states[0].weights)
    assert states[1].gradients == pytest.approx(part * states[0].gradients)
    assert states[1].optimizer == pytest.approx(part * states[0].optimizer)


def test_adapters_travel_alone_and_are_merged_into_weights_that_the_host_has() -> None:
    shape, whole = add_lora_adapters(MODEL_SHAPES["llama-7b"], 16), MODEL_SHAPES["llama-7b"]
    placement = Placement({"train": assigned("1-1-8"), "generate": assigned("1-1-8", 8)})
    sent = CostModel(lora(A100)).estimate_transfer("generate", placement)
    full = CostModel(grpo("llama-7b", A100)).approximate_costs.estimate_transfer(
        "generate", placement
    )
    assert sent is not None and full is not None
    part = shape.adapter_params / whole.num_params
    assert sent.received_bytes == round(part * full.received_bytes) == 2 * shape.adapter_params
    constants, host = CostConstants(), DEVICES["A100"].host_bytes_per_s
    reading_s = 2 * whole.num_params / (host * constants.host_fraction)
    assert sent.seconds == pytest.approx(part * full.seconds + reading_s)
    # On the same devices as well they are merged into a copy.
    beside = CostModel(lora(A100)).estimate_transfer(
        "generate", colocated(lora(A100), "1-1-16", "1-1-16")
    )
    assert beside is not None and beside.extra_bytes == 2 * whole.num_params


def test_a_model_too_large_to_train_whole_is_trained_with_adapters() -> None:
    # 13.5 GB of weights and 16 bytes more of each parameter that is trained, on 80 GB.
    placement = Placement({"train": assigned("1-1-1"), "generate": assigned("1-1-1", 1)})
    assert CostModel(grpo("llama-7b", A100)).explain_infeasible(placement)
    assert not CostModel(lora(A100)).explain_infeasible(placement)


def test_zero_and_pipelines_cost_what_they_add() -> None:
    model = CostModel(grpo("llama-7b", A100))

    def train_s(text: str, zero_stage: int = 1) -> float:
        return model.call_duration_s("train", assigned(text, zero_stage=zero_stage))

    assert train_s("1-8-2", 3) > train_s("1-8-2", 1)


def test_a_pipeline_is_filled_by_two_micro_batches_a_stage() -> None:
    # 32 rollouts an update of one replica: 8 micro-batches in 4 stages take 11 / 8 of the time.
    large = replace(WORK, micro_batch_tokens=1 << 20)
    free = CostConstants(half_width=0.0)
    device = replace(DEVICES["A100"], link_bytes_per_s=1e30, network_bytes_per_s=1e30)
    model = CostModel(grpo("llama-7b", Cluster((NodeGroup(device, 8, 2),)), large), free)

    def token_s(text: str) -> float:
        placement = Placement({"train": assigned(text), "generate": assigned("1-4-2", 8)})
        return model.predict_timings(placement).train["policy"].token_s

    assert token_s("4-2-1") / token_s("1-8-1") == pytest.approx(11 / 8)
    # One micro-batch of 4 rollouts cannot be divided into 8.
    few = CostModel(
        replace(model.problem, workload=replace(large, groups_per_step=32)), model.constants
    )
    placement = Placement({"train": assigned("4-2-1"), "generate": assigned("1-4-2", 8)})
    assert few.predict_timings(placement).train["policy"].token_s / token_s(
        "1-8-1"
    ) == pytest.approx(7 / 4)


def test_epochs_repeat_passes_and_updates() -> None:
    once = CostModel(grpo("llama-7b", A100)).call_duration_s("train", assigned("1-8-2"))
    twice = CostModel(grpo("llama-7b", A100, replace(WORK, epochs=2)))
    step_s = twice.constants.train_step_s
    assert twice.call_duration_s("train", assigned("1-8-2")) - step_s == pytest.approx(
        2 * (once - step_s)
    )


def test_too_little_memory_is_said_in_one_line() -> None:
    problem = ppo("llama-70b", A100)
    model = CostModel(problem)
    why = model.explain_infeasible(colocated(problem, "2-8-1", "1-8-2"))
    assert why.startswith("devices 0-15: ")
    assert "\n" not in why
    for said in ("A100", "68.0 of 80.0", "train ", "train_critic ", "active train "):
        assert said in why


def test_too_little_for_one_rollout_is_said_too() -> None:
    long = replace(WORK, lengths=FixedLength(200_000), groups_per_step=16)
    problem = grpo("llama-7b", A100, long)
    why = CostModel(problem).explain_infeasible(
        Placement({"train": assigned("1-8-1"), "generate": assigned("1-1-8", 8)})
    )
    assert why.startswith("devices 8-15: ")
    assert "keys and values" in why


def test_what_does_not_divide_is_said() -> None:
    problem = grpo("qwen2.5-0.5b", A100)
    model = CostModel(problem)
    assert "layer.0.qkv" in model.explain_infeasible(colocated(problem, "1-8-2", "1-1-16"))
    few = CostModel(grpo("qwen2.5-0.5b", A100, replace(WORK, groups_per_step=8, mini_batches=1)))
    why = few.explain_infeasible(colocated(problem, "1-1-16", "1-1-16"))
    assert why == "generate as 1-1-16: 16 replicas for 8 rollouts"
    assert few.call_duration_s("train", assigned("1-1-16")) == float("inf")


def test_what_fits_holds_no_more_than_devices_have() -> None:
    problem = ppo("llama-7b", A100)
    model = CostModel(problem)
    placement = colocated(problem, "1-8-2", "1-2-8")
    assert model.explain_infeasible(placement) == ""
    memory = model.predict_memory(placement)
    kept = sum(each.resident_bytes for each in memory.values())
    assert all(kept + each.active_bytes <= 68e9 * (1 + 1e-9) for each in memory.values())
    # 2 bytes and 4, and 12 shared out over two replicas, of an eighth of the parameters.
    assert memory["train"].resident_bytes == pytest.approx(6.74e9 / 8 * 12, rel=0.01)
    assert memory["generate"].resident_bytes == memory["value"].resident_bytes == 0.0


def test_what_is_served_lies_in_what_is_trained_where_it_can() -> None:
    # Of half of the model an eighth is there already. It comes with each version, or it stays.
    beside = 13.48e9 * (1 / 2 - 1 / 8)
    problem = ppo("llama-7b", A100)
    placement = colocated(problem, "1-8-2", "1-2-8")
    kept, room = [], []
    for keeps in (False, True):
        model = CostModel(problem, CostConstants(keeps_served=keeps))
        kept.append(model.predict_memory(placement)["generate"].resident_bytes)
        room.append(model.predict_timings(placement).generator.kv_tokens)
    assert kept == [0.0, pytest.approx(beside, rel=0.01)]
    assert room[0] == pytest.approx(room[1])


def test_keys_and_values_get_what_the_others_leave() -> None:
    problem = ppo("llama-7b", A100)
    model = CostModel(problem)
    beside = model.predict_timings(colocated(problem, "1-8-2", "1-2-8")).generator.kv_tokens
    small = CostModel(grpo("llama-7b", A100))
    alone = small.predict_timings(colocated(small.problem, "1-8-2", "1-2-8")).generator.kv_tokens
    assert alone > beside


def test_room_for_keys_and_values_is_that_of_the_timings() -> None:
    problem = ppo("llama-7b", A100)
    costs, placement = CostModel(problem), colocated(problem, "1-8-2", "1-2-8")
    tokens = costs.predict_timings(placement).generator.kv_tokens
    assert costs.kv_capacity_bytes(placement) == pytest.approx(tokens * 524288 / 2)
    # Fewer calls on the same devices leave more.
    alone = Placement({"generate": placement.assignments["generate"]})
    assert costs.kv_capacity_bytes(alone) > costs.kv_capacity_bytes(placement)


def test_calls_of_one_role_keep_its_weights_once() -> None:
    remax = build_dataflow(("scores", "baseline_scores", "generator_logprobs"))
    shape = MODEL_SHAPES["llama-7b"]
    models = {"policy": shape, "reward": shape.to_critic()}
    problem = PlacementProblem(remax, models, WORK, A100)
    memory = CostModel(problem).predict_memory(colocated(problem, "1-8-2", "1-8-2"))
    assert memory["reward"].resident_bytes == pytest.approx((13.48e9 - 0.26e9) / 8, rel=0.01)
    assert memory["baseline"].resident_bytes == 0.0


def scaled(device: DeviceSpec, **times: float) -> DeviceSpec:
    return replace(device, **{key: vars(device)[key] * by for key, by in times.items()})


@given(
    st.sampled_from(["flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "memory_bytes"]),
    st.floats(1.0, 4.0),
    st.sampled_from(["1-8-2", "2-4-2", "1-2-8", "2-8-1"]),
    st.sampled_from(["train", "generate", "reference"]),
)
def test_more_of_a_device_is_never_slower(key: str, by: float, grid: str, stage: str) -> None:
    seconds = []
    for device in (DEVICES["A100"], scaled(DEVICES["A100"], **{key: by})):
        model = CostModel(ppo("llama-7b", Cluster((NodeGroup(device, 8, 2, 25e9),))))
        seconds.append(model.call_duration_s(stage, assigned(grid)))
    assert seconds[1] <= seconds[0]


@given(st.floats(1.0, 8.0), st.integers(1, 4))
def test_more_network_and_less_work_are_never_slower(by: float, groups: int) -> None:
    slow, fast = (Cluster((NodeGroup(DEVICES["A100"], 8, 2, 25e9 * x),)) for x in (1.0, by))
    more = replace(WORK, groups_per_step=WORK.groups_per_step * groups)
    placement = colocated(ppo("llama-7b", slow), "2-8-1", "1-8-2")
    for stage, assignment in placement.assignments.items():
        base = CostModel(ppo("llama-7b", slow)).call_duration_s(stage, assignment)
        assert CostModel(ppo("llama-7b", fast)).call_duration_s(stage, assignment) <= base
        assert (
            CostModel(ppo("llama-7b", slow, more)).call_duration_s(stage, assignment) >= base * 0.99
        )
    pulls = [
        CostModel(ppo("llama-7b", each)).predict_timings(placement).weights["generate"].pull_s
        for each in (slow, fast)
    ]
    assert pulls[1] <= pulls[0]


def test_who_is_elsewhere_is_served_over_the_network() -> None:
    problem = grpo("llama-7b", A100)
    model = CostModel(problem)
    apart = model.predict_timings(
        Placement({"train": assigned("1-8-1"), "generate": assigned("1-8-1", 8)})
    )
    constants = model.constants
    network = 25e9 * constants.network_fraction
    pull_s = constants.pull_s + 13.48e9 / network
    assert apart.weights["generate"].pull_s == pytest.approx(pull_s, rel=0.01)
    assert apart.weights["generate"].publish_s == constants.publish_s


def test_how_long_a_batch_takes_does_not_depend_on_what_is_filtered() -> None:
    found = []
    for share in (0.0, 0.75):
        problem = grpo("llama-7b", A100, replace(WORK, filtered_fraction=share))
        timings = CostModel(problem).predict_timings(colocated(problem, "1-8-2", "1-2-8"))
        found.append((timings.score["reward"].batch_s, timings.train["policy"]))
    assert found[1] == found[0]


def test_a_step_has_rewards_of_all_groups_that_are_sampled_each_as_long_as_it_takes() -> None:
    found, parts = [], []
    for share in (0.0, 0.75):
        problem = grpo("llama-7b", A100, replace(WORK, filtered_fraction=share))
        placement = colocated(problem, "1-8-2", "1-2-8")
        jobs, _ = PlacementEstimator(problem, CostModel(problem)).schedule_jobs(placement)
        found.append(jobs.timings.score["reward"])
        (reward,) = (job for job in jobs.jobs if job.stage == "reward")
        parts.append(sum(reward.parts))
    assert found[1] == found[0]
    assert parts[1] == pytest.approx(4 * parts[0])
    # And who takes the place of a filtered group waits for the score of that one alone.
    rollouts, tokens = WORK.group_size, WORK.group_size * WORK.rollout_tokens
    one_s = found[0].batch_duration_s(rollouts, tokens)
    assert jobs.refill_s == pytest.approx(2 * jobs.timings.hop_s + one_s)
