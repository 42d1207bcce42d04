"""verl's steps, synchronous and fully asynchronous: GRPO and DAPO on H20.

Batches, longest lengths and grids are those of its scripts; those with 20k and 8k are one step off,
which waits for all of the step before. Sequence, context and pipeline parallelism stand as tensor
parallelism of as many ranks.
The pass for the policy's own log-probabilities computes entropy, too, and stands as a reward model.
A reference takes as long as is left of the one synchronous step that has one, 14 s of 498 on 128
devices: it computes as fast as training does. How long responses are on average is not given: one
figure for each series of runs, fitted on its synchronous ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.published.points import VERL, VerlRun
from benchmarks.published.rows import Row
from streamrl.dataflow import dataflow_for
from streamrl.placement.clusters import DEVICES, Cluster, NodeGroup
from streamrl.placement.costs import Constants, CostModel
from streamrl.placement.costs.rough import RoughTraffic
from streamrl.placement.estimates import Problem
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.schedule import Estimator
from streamrl.placement.shapes import SHAPES
from streamrl.placement.timings import Timings
from streamrl.placement.workload import LognormalLengths, Workload
from streamrl.resharding import Grid

CONSTANTS = Constants(
    train_flops_fraction=0.7,
    forward_flops_fraction=0.26,
    half_width=64.0,
    recompute=False,
    decode_step_s=0.3e-3,
    decode_layer_s=0.59e-3,
    decode_rollout_s=30e-6,
    link_hop_s=5e-6,
    max_running=1024,
    offloads_optimizer=True,
    offloads_weights=True,
    update_s=3.3,
    train_step_s=25.0,
)
"""Of vLLM and FSDP2 or Megatron in 2025, calibrated on the parts of synchronous steps, whose
rollouts are packed as streamrl packs them; what rests is on the host. An update takes seconds
however many devices there are."""
UNFITTED = ("7b-28k", 32)
"""A synchronous run that takes more than twice as long as one on twice as many devices: the same
work does not, so nothing is calibrated on it."""
TENSOR = 4
"""Ranks that share a sequence in training."""


@dataclass(frozen=True)
class Series:
    """Runs that have all but devices in common.

    own: whether a synchronous step, and an asynchronous one, has a pass for the policy's own
    log-probabilities. reference: whether steps have one. expert: ranks that share out experts, by
    Megatron; with 1 weights are sharded by FSDP2. group: responses of a prompt. generate: ranks of
    a generator. streamed: whether an asynchronous step trains what it has, or waits for all of it.
    """

    median: float
    longest: int
    mini_batches: int
    own: tuple[bool, bool] = (True, False)
    reference: bool = False
    expert: int = 1
    group: int = 16
    generate: int = 4
    streamed: bool = True


SIGMA = 0.7
"""Of the logarithm of lengths: not given."""
ONE_STEP_OFF: dict[str, Any] = {"group": 12, "generate": 2, "streamed": False}
SERIES = {
    "7b-28k": Series(540, 28 * 1024, 16),
    "7b-20k": Series(650, 20 * 1024, 16, (True, True), **ONE_STEP_OFF),
    "7b-8k": Series(650, 8 * 1024, 16, (True, True), **ONE_STEP_OFF),
    "30b-8k": Series(1900, 8 * 1024, 4, reference=True, expert=8),
}
COLUMNS = ("generator_logprobs", "scores")


class Costs(CostModel):
    """A reference computes no entropy, so that it is as fast as training."""

    def timings(self, placement: Placement) -> Timings:
        """As of CostModel, but for the reference."""
        found = super().timings(placement)
        if "reference" not in found.score:
            return found
        constants, timing = self.constants, found.score["reference"]
        faster = constants.forward_flops_fraction / constants.train_flops_fraction
        reference = replace(timing, token_s=timing.token_s * faster)
        return replace(found, score={**found.score, "reference": reference})


def problem(run: VerlRun) -> Problem:
    """One model for all calls."""
    series, shape = SERIES[run.name], SHAPES[run.model]
    models = {"policy": shape}
    if series.own[bool(run.generate)]:
        models["reward"] = shape
    if series.reference:
        models["reference"] = shape
    workload = Workload(
        512,
        series.group,
        200,
        LognormalLengths(series.median, SIGMA, series.longest),
        mini_batches=series.mini_batches,
        micro_batch_tokens=2 * (series.longest + 2048),
        whole_steps=not (run.generate and series.streamed),
    )
    columns = (*COLUMNS, "ref_logprobs") if series.reference else COLUMNS
    devices = run.train + run.generate
    cluster = Cluster((NodeGroup(DEVICES["H20"], 8, devices // 8),))
    return Problem(dataflow_for(columns), models, workload, cluster)


def placement(run: VerlRun, asked: Problem) -> Placement:
    """All on all devices on policy; or generators apart, a step ahead."""
    train = Mesh(0, run.train)
    generate = Mesh(run.train, run.generate) if run.generate else train
    series = SERIES[run.name]
    zero_stage = 1 if series.expert > 1 else 3
    trained = Assignment(train, Grid(1, TENSOR, train.size // TENSOR), zero_stage, series.expert)
    calls = dict.fromkeys(asked.stages, trained)
    calls["generate"] = Assignment(
        generate, Grid(1, series.generate, generate.size // series.generate)
    )
    streamed = series.streamed and run.generate > 0
    return Placement(calls, int(run.generate > 0), streamed=streamed)


def step_s(run: VerlRun, constants: Constants = CONSTANTS) -> float:
    """Predicted.

    One step off, verl's engines have one batch at a time: the next one is sampled while this one is
    scored and trained, and weights pass in between. streamrl's have both, so its schedule is none
    of these runs.
    """
    asked, series = problem(run), SERIES[run.name]
    costs, placed = Costs(asked, constants, traffic=RoughTraffic), placement(run, asked)
    if not run.generate or series.streamed:
        return Estimator(asked, costs).step_s(placed)
    apart = {stage: costs.call_s(stage, each) for stage, each in placed.calls.items()}
    sampling_s = apart.pop("generate")
    weights = costs.timings(placed).weights["generate"]
    return weights.publish_s + weights.pull_s + max(sampling_s, sum(apart.values()))


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
