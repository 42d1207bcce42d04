"""FlexRLHF's strategies: samples a second, and which is faster.

Four models of one size, prompts and responses of 256 tokens. Of batches the paper gives the largest
of 7B: 24 rollouts of a device for the strategy it compares with, 36 for its own. The others are
assumed: 12 at 13B, and at 33B, which its steps of about 400 s come to; half of that at 65B; and 36
of each replica of a shadow actor, which at 33B is its step of about 30 s. What can be held whole is
on ZeRO stage 2, as it scales without a loss over nodes; larger ones are on stage 3, and are sampled
from as they are trained: matrix by matrix is gathered for every token, in decode steps of the whole
batch.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.published.points import FLEX, FLEX_UNLIKE, Throughput
from benchmarks.published.rows import Row
from streamrl.dataflow import build_dataflow
from streamrl.placement.clusters import Cluster
from streamrl.placement.costs.approximate_traffic import ApproximateTraffic
from streamrl.placement.costs.collectives import build_parallel_groups
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.costs.device_memory import CallFootprint
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import MODEL_SHAPES, ModelShape
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import CallMemory, PlacementProblem
from streamrl.placement.stage_timings import StageTimings
from streamrl.placement.steady_state.estimator import PlacementEstimator
from streamrl.placement.workload import FixedLength, Workload
from streamrl.resharding.grids import RankGrid

ALIKE = 0.05
"""Strategies that differ by less, relatively, are as fast as each other."""

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
"""Of DeepSpeed-Chat; calibrated on three points, colocated: 7B and 33B on 8 GPUs, and 33B on 128.
The part of the FLOP/s (a step of 7B leaves no time for less), what ZeRO gets of links, and how long
a gather takes to pass from node to node. The optimizer's state is on the host: at 65B nothing else
fits."""
FITTED = (
    ("llama-7b", 8, "colocated"),
    ("llama-33b", 8, "colocated"),
    ("llama-33b", 128, "colocated"),
)
BATCH, OWN_BATCH = 24, 36
"""The largest of 7B on a device: colocated, and of the paper's own strategies."""
BATCHES = {"llama-13b": 12, "llama-33b": 12, "llama-65b": 6}
"""Likewise, where none is given: a model of twice the size has room for half as many."""
MOST_WHOLE_GB = 30.0
"""Larger models are not held whole while they generate: layers are gathered for every token."""
MATRICES = 7
"""Of a layer; each is gathered by itself."""
TENSOR = 8
PART_GB = 8.0
"""Of what only computes forward, on a device, about."""
SHADOWS = {32: (16, 16), 128: (24, 40)}
"""Of so many devices, those of the shadow actor, and of all that only compute forward."""


class GatheringCosts(CostModel):
    """Where the generator shares devices with a trainer that shards a large model, each decode
    step gathers it anew from all of them, and nothing more of it is held."""

    def _compute_footprint(
        self,
        stage: str,
        assignment: CallAssignment,
        trainer: CallAssignment | None,
        *,
        offload_idle: bool,
    ) -> CallFootprint:
        found = super()._compute_footprint(stage, assignment, trainer, offload_idle=offload_idle)
        if trainer is None or stage != "generate" or not is_large(self.problem.models["policy"]):
            return found
        return replace(found, memory=CallMemory(0.0, 0.0))

    def predict_timings(self, placement: Placement) -> StageTimings:
        """As of CostModel, with what is gathered."""
        found = super().predict_timings(placement)
        trained, shape = placement.assignments["train"], self.problem.models["policy"]
        if not placement.overlaps("generate", "train") or not is_large(shape):
            return found
        grid = RankGrid(1, 1, trained.mesh.size)
        group = build_parallel_groups(self.problem.cluster, trained.mesh, grid, self.constants).data
        gathers = shape.layers * MATRICES
        gather_s = (
            shape.num_params * 2 * group.all_gather_byte_s + gathers * group.all_gather_latency_s
        )
        generator = replace(found.generator, step_s=found.generator.step_s + gather_s)
        return replace(found, generator=generator)


def is_large(shape: ModelShape) -> bool:
    """Whether it is gathered for every token."""
    return shape.num_params * 2 / 1e9 > MOST_WHOLE_GB


