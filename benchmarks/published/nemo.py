"""NeMo-RL's steps, synchronous and asynchronous: GRPO on mixtures of experts.

Rollouts of a step, longest and mean lengths and grids are those of its own tables and recipes of
v0.4. Of what a `Grid` does not have, the nearest it has stands in: expert parallelism is tensor
parallelism of eight ranks, and the sequences that these train at the same time are one micro-batch.
Synchronous runs move the trainer's state to the host while they generate: gradients and optimizer
are left out of memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.published.points import NEMO, NemoRun
from benchmarks.published.rows import Row
from streamrl.dataflow import dataflow_for
from streamrl.placement.clusters import DEVICES, Cluster, NodeGroup
from streamrl.placement.costs import Constants, CostModel
from streamrl.placement.estimates import Problem
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.schedule import Estimator
from streamrl.placement.shapes import SHAPES
from streamrl.placement.workload import LognormalLengths, Workload
from streamrl.resharding import Grid

GRPO = dataflow_for(("generator_logprobs", "scores", "ref_logprobs"))
CONSTANTS = Constants(
    train_flops_fraction=0.5,
    forward_flops_fraction=0.5,
    decode_step_s=2e-3,
    decode_rollout_s=10e-6,
    link_hop_s=2e-6,
    micro_batch_s=0.8,
    score_batch_s=0.4,
    train_step_s=20.0,
    max_running=1024,
    gradient_bytes=0,
    optimizer_bytes=0,
    memory_reserve_fraction=0.05,
)
"""Of vLLM and Megatron of today, calibrated on the synchronous steps: mixtures of experts are many
small products, so micro-batches take as long as it takes to begin them."""
EXPERT_RANKS = 8
PROMPT_TOKENS = 150


@dataclass(frozen=True)
class Work:
    """Of a step, by model: rollouts, of which `group` have one prompt; longest and mean sequence.

    stages: that train. together: sequences that eight ranks train at the same time. generators:
    ranks that are tensor-parallel, colocated and on devices of their own.
    """

    rollouts: int
    group: int
    longest: int
    mean: float
    stages: int
    together: int
    generators: tuple[int, int]


WORKS = {
    "deepseek-v3": Work(512, 16, 1536, 745, 16, 8, (32, 32)),
    "qwen3-235b-a22b": Work(512, 32, 8192, 5671, 8, 2, (16, 8)),
    "qwen3-30b-a3b": Work(2048, 32, 4096, 3154, 1, 8, (4, 2)),
}
GENERATORS = {192: 64}
"""How many of so many devices generate, where it is not half of them."""
SIGMA = 0.6
"""Of the logarithm of lengths: not given."""


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
    device = DEVICES[run.device]
    if run.device == "GB200":
        return Cluster((NodeGroup(device, run.gpus),))
    return Cluster((NodeGroup(device, 8, run.gpus // 8),))


def problem(run: NemoRun) -> Problem:
    """Policy and reference of one model; the reward is a rule."""
    work, shape = WORKS[run.model], SHAPES[run.model]
    workload = Workload(
        work.rollouts // work.group,
        work.group,
        PROMPT_TOKENS,
        lengths(work.longest - PROMPT_TOKENS, work.mean - PROMPT_TOKENS),
        mini_batches=max(1, work.rollouts // 512),
        micro_batch_tokens=work.longest * work.together,
        whole_steps=True,
    )
    return Problem(GRPO, {"policy": shape, "reference": shape}, workload, cluster(run))


def placement(run: NemoRun) -> Placement:
    """All on all devices; or generators apart from the rest."""
    work = WORKS[run.model]
    apart = GENERATORS.get(run.gpus, run.gpus // 2) if run.ahead else 0
    train = Mesh(0, run.gpus - apart)
    generate = Mesh(train.size, apart) if apart else train
    tensor = work.generators[bool(apart)] if run.device == "H100" else 1
    grid = Grid(1, tensor, generate.size // tensor)
    trained = Grid(work.stages, EXPERT_RANKS, train.size // (work.stages * EXPERT_RANKS))
    calls = {
        "generate": Assignment(generate, grid),
        "reference": Assignment(train, trained),
        "train": Assignment(train, trained),
    }
    return Placement(calls, run.ahead, streamed=False)


def step_s(run: NemoRun, constants: Constants = CONSTANTS) -> float:
    """Predicted."""
    asked = problem(run)
    return Estimator(asked, CostModel(asked, constants).rough).step_s(placement(run))


def rows() -> Iterator[Row]:
    """Steps, and at each size whether asynchrony pays."""
    found = {run: step_s(run) for run in NEMO}
    for run, seconds in found.items():
        mode = f"{run.ahead} ahead" if run.ahead else "synchronous"
        setting = f"{run.model}, {run.gpus} {run.device}, {mode}"
        yield Row("nemo", "v0.6", setting, "step, s", run.step_s, seconds, fitted=not run.ahead)
    for run, seconds in found.items():
        plain = NemoRun(run.model, run.device, run.gpus, 0, 0.0)
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
