"""Memory of calls and devices: sums, the message about a shortage, and offloading of idle state."""

import math
import re
from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.engines.memory.worker_memory import CUDA_CONTEXT_BYTES
from streamrl.engines.models.model_shapes import MODEL_SHAPES
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.placement.clusters import DEVICES, GB, Cluster
from streamrl.placement.placements import Placement
from streamrl.planner.costs.constants import (
    OPTIMIZER_MEMORY_FRACTION,
    CostConstants,
)
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem, RunMemory
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.weights.config import AUTO, OBJECT_STORE
from tests.planner.notations import make_assignment

GRPO = build_dataflow(("scores", "ref_logprobs", "generator_logprobs"))
SHAPE = MODEL_SHAPES["llama-7b"]
WORK = Workload(256, 8, 512, make_fixed_lengths(512), micro_batch_tokens=8192)
RUN = RunMemory({"policy": TrainerConfig(gradient_checkpointing=True)})


def make_problem(**changes: object) -> PlacementProblem:
    base = PlacementProblem(
        GRPO,
        {"policy": SHAPE, "reference": SHAPE},
        WORK,
        Cluster.from_text("8xA100"),
        run_memory=RUN,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def make_colocated(devices: int = 8) -> Placement:
    assignment = make_assignment(f"1-1-{devices}", zero_stage=3)
    return Placement(dict.fromkeys(("generate", "train", "reference"), assignment))


def test_splits_that_the_trainer_of_the_run_refuses_are_infeasible():
    costs = CostModel(make_problem(run_memory=RunMemory({"policy": TrainerConfig(lora_rank=8)})))
    train = make_assignment("1-2-4")
    message = "train as 1-2-4: trainer.tensor_parallel=2: does not"
    assert costs.explain_infeasible(Placement({"train": train})).startswith(message)
    assert costs.call_duration_s("train", train) == float("inf")


def test_colocated_experts_are_whole_on_each_device_while_a_version_loads():
    shape = MODEL_SHAPES["qwen3-30b-a3b"]
    costs = CostModel(make_problem(models={"policy": shape}, cluster=Cluster.from_text("2x8xA100")))
    train, sharded = make_assignment("1-1-8"), make_assignment("1-1-8", zero_stage=3)
    active = [
        costs.predict_memory(Placement({"train": trainer, "generate": generator}))[
            "train"
        ].active_bytes
        for trainer, generator in (
            (sharded, train),
            (replace(train, zero_stage=1), train),
            (sharded, make_assignment("1-1-8", 8)),
        )
    ]
    whole = 2 * shape.num_params
    assert active[0] == whole
    # Stage 1 has the whole model in any case, and other devices load their own.
    assert max(active[1:]) < whole


def test_kv_cache_of_the_run_is_used_as_set():
    kv_bytes = 4 << 30
    costs = CostModel(make_problem(kv_cache_bytes=kv_bytes))
    assert costs.explain_infeasible(make_colocated()) == ""
    assert costs.compute_kv_capacity_bytes(make_colocated()) == kv_bytes
    assert costs.compute_kv_cache_bytes(make_colocated()) == kv_bytes
    tokens = costs.predict_timings(make_colocated()).generator.kv_tokens
    assert tokens == pytest.approx(kv_bytes / SHAPE.count_kv_bytes_per_token())
    # A run that was measured fits, whatever memory the plan gives its devices.
    large = CostModel(make_problem(kv_cache_bytes=70 << 30))
    assert "generate for keys and values 75.2," in large.explain_infeasible(make_colocated())
    assert large.compute_kv_capacity_bytes(make_colocated()) == 70 << 30


def test_shortage_message_sums_to_the_needed_memory():
    large = {"policy": MODEL_SHAPES["llama-34b"], "reference": MODEL_SHAPES["llama-34b"]}
    large_problem = make_problem(models=large, score_tokens={"reference": 8192})
    reason = CostModel(large_problem).explain_infeasible(make_colocated())
    match = re.fullmatch(
        r"devices 0-7: needs (\S+) GB per A100; (\S+) of 80.0 GB usable, (\S+) GB short:"
        r" resident (.*); active (.*)",
        reason,
    )
    assert match is not None, reason
    needed, usable, short = (float(number) for number in match.groups()[:3])
    assert needed - usable == pytest.approx(short, abs=0.11)
    numbers = re.findall(r" (\d+(?:\.\d+)?)(?=,|;|$)", reason.partition(" short:")[2])
    assert sum(map(float, numbers)) == pytest.approx(needed, abs=0.4)
    # Training takes most; a rollout's KV cache is a fraction of a GB.
    kv_bytes = 1024 * MODEL_SHAPES["llama-34b"].count_kv_bytes_per_token()
    assert f"active generate for keys and values {kv_bytes / GB:.2g}, train " in reason


# Offloading while other calls have the devices.

OTHER_SYSTEM = make_problem(
    workload=Workload(64, 1, 512, make_fixed_lengths(512)),
    cluster=Cluster.from_text("2x8xA100"),
    run_memory=None,
)
RESIDENT = CostConstants()
OFFLOADED = replace(RESIDENT, offloads_optimizer=True, offloads_weights=True)
HOST = 32 * GB * 0.8
"""Achieved bandwidth of an A100 to its host, bytes/s."""


def make_placement(reference: int = 0) -> Placement:
    """Train and generate on the first node; the reference starts at device `reference`."""
    node, other = make_assignment("1-1-8"), make_assignment("1-1-8", reference)
    return Placement({"train": node, "generate": node, "reference": other})


def test_pulls_follow_the_transport_of_the_run():
    whole = 2 * SHAPE.num_params
    load_s = whole / HOST
    train = make_assignment("1-1-8", zero_stage=3)
    for cluster, first, grid, transport, pull_s, pause_s in (
        # Through a file in shared memory: each rank reads its half.
        ("1x16xA100", 8, "1-2-4", AUTO, whole / 2 / 5.8e9 + load_s / 2, load_s / 2),
        # A broadcast enters a node once, and passes host memory on both sides.
        ("2x8xA100@200Gb", 8, "1-1-8", AUTO, whole / 20e9 + 3 * load_s, load_s),
        ("2x8xA100", 8, "1-1-8", OBJECT_STORE, whole / 1.2e9 + whole / 5.8e9 + load_s, load_s),
    ):
        run = RunMemory({"policy": TrainerConfig()}, transport=transport)
        problem = make_problem(models={"policy": SHAPE}, cluster=Cluster.from_text(cluster))
        costs = CostModel(replace(problem, run_memory=run), replace(RESIDENT, pull_s=0.0))
        placement = Placement({"train": train, "generate": make_assignment(grid, first)})
        timing = costs.predict_timings(placement).weights["generate"]
        assert timing.pull_s == pytest.approx(pull_s, rel=1e-3)
        assert timing.pause_s == pytest.approx(pause_s, rel=1e-3)


def test_values_are_computed_by_their_critic_without_a_copy():
    ppo = build_dataflow(("scores", "ref_logprobs", "generator_logprobs", "values"))
    critic = SHAPE.to_critic()
    trainers = {role: TrainerConfig(gradient_checkpointing=True) for role in ("policy", "critic")}
    problem = make_problem(
        dataflow=ppo,
        models={"policy": SHAPE, "reference": SHAPE, "critic": critic},
        cluster=Cluster.from_text("2x8xA100"),
        run_memory=RunMemory(trainers),
        hosts={"value": "critic"},
    )
    costs, trained = CostModel(problem), make_assignment("1-1-8", zero_stage=3)
    for value, copy in ((trained, 0), (make_assignment("1-1-8", 8), 2 * critic.num_params)):
        placement = Placement({"train_critic": trained, "value": value})
        held = costs.predict_memory(placement)["value"].resident_bytes
        assert held == (copy + CUDA_CONTEXT_BYTES if copy else 0)
        assert costs.explain_infeasible(placement) == ""
    whole = Placement({"train_critic": trained, "value": make_assignment("1-1-8")})
    assert "the ranks of critic compute it" in costs.explain_infeasible(whole)


def test_a_node_without_the_main_memory_for_offloads_refuses_them_and_says_how_much_has_enough():
    trainer = TrainerConfig(offload_optimizer=True, gradient_checkpointing=True)
    for size, refused in (("+100GB", True), ("+400GB", False)):
        problem = make_problem(
            cluster=Cluster.from_text(f"8xA100{size}"),
            run_memory=RunMemory({"policy": trainer}),
        )
        reason = CostModel(problem).explain_infeasible(
            Placement({"train": make_assignment("1-1-8", zero_stage=3)})
        )
        optimizer, versions = 16 * SHAPE.num_params, 3 * 2 * SHAPE.num_params
        needed = (optimizer + versions + 8 * (2 << 30)) / GB
        assert reason == refused * (
            f"node 0: this placement needs {needed:.1f} GB of main memory; it has 100.0,"
            f" {needed - 100:.1f} GB short: train {needed:.1f}; --cluster"
            f" 8xA100+{math.ceil(needed)}GB has enough for it"
        )


def test_the_cluster_that_has_enough_main_memory_keeps_its_other_nodes():
    trainer = TrainerConfig(offload_optimizer=True, gradient_checkpointing=True)
    cluster = Cluster.from_text("8xA100+100GB,4xH100")
    problem = make_problem(cluster=cluster, run_memory=RunMemory({"policy": trainer}))
    reason = CostModel(problem).explain_infeasible(
        Placement({"train": make_assignment("1-1-8", zero_stage=3)})
    )
    assert re.search(r"; --cluster 8xA100\+1\d\dGB,4xH100 has enough for it$", reason)


def make_run_problem(trainer: TrainerConfig) -> PlacementProblem:
    run = RunMemory({"policy": trainer})
    return replace(OTHER_SYSTEM, run_memory=run, kv_cache_bytes=1)


def test_an_optimizer_on_the_host_updates_over_the_link():
    plain, on_host = (
        CostModel(make_run_problem(TrainerConfig(offload_optimizer=on_host)), RESIDENT)
        for on_host in (False, True)
    )
    updates = [
        m.predict_timings(make_placement()).train["policy"].update_s for m in (plain, on_host)
    ]
    params = SHAPE.num_params / 8
    memory = DEVICES["A100"].memory_bytes_per_s * OPTIMIZER_MEMORY_FRACTION
    # Moments and master weights are read and written, gradients read, weights written.
    num_bytes = (2 * 12 + 4 + 2) * params
    assert updates[1] - updates[0] == pytest.approx(num_bytes / HOST - num_bytes / memory)


def test_call_with_its_own_devices_is_not_offloaded():
    separate = make_placement(8)
    resident, offloaded = (
        CostModel(OTHER_SYSTEM, constants) for constants in (RESIDENT, OFFLOADED)
    )
    assert resident.predict_timings(separate).score == offloaded.predict_timings(separate).score
    memory = [model.predict_memory(separate)["reference"] for model in (resident, offloaded)]
    assert memory[0] == memory[1]