def problem(point: Throughput) -> PlacementProblem:
    """Four models of one size."""
    shape, trained = MODEL_SHAPES[point.model], point.gpus
    cluster = Cluster.from_text(f"{point.gpus}xA100@800Gb")
    if point == FLEX_UNLIKE:
        trained = point.gpus // 2
        cluster = Cluster.from_text(f"{trained}xA100@800Gb,{trained}xV100@800Gb")
    models = {"policy": shape, "reference": shape}
    models |= {"critic": shape.to_critic(), "reward": shape.to_critic()}
    if point.strategy == "disaggregated":
        rollouts = OWN_BATCH * placement(point).assignments["generate"].grid.dp_size
    else:
        largest = BATCH if point.strategy == "colocated" else OWN_BATCH
        rollouts = BATCHES.get(point.model, largest) * trained
    workload = Workload(rollouts, 1, 256, FixedLength(256), micro_batch_tokens=4096)
    return PlacementProblem(PPO, models, workload, cluster)


def placement(point: Throughput) -> Placement:
    """Of a strategy."""
    whole, half = Mesh(0, point.gpus), point.gpus // 2
    first, second = Mesh(0, half), Mesh(half, half)
    meshes = dict.fromkeys(("generate", "train", "reference", "reward", "value"), whole)
    meshes["train_critic"] = whole
    if point.strategy == "interleaved-1":
        meshes |= {"reference": first, "reward": second}
    elif point.strategy == "interleaved-2":
        meshes |= dict.fromkeys(("generate", "train", "reference"), first)
        meshes |= dict.fromkeys(("train_critic", "value", "reward"), second)
    elif point == FLEX_UNLIKE:
        meshes = dict.fromkeys(meshes, first) | {"reference": second, "reward": second}
    elif point.strategy == "disaggregated":
        shadow, forward = SHADOWS[point.gpus]
        trained = Mesh(forward, point.gpus - forward)
        scored = Mesh(shadow, forward - shadow) if forward > shadow else Mesh(0, shadow)
        meshes = dict.fromkeys(("train", "train_critic"), trained) | {"generate": Mesh(0, shadow)}
        meshes |= dict.fromkeys(("reference", "reward", "value"), scored)
    shape = MODEL_SHAPES[point.model]
    calls = {stage: _assigned(stage, mesh, shape) for stage, mesh in meshes.items()}
    return Placement(calls, is_streamed=point.strategy == "disaggregated")


def _assigned(stage: str, mesh: Mesh, shape: ModelShape) -> CallAssignment:
    """What only computes forward is sharded, too: by tensor parallelism, and over two nodes."""
    if stage.startswith("train"):
        return CallAssignment(mesh, RankGrid(1, 1, mesh.size), 3 if is_large(shape) else 2)
    needed = 1 << max(0, math.ceil(math.log2(shape.num_params * 2 / 1e9 / PART_GB)))
    tensor = min(math.gcd(shape.heads, TENSOR), needed, mesh.size)
    if stage == "generate" and not is_large(shape):
        tensor = 1
    stages = 2 if is_large(shape) and stage != "generate" and mesh.size > TENSOR else 1
    return CallAssignment(mesh, RankGrid(stages, tensor, mesh.size // (tensor * stages)))


def samples_per_s(point: Throughput, constants: CostConstants = CONSTANTS) -> float:
    """Predicted; 0 where it does not fit."""
    asked = problem(point)
    costs = GatheringCosts(asked, constants, traffic=ApproximateTraffic)
    return asked.workload.num_rollouts / PlacementEstimator(asked, costs).step_s(placement(point))


def rows() -> Iterator[Row]:
    """The table, and which of two strategies is faster wherever one was measured beside another."""
    found = {point: samples_per_s(point) for point in (*FLEX, FLEX_UNLIKE)}
    plain = {(p.model, p.gpus): p for p in FLEX if p.strategy == "colocated"}
    for point, predicted in found.items():
        setting = f"{point.model}, {point.gpus} GPUs, {point.strategy}"
        fitted = (point.model, point.gpus, point.strategy) in FITTED
        measured, modelled = (
            value or "out of memory" for value in (point.samples_per_s, predicted)
        )
        yield Row("flexrlhf", "tables", setting, "samples/s", measured, modelled, fitted)
    for point, predicted in found.items():
        base = plain[point.model, point.gpus // (1 + (point == FLEX_UNLIKE))]
        if point is base or not base.samples_per_s:
            continue
        setting = f"{point.model}, {point.gpus} GPUs, {point.strategy} against colocated"
        printed = _compared(point.samples_per_s, base.samples_per_s)
        told = _compared(predicted, found[base])
        yield Row("flexrlhf", "tables", setting, "faster by 5 %", printed, told)


def _compared(one: float, other: float) -> str:
    if abs(one - other) <= ALIKE * other:
        return "as fast"
    return "faster" if one > other else "slower"
