"""NeMo-RL's synchronous and asynchronous steps: GRPO on mixtures of experts.

Batch sizes, lengths and parallelism are those of the tables and recipes of v0.6. Experts are split
over the ranks of a pipeline stage; context parallelism is modeled as tensor parallelism of the
same degree. A micro-batch is one packed sequence of maximum length. The policy's log-probability
pass is modeled as a reward model beside the reference. Colocated models that do not compute are
offloaded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.published.points import NEMO, NemoRun
from benchmarks.published.rows import Row
from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES
from streamrl.placement.clusters import DEVICES, Cluster, NodeGroup
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.steady_state.estimator import PlacementEstimator
from streamrl.resharding.grids import RankGrid

GRPO = build_dataflow(("generator_logprobs", "scores", "ref_logprobs"))
CONSTANTS = CostConstants(
    train_flops_fraction=0.5,
    forward_flops_fraction=0.5,
    decode_step_s=2e-3,
    decode_rollout_s=10e-6,
    link_hop_s=2e-6,
    network_hop_s=17.6e-6,
    expert_layer_s=3.96e-3,
    train_step_s=15.7,
    max_running=1024,
    offloads_optimizer=True,
    offloads_weights=True,
    memory_reserve_fraction=0.05,
)
"""vLLM and Megatron, calibrated on the synchronous steps by `nemo_fit`."""
TENSOR_S = 1e-3
"""Seconds per expert matrix to refit a colocated generator: 17.2 s at 30B and 40.2 s at 235B
(NVIDIA-NeMo/RL pull request 3294)."""
BROADCAST_BYTE_S = 11e-12
"""Seconds per byte to broadcast a version to other devices: 5.5 s at 235B and 14 s for DeepSeek-V3
(NVIDIA-NeMo/RL pull request 1379)."""
EXPERT_TENSORS = 3
ASYNCHRONOUS_RUNNING = 128
"""vLLM's default `max_num_seqs` of an asynchronous engine, which NeMo-RL keeps; 1,024 otherwise."""
PROMPT_TOKENS = 150


@dataclass(frozen=True)
class NemoWorkload:
    """One step: sequences, maximum length in tokens, activation recomputation, sequences of maximum
    length per scoring batch.
    """

    rollouts: int
    longest: int
    recompute: bool
    scored: int


WORKLOADS = {
    "deepseek-v3": NemoWorkload(512, 1536, True, 1),
    "qwen3-235b-a22b": NemoWorkload(512, 8192, True, 1),
    "qwen3-30b-a3b": NemoWorkload(2048, 4096, False, 4),
}


@dataclass(frozen=True)
class NemoSplit:
    """Parallelism. generate: ranks per generator. tensor, expert, stages: of the trainer."""

    generate: int
    tensor: int
    expert: int
    stages: int


SPLITS = {
    ("deepseek-v3", "H100"): (NemoSplit(32, 1, 16, 16), NemoSplit(32, 1, 16, 16)),
    ("qwen3-235b-a22b", "H100"): (NemoSplit(16, 4, 16, 8), NemoSplit(8, 4, 16, 8)),
    ("qwen3-30b-a3b", "H100"): (NemoSplit(2, 1, 8, 1), NemoSplit(2, 1, 8, 2)),
    ("deepseek-v3", "GB200"): (NemoSplit(32, 1, 16, 8), NemoSplit(16, 1, 16, 8)),
    ("qwen3-235b-a22b", "GB200"): (NemoSplit(8, 4, 16, 4), NemoSplit(8, 4, 16, 4)),
    # Expert parallelism is 16 if as many ranks train.
    ("qwen3-30b-a3b", "GB200"): (NemoSplit(1, 1, 16, 1), NemoSplit(1, 1, 8, 1)),
}
"""By model and device: (colocated, one step ahead)."""
EIGHT_AHEAD = NemoSplit(2, 1, 8, 1)
UNFITTED = ("qwen3-235b-a22b", "GB200", 128)
"""Excluded from calibration: this synchronous run takes longer than on half as many devices."""
GENERATORS = {192: 64}
"""Generating devices by number of devices; half of them otherwise."""
SIGMA = 0.6
"""Standard deviation of log lengths; not published."""
NVLINK_DOMAIN = 64
"""Largest number of GB200 in one NVLink domain."""


@cache
def fit_lengths(longest: int, mean: float) -> LognormalLengths:
    """Fit a truncated lognormal distribution to a mean."""
    low, high = 1.0, 100.0 * mean
    while high - low > 1:
        middle = (low + high) / 2
        if LognormalLengths(middle, SIGMA, longest).mean < mean:
            low = middle
        else:
            high = middle
    return LognormalLengths(high, SIGMA, longest)


