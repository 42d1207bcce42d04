"""NeMo-RL's steps, synchronous and asynchronous: GRPO on mixtures of experts.

Sequences of a step, longest and mean lengths and grids are those of its tables and recipes of v0.6:
Megatron's ranks of a stage share out the experts, and context parallelism stands as tensor
parallelism of as many ranks. A micro-batch is one packed sequence of the longest length. The policy
scoring its own rollouts stands as a reward model, beside the reference. Of those who share devices,
all but the one that computes is on the host.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.published.points import NEMO, NemoRun
from benchmarks.published.rows import Row
from streamrl.dataflow import build_dataflow
from streamrl.placement.clusters import DEVICES, Cluster, NodeGroup
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import MODEL_SHAPES
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.steady_state.estimator import PlacementEstimator
from streamrl.placement.workload import LognormalLengths, Workload
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
"""Of vLLM and Megatron of today, calibrated on the synchronous steps by `nemo_fit`."""
TENSOR_S = 1e-3
"""Of a version on its way to who shares devices, for each matrix of each expert: 17.2 s at 30B and
40.2 s at 235B (NVIDIA-NeMo/RL pull request 3294)."""
SENT_BYTE_S = 11e-12
"""On its way elsewhere, all of the model to all devices: 5.5 s at 235B and 14 s of DeepSeek-V3
(NVIDIA-NeMo/RL pull request 1379)."""
EXPERT_TENSORS = 3
ASYNCHRONOUS_RUNNING = 128
"""Most rollouts of an asynchronous engine at once: vLLM's default, which is 1,024 for one that is
not, and which NeMo-RL leaves as it is."""
PROMPT_TOKENS = 150


@dataclass(frozen=True)
class Work:
    """Of a step, by model: sequences; the longest; whether activations are computed again; how many
    of the longest are scored at once.
    """

    rollouts: int
    longest: int
    recompute: bool
    scored: int


WORKS = {
    "deepseek-v3": Work(512, 1536, True, 1),
    "qwen3-235b-a22b": Work(512, 8192, True, 1),
    "qwen3-30b-a3b": Work(2048, 4096, False, 4),
}


@dataclass(frozen=True)
class Split:
    """generate: ranks of a generator. tensor, expert, stages: that train."""

    generate: int
    tensor: int
    expert: int
    stages: int


SPLITS = {
    ("deepseek-v3", "H100"): (Split(32, 1, 16, 16), Split(32, 1, 16, 16)),
    ("qwen3-235b-a22b", "H100"): (Split(16, 4, 16, 8), Split(8, 4, 16, 8)),
    ("qwen3-30b-a3b", "H100"): (Split(2, 1, 8, 1), Split(2, 1, 8, 2)),
    ("deepseek-v3", "GB200"): (Split(32, 1, 16, 8), Split(16, 1, 16, 8)),
    ("qwen3-235b-a22b", "GB200"): (Split(8, 4, 16, 4), Split(8, 4, 16, 4)),
    # Sixteen expert ranks, were there as many that train.
    ("qwen3-30b-a3b", "GB200"): (Split(1, 1, 16, 1), Split(1, 1, 8, 1)),
}
"""By model and device: colocated, and a step ahead."""
EIGHT_AHEAD = Split(2, 1, 8, 1)
UNFITTED = ("qwen3-235b-a22b", "GB200", 128)
"""A synchronous run that takes longer than one on half as many devices: the same work does not, so
nothing is calibrated on it."""
GENERATORS = {192: 64}
"""How many of so many devices generate, where it is not half of them."""
SIGMA = 0.6
"""Of the logarithm of lengths: not given."""
NVLINK_DOMAIN = 64
"""GB200 of one that a run has, at most."""


@cache
def lengths(longest: int, mean: float) -> LognormalLengths:
    """Lognormal, cut off, with this mean."""
    low, high = 1.0, 100.0 * mean
    while high - low > 1:
        middle = (low + high) / 2
        if LognormalLengths(middle, SIGMA, longest).mean < mean:
            low = middle
        else:
            high = middle
    return LognormalLengths(high, SIGMA, longest)


def cluster(run: NemoRun) -> Cluster:
    """GB200 within one NVLink domain are one node."""
    per_node = min(run.gpus, NVLINK_DOMAIN) if run.device == "GB200" else 8
    return Cluster((NodeGroup(DEVICES[run.device], per_node, run.gpus // per_node),))


def problem(run: NemoRun) -> PlacementProblem:
    """Policy and reference of one model, and the policy once more."""
    work, shape = WORKS[run.model], MODEL_SHAPES[run.model]
    workload = Workload(
        work.rollouts,
        1,
        PROMPT_TOKENS,
        lengths(work.longest - PROMPT_TOKENS, run.mean - PROMPT_TOKENS),
        mini_batches=max(1, work.rollouts // 512),
        micro_batch_tokens=work.longest,
        requires_whole_step=True,
    )
    models = {"policy": shape, "reference": shape, "reward": shape}
    return PlacementProblem(GRPO, models, workload, cluster(run))


def placement(run: NemoRun) -> Placement:
    """All on all devices; or generators apart from the rest."""
    split = EIGHT_AHEAD if run.ahead > 1 else SPLITS[run.model, run.device][run.ahead]
    apart = GENERATORS.get(run.gpus, run.gpus // 2) if run.ahead else 0
    train = Mesh(0, run.gpus - apart)
    generate = Mesh(train.size, apart) if apart else train
    grid = RankGrid(1, split.generate, generate.size // split.generate)
    ranks = split.stages * split.tensor
    trained = RankGrid(split.stages, split.tensor, train.size // ranks, "mcore")
    calls = dict.fromkeys(
        ("train", "reference", "reward"), CallAssignment(train, trained, ep_size=split.expert)
    )
    calls["generate"] = CallAssignment(generate, grid)
    return Placement(calls, run.ahead, is_streamed=False)


def running(run: NemoRun) -> int:
    """Rollouts that an engine has at once, ahead: those of as many steps are under way together as
    generation may be ahead (`max_trajectory_age_steps`), whatever weights come meanwhile.
    """
    replicas = placement(run).assignments["generate"].grid.dp_size
    under_way = WORKS[run.model].rollouts * run.ahead
    return min(ASYNCHRONOUS_RUNNING, math.ceil(under_way / replicas))


def costs(run: NemoRun, asked: PlacementProblem, constants: CostConstants = CONSTANTS) -> CostModel:
    """Of a run, with its own settings."""
    work, shape = WORKS[run.model], MODEL_SHAPES[run.model]
    sent_s = SENT_BYTE_S * shape.num_params * constants.served_bytes if run.ahead else 0.0
    told = replace(
        constants,
        max_running=running(run) if run.ahead else constants.max_running,
        recompute=work.recompute,
        score_tokens=work.scored * work.longest,
        # Elsewhere who trains and who samples stand still while weights are sent.
        train_step_s=constants.train_step_s + sent_s,
        pull_s=sent_s,
        switch_s=TENSOR_S * shape.moe_layers * shape.experts * EXPERT_TENSORS,
    )
    return CostModel(asked, told).approximate_costs


def step_s(run: NemoRun, constants: CostConstants = CONSTANTS) -> float:
    """Predicted."""
    asked = problem(run)
    return PlacementEstimator(asked, costs(run, asked, constants)).step_s(placement(run))


def is_fitted(run: NemoRun) -> bool:
    """Whether constants are calibrated on it."""
    return not run.ahead and (run.model, run.device, run.gpus) != UNFITTED


def rows() -> Iterator[Row]:
    """Steps, and at each size whether asynchrony pays."""
    found = {run: step_s(run) for run in NEMO}
    for run, seconds in found.items():
        mode = f"{run.ahead} ahead" if run.ahead else "synchronous"
        setting = f"{run.model}, {run.gpus} {run.device}, {mode}"
        yield Row("nemo", "v0.6", setting, "step, s", run.step_s, seconds, is_fitted(run))
    for run, seconds in found.items():
        plain = NemoRun(run.model, run.device, run.gpus, 0, 0.0, 0)
        for other, other_s in found.items():
            if run.ahead and (other.model, other.device, other.gpus, other.ahead) == (
                plain.model,
                plain.device,
                plain.gpus,
                0,
            ):
                setting = f"{run.model}, {run.gpus} {run.device}"
                printed = "pays" if run.step_s < other.step_s else "loses"
                predicted = "pays" if seconds < other_s else "loses"
                yield Row("nemo", "v0.6", setting, "asynchrony", printed, predicted)
