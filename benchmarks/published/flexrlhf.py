"""FlexRLHF's strategies: samples per second, and which strategy is faster.

Four models of one size, prompts and responses of 256 tokens. The paper gives the largest batches of
7B: 24 rollouts per device for its baseline, 36 for its own strategies. Assumed are 12 at 13B and
33B (matches steps of about 400 s), 6 at 65B, and 36 per replica of a shadow actor (matches steps of
about 30 s at 33B). Models that fit on a device train with ZeRO stage 2, since they scale over nodes
without a loss. Larger models use stage 3 and generate from their shards: each matrix is gathered
for every token, in decode steps of the whole batch.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.published.points import FLEX, FLEX_MIXED, Throughput
from benchmarks.published.rows import Row
from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES, ModelShape
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.call_cost import build_parallel_groups
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.costs.memory import CallFootprint
from streamrl.planner.problem.problem import CallMemory, PlacementProblem
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.planner.steady_state.estimator import PlacementEstimator
from streamrl.resharding.grids import RankGrid

TIE_FRACTION = 0.05
"""Relative difference below which strategies count as equally fast."""

PPO = build_dataflow(("generator_logprobs", "scores", "ref_logprobs", "values"))
CONSTANTS = CostConstants(
    train_flops_fraction=1.0,
    forward_flops_fraction=1.0,
    score_tokens=4096,
    network_hop_s=174e-6,
    link_fraction=0.521,
    network_fraction=0.53,
    decode_step_s=0.5e-3,
    decode_rollout_s=20e-6,
    optimizer_bytes=0,
    gradient_bytes=0,
    memory_reserve_fraction=0.05,
)
"""DeepSpeed-Chat, calibrated on three colocated points: 7B and 33B on 8 GPUs, 33B on 128. Fitted:
the FLOP/s fraction, ZeRO's link fraction, and the latency of a gather between nodes. The optimizer
state is on the host, otherwise 65B does not fit."""
FITTED = (
    ("llama-7b", 8, "colocated"),
    ("llama-33b", 8, "colocated"),
    ("llama-33b", 128, "colocated"),
)
BATCH, FLEX_BATCH = 24, 36
"""Largest batch of 7B per device: colocated, and with the paper's strategies."""
BATCHES = {"llama-13b": 12, "llama-33b": 12, "llama-65b": 6}
"""Assumed batches per device; a model of twice the size fits half as many rollouts."""
MAX_RESIDENT_GB = 30.0
"""Largest model that generates without gathering its weights for every token."""
LAYER_MATRICES = 7
"""Matrices per layer; each is one gather."""
TENSOR = 8
FORWARD_SHARD_GB = 8.0
"""Approximate shard size per device of models without training."""
SHADOW_DEVICES = {32: (16, 16), 128: (24, 40)}
"""(devices of the shadow actor, devices of all forward-only calls) by number of devices."""


class GatheringCosts(CostModel):
    """Cost model of a generator without weights of its own.

    If it shares devices with a trainer that shards a large model, each decode step gathers the
    weights from the trainer's ranks.
    """

    def _compute_footprint(
        self,
        stage: str,
        assignment: CallAssignment,
        trainer: CallAssignment | None,
        *,
        offload_idle: bool,
        is_hosted: bool,
    ) -> CallFootprint:
        footprint = super()._compute_footprint(
            stage, assignment, trainer, offload_idle=offload_idle, is_hosted=is_hosted
        )
        if trainer is None or stage != "generate" or not is_large(self.problem.models["policy"]):
            return footprint
        return replace(footprint, memory=CallMemory(0.0, 0.0))

    def predict_timings(self, placement: Placement) -> StageTimings:
        timings = super().predict_timings(placement)
        trained, shape = placement.assignments["train"], self.problem.models["policy"]
        if not placement.overlaps("generate", "train") or not is_large(shape):
            return timings
        grid = RankGrid(1, 1, trained.mesh.size)
        group = build_parallel_groups(self.problem.cluster, trained.mesh, grid, self.constants).data
        gathers = shape.layers * LAYER_MATRICES
        gather_s = (
            shape.num_params * 2 * group.all_gather_byte_s + gathers * group.all_gather_latency_s
        )
        generator = replace(timings.generator, step_s=timings.generator.step_s + gather_s)
        return replace(timings, generator=generator)


def is_large(shape: ModelShape) -> bool:
    """Return whether generation gathers the weights for every token."""
    return shape.num_params * 2 / 1e9 > MAX_RESIDENT_GB