def build_cluster(run: NemoRun) -> Cluster:
    """Build the cluster; GB200 in one NVLink domain are one node."""
    per_node = min(run.gpus, NVLINK_DOMAIN) if run.device == "GB200" else 8
    return Cluster((NodeGroup(DEVICES[run.device], per_node, run.gpus // per_node),))


def build_problem(run: NemoRun) -> PlacementProblem:
    """Build GRPO with policy and reference, and the policy's log-probability pass."""
    work, shape = WORKLOADS[run.model], MODEL_SHAPES[run.model]
    workload = Workload(
        work.rollouts,
        1,
        PROMPT_TOKENS,
        fit_lengths(work.longest - PROMPT_TOKENS, run.mean - PROMPT_TOKENS),
        mini_batches=max(1, work.rollouts // 512),
        micro_batch_tokens=work.longest,
        requires_whole_step=True,
    )
    models = {"policy": shape, "reference": shape, "reward": shape}
    return PlacementProblem(GRPO, models, workload, build_cluster(run))


def build_placement(run: NemoRun) -> Placement:
    """Place all calls on all devices; if asynchronous, generators on their own."""
    split = EIGHT_AHEAD if run.steps_ahead > 1 else SPLITS[run.model, run.device][run.steps_ahead]
    apart = GENERATORS.get(run.gpus, run.gpus // 2) if run.steps_ahead else 0
    train = Mesh(0, run.gpus - apart)
    generate = Mesh(train.size, apart) if apart else train
    grid = RankGrid(1, split.generate, generate.size // split.generate)
    ranks = split.stages * split.tensor
    trained = RankGrid(split.stages, split.tensor, train.size // ranks, "mcore")
    calls = dict.fromkeys(
        ("train", "reference", "reward"), CallAssignment(train, trained, ep_size=split.expert)
    )
    calls["generate"] = CallAssignment(generate, grid)
    return Placement(calls, run.steps_ahead, is_streamed=False)


def count_running(run: NemoRun) -> int:
    """Count running rollouts per asynchronous engine.

    Rollouts of `max_trajectory_age_steps` steps run together, across weight updates.
    """
    replicas = build_placement(run).assignments["generate"].grid.dp_size
    under_way = WORKLOADS[run.model].rollouts * run.steps_ahead
    return min(ASYNCHRONOUS_RUNNING, math.ceil(under_way / replicas))


def build_costs(
    run: NemoRun, problem: PlacementProblem, constants: CostConstants = CONSTANTS
) -> CostModel:
    """Build the cost model of a run with its batch sizes and refit times."""
    work, shape = WORKLOADS[run.model], MODEL_SHAPES[run.model]
    sent_s = (
        BROADCAST_BYTE_S * shape.num_params * constants.served_bytes if run.steps_ahead else 0.0
    )
    run_constants = replace(
        constants,
        max_running=count_running(run) if run.steps_ahead else constants.max_running,
        recompute=work.recompute,
        score_tokens=work.scored * work.longest,
        # Trainer and generators pause during a broadcast.
        train_step_s=constants.train_step_s + sent_s,
        pull_s=sent_s,
        switch_s=TENSOR_S * shape.moe_layers * shape.experts * EXPERT_TENSORS,
    )
    return CostModel(problem, run_constants)


def predict_step_s(run: NemoRun, constants: CostConstants = CONSTANTS) -> float:
    problem = build_problem(run)
    return PlacementEstimator(problem, build_costs(run, problem, constants)).estimate_step_s(
        build_placement(run)
    )


def is_fitted(run: NemoRun) -> bool:
    """Return whether constants are calibrated on this run."""
    return not run.steps_ahead and (run.model, run.device, run.gpus) != UNFITTED


def iter_rows() -> Iterator[Row]:
    """Yield steps, and at each size whether asynchrony pays."""
    predictions = {run: predict_step_s(run) for run in NEMO}
    for run, seconds in predictions.items():
        mode = f"{run.steps_ahead} ahead" if run.steps_ahead else "synchronous"
        setting = f"{run.model}, {run.gpus} {run.device}, {mode}"
        yield Row("nemo", "v0.6", setting, "step, s", run.step_s, seconds, is_fitted(run))
    for run, seconds in predictions.items():
        plain = NemoRun(run.model, run.device, run.gpus, 0, 0.0, 0)
        for other, other_s in predictions.items():
            if run.steps_ahead and (other.model, other.device, other.gpus, other.steps_ahead) == (
                plain.model,
                plain.device,
                plain.gpus,
                0,
            ):
                setting = f"{run.model}, {run.gpus} {run.device}"
                printed = "pays" if run.step_s < other.step_s else "loses"
                predicted = "pays" if seconds < other_s else "loses"
                yield Row("nemo", "v0.6", setting, "asynchrony", printed, predicted)
