"""verl's steps, synchronous and fully asynchronous: GRPO and DAPO on H20.

Batches, longest lengths and grids are those of its scripts (those of the runs with 20k and 8k are
taken to be alike). Sequence parallelism stands as tensor
parallelism of as many ranks. The pass for old log-probabilities of a synchronous step stands as a
reference, and as a reward model where there is a reference besides. How long responses are on
average is not given: one figure for each series of runs, fitted on its synchronous ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.published.points import VERL, VerlRun
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

CONSTANTS = Constants(
    train_flops_fraction=0.8,
    forward_flops_fraction=0.26,
    half_width=64.0,
    recompute=False,
    decode_step_s=0.3e-3,
    decode_layer_s=0.59e-3,
    decode_rollout_s=30e-6,
    link_hop_s=5e-6,
    max_running=1024,
    gradient_bytes=0,
    optimizer_bytes=0,
    update_s=3.3,
    train_step_s=25.0,
)
"""Of vLLM and FSDP2 or Megatron in 2025, calibrated on the parts of synchronous steps, whose
rollouts are packed as streamrl packs them; the state of the optimizer is on the host. An update
takes seconds however many devices there are."""
UNFITTED = ("7b-28k", 32)
"""A synchronous run that takes more than twice as long as one on twice as many devices: the same
work does not, so nothing is calibrated on it."""
TENSOR = 4
"""Of generators, and ranks that share a sequence in training."""


@dataclass(frozen=True)
class Series:
    """Runs that have all but devices in common.

    forwards: passes for log-probabilities of a synchronous step, and of an asynchronous one.
    """

    median: float
    longest: int
    mini_batches: int
    forwards: tuple[int, int] = (1, 0)


SIGMA = 0.7
"""Of the logarithm of lengths: not given."""
SERIES = {
    "7b-28k": Series(570, 28 * 1024, 16),
    "7b-20k": Series(490, 20 * 1024, 16, (1, 1)),
    "7b-8k": Series(435, 8 * 1024, 16, (1, 1)),
    "30b-8k": Series(1360, 8 * 1024, 4, (2, 1)),
}
COLUMNS = (
    ("generator_logprobs", "scores"),
    ("generator_logprobs", "scores", "ref_logprobs"),
    ("generator_logprobs", "scores", "ref_logprobs"),
)


def problem(run: VerlRun) -> Problem:
    """One model for all calls."""
    series, shape = SERIES[run.name], SHAPES[run.model]
    forwards = series.forwards[bool(run.generate)]
    models = {"policy": shape}
    if forwards > 0:
        models["reference"] = shape
    if forwards > 1:
        models["reward"] = shape
    workload = Workload(
        512,
        16,
        200,
        LognormalLengths(series.median, SIGMA, series.longest),
        mini_batches=series.mini_batches,
        micro_batch_tokens=2 * (series.longest + 2048),
        whole_steps=not run.generate,
    )
    devices = run.train + run.generate
    cluster = Cluster((NodeGroup(DEVICES["H20"], 8, devices // 8),))
    return Problem(dataflow_for(COLUMNS[forwards]), models, workload, cluster)


def placement(run: VerlRun, asked: Problem) -> Placement:
    """All on all devices on policy; or generators apart, a step ahead."""
    train = Mesh(0, run.train)
    generate = Mesh(run.train, run.generate) if run.generate else train
    trained = Assignment(train, Grid(1, TENSOR, train.size // TENSOR), 3)
    calls = dict.fromkeys(asked.stages, trained)
    calls["generate"] = Assignment(generate, Grid(1, TENSOR, generate.size // TENSOR))
    return Placement(calls, int(run.generate > 0), streamed=run.generate > 0)


def step_s(run: VerlRun, constants: Constants = CONSTANTS) -> float:
    """Predicted."""
    asked = problem(run)
    return Estimator(asked, CostModel(asked, constants).rough).step_s(placement(run, asked))


def rows() -> Iterator[Row]:
    """Steps, and what asynchrony gains at each size."""
    found = {run: step_s(run) for run in VERL}
    for run, seconds in found.items():
        split = f"{run.train}:{run.generate}" if run.generate else f"{run.train}"
        mode = "asynchronous" if run.generate else "synchronous"
        setting = f"{run.name}, {split} H20, {mode}"
        fitted = not run.generate and (run.name, run.train) != UNFITTED
        yield Row("verl", "docs", setting, "step, s", run.step_s, seconds, fitted)
    for run, seconds in found.items():
        for other, other_s in found.items():
            same = (other.name, other.train) == (run.name, run.train + run.generate)
            if run.generate and not other.generate and same:
                setting = f"{run.name}, {run.train}:{run.generate} H20"
                printed = "pays" if run.step_s < other.step_s else "loses"
                predicted = "pays" if seconds < other_s else "loses"
                yield Row("verl", "docs", setting, "asynchrony", printed, predicted)
