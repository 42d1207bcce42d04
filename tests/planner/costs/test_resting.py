"""Offloading of weights and optimizer state while other calls have the devices."""

from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.placement.clusters import DEVICES, GB, Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.constants import OPTIMIZER_MEMORY_FRACTION, CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem, RunMemory
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.resharding.grids import RankGrid

GRPO = build_dataflow(("scores", "ref_logprobs", "generator_logprobs"))
SHAPE = MODEL_SHAPES["llama-7b"]
PROBLEM = PlacementProblem(
    GRPO,
    {"policy": SHAPE, "reference": SHAPE},
    Workload(64, 1, 512, make_fixed_lengths(512)),
    Cluster.from_text("2x8xA100"),
)
RESIDENT = CostConstants()
OPTIMIZER_OFFLOADED = replace(RESIDENT, offloads_optimizer=True)
OFFLOADED = replace(OPTIMIZER_OFFLOADED, offloads_weights=True)
HOST = 32 * GB * 0.8
"""Achieved bandwidth of an A100 to its host, bytes/s."""


def make_placement(reference: int = 0) -> Placement:
    """Train and generate on the first node; the reference starts at device `reference`."""
    node = CallAssignment(Mesh(0, 8), RankGrid(1, 1, 8))
    return Placement(
        {"train": node, "generate": node, "reference": replace(node, mesh=Mesh(reference, 8))}
    )


def make_run_problem(trainer: TrainerConfig) -> PlacementProblem:
    run = RunMemory({"policy": trainer})
    return replace(PROBLEM, run_memory=run, kv_cache_bytes=1)


def test_trained_state_moves_from_and_to_the_host_once_a_step():
    steps = [
        CostModel(PROBLEM, constants).predict_timings(make_placement()).train["policy"].step_s
        for constants in (RESIDENT, OPTIMIZER_OFFLOADED, OFFLOADED)
    ]
    optimizer, weights = 12 * SHAPE.num_params / 8, 2 * SHAPE.num_params
    assert steps[1] - steps[0] == pytest.approx(2 * optimizer / HOST)
    assert steps[2] - steps[0] == pytest.approx(2 * (optimizer + weights) / HOST)


def test_an_optimizer_on_the_host_takes_no_device_memory_and_updates_over_the_link():
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
    held = [m.predict_memory(make_placement())["train"].resident_bytes for m in (plain, on_host)]
    # Gradients in float32 and bfloat16 leave as well, of all parameters: stage 1 shards only the
    # optimizer. Its bucket is small.
    assert held[0] - held[1] == pytest.approx(12 * params + 6 * SHAPE.num_params, rel=0.01)


def test_scoring_weights_load_from_the_host_once_a_step():
    timings = [
        CostModel(PROBLEM, constants).predict_timings(make_placement()).score["reference"]
        for constants in (RESIDENT, OPTIMIZER_OFFLOADED, OFFLOADED)
    ]
    assert timings[0] == timings[1]
    # 64 rollouts of 1024 tokens on 8 replicas, up to 32 at once: one batch.
    assert timings[2].batch_s - timings[0].batch_s == pytest.approx(2 * SHAPE.num_params / HOST)


def test_call_with_its_own_devices_is_not_offloaded():
    separate = make_placement(8)
    resident, offloaded = (CostModel(PROBLEM, constants) for constants in (RESIDENT, OFFLOADED))
    assert resident.predict_timings(separate).score == offloaded.predict_timings(separate).score
    memory = [model.predict_memory(separate)["reference"] for model in (resident, offloaded)]
    assert memory[0] == memory[1]