def build_problem(point: Throughput) -> PlacementProblem:
    """Build PPO with four models of one size."""
    shape, trained = MODEL_SHAPES[point.model], point.gpus
    cluster = Cluster.from_text(f"{point.gpus}xA100@800Gb")
    if point == FLEX_MIXED:
        trained = point.gpus // 2
        cluster = Cluster.from_text(f"{trained}xA100@800Gb,{trained}xV100@800Gb")
    models = {"policy": shape, "reference": shape}
    models |= {"critic": shape.to_critic(), "reward": shape.to_critic()}
    if point.strategy == "disaggregated":
        rollouts = FLEX_BATCH * build_placement(point).assignments["generate"].grid.dp_size
    else:
        largest = BATCH if point.strategy == "colocated" else FLEX_BATCH
        rollouts = BATCHES.get(point.model, largest) * trained
    workload = Workload(rollouts, 1, 256, make_fixed_lengths(256), micro_batch_tokens=4096)
    return PlacementProblem(PPO, models, workload, cluster)


def build_placement(point: Throughput) -> Placement:
    """Build the placement of a strategy."""
    whole, half = Mesh(0, point.gpus), point.gpus // 2
    first, second = Mesh(0, half), Mesh(half, half)
    meshes = dict.fromkeys(("generate", "train", "reference", "reward", "value"), whole)
    meshes["train_critic"] = whole
    if point.strategy == "interleaved-1":
        meshes |= {"reference": first, "reward": second}
    elif point.strategy == "interleaved-2":
        meshes |= dict.fromkeys(("generate", "train", "reference"), first)
        meshes |= dict.fromkeys(("train_critic", "value", "reward"), second)
    elif point == FLEX_MIXED:
        meshes = dict.fromkeys(meshes, first) | {"reference": second, "reward": second}
    elif point.strategy == "disaggregated":
        shadow, forward = SHADOW_DEVICES[point.gpus]
        trained = Mesh(forward, point.gpus - forward)
        scored = Mesh(shadow, forward - shadow) if forward > shadow else Mesh(0, shadow)
        meshes = dict.fromkeys(("train", "train_critic"), trained) | {"generate": Mesh(0, shadow)}
        meshes |= dict.fromkeys(("reference", "reward", "value"), scored)
    shape = MODEL_SHAPES[point.model]
    calls = {stage: _assign(stage, mesh, shape) for stage, mesh in meshes.items()}
    return Placement(calls, is_streamed=point.strategy == "disaggregated")


def _assign(stage: str, mesh: Mesh, shape: ModelShape) -> CallAssignment:
    """Assign a call; forward-only ones use tensor parallelism, and two pipeline stages if large."""
    if stage.startswith("train"):
        return CallAssignment(mesh, RankGrid(1, 1, mesh.size), 3 if is_large(shape) else 2)
    needed = 1 << max(0, math.ceil(math.log2(shape.num_params * 2 / 1e9 / FORWARD_SHARD_GB)))
    tensor = min(math.gcd(shape.heads, TENSOR), needed, mesh.size)
    if stage == "generate" and not is_large(shape):
        tensor = 1
    stages = 2 if is_large(shape) and stage != "generate" and mesh.size > TENSOR else 1
    return CallAssignment(mesh, RankGrid(stages, tensor, mesh.size // (tensor * stages)))


def predict_samples_per_s(point: Throughput, constants: CostConstants = CONSTANTS) -> float:
    """Predict samples per second; 0 if it does not fit."""
    problem = build_problem(point)
    costs = GatheringCosts(problem, constants)
    return problem.workload.num_rollouts / PlacementEstimator(problem, costs).estimate_step_s(
        build_placement(point)
    )


def iter_rows() -> Iterator[Row]:
    """Yield the table, and which of two strategies measured at the same size is faster."""
    predictions = {point: predict_samples_per_s(point) for point in (*FLEX, FLEX_MIXED)}
    plain = {(p.model, p.gpus): p for p in FLEX if p.strategy == "colocated"}
    for point, predicted in predictions.items():
        setting = f"{point.model}, {point.gpus} GPUs, {point.strategy}"
        fitted = (point.model, point.gpus, point.strategy) in FITTED
        measured, modeled = (value or "out of memory" for value in (point.samples_per_s, predicted))
        yield Row("flexrlhf", "tables", setting, "samples/s", measured, modeled, fitted)
    for point, predicted in predictions.items():
        base = plain[point.model, point.gpus // (1 + (point == FLEX_MIXED))]
        if point is base or not base.samples_per_s:
            continue
        setting = f"{point.model}, {point.gpus} GPUs, {point.strategy} against colocated"
        printed = _compare(point.samples_per_s, base.samples_per_s)
        modeled = _compare(predicted, predictions[base])
        yield Row("flexrlhf", "tables", setting, "faster by 5 %", printed, modeled)


def _compare(rate: float, base: float) -> str:
    if abs(rate - base) <= TIE_FRACTION * base:
        return "as fast"
    return "faster" if rate > base else "slower"
