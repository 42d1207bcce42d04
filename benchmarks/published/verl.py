"""verl's steps, synchronous and fully asynchronous: GRPO and DAPO on H20.

Batches, longest lengths and grids are those of its scripts; those with 20k and 8k are one step off,
which waits for all of the step before. Sequence, context and pipeline parallelism stand as tensor
parallelism of as many ranks. The pass for the policy's own log-probabilities stands as a reward
model. What is not given, as how long responses are on average, is fitted on synchronous steps:
`CalibrationResult`, by `verl_fit`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.published.batches import one_ahead_s
from benchmarks.published.points import VERL, VerlRun
from benchmarks.published.rows import Row
from streamrl.dataflow import build_dataflow
from streamrl.placement.clusters import DEVICES, Cluster, NodeGroup
from streamrl.placement.costs.approximate_traffic import ApproximateTraffic
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import MODEL_SHAPES
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.stage_timings import StageTimings
from streamrl.placement.steady_state.estimator import PlacementEstimator
from streamrl.placement.workload import LognormalLengths, Workload
from streamrl.resharding.grids import RankGrid

UNFITTED = ("7b-28k", 32)
"""A synchronous run that takes more than twice as long as one on twice as many devices: the same
work does not, so nothing is calibrated on it."""
TENSOR = 4
"""Ranks that share a sequence in training."""
LONGEST_PROMPT = 2048


@dataclass(frozen=True)
class Calibration:
    """What is fitted on parts of synchronous steps.

    fsdp2, megatron: the part of their FLOP/s that devices reach in matrix products, by engine.
    entropy: Megatron's pass for the policy's own log-probabilities, which computes entropy, takes
    so many times as long as a reference's. handed_token_s: the one controller hands a whole batch,
    padded to the longest, to each call that scores or trains; of each token of it. update_s,
    decode_layer_s: as `CostConstants` has them. medians: tokens of a response, by series.
    """

    fsdp2: float = 0.839
    megatron: float = 0.387
    entropy: float = 1.18
    handed_token_s: float = 0.1832e-6
    update_s: float = 3.1
    decode_layer_s: float = 0.68e-3
    medians: Mapping[str, float] = field(
        default_factory=lambda: {"7b-28k": 452, "7b-20k": 801, "7b-8k": 490, "30b-8k": 797}
    )


CALIBRATED = Calibration()


@dataclass(frozen=True)
class Series:
    """Runs that have all but devices in common.

    own: whether a synchronous step, and an asynchronous one, has a pass for the policy's own
    log-probabilities. reference: whether steps have one. megatron: the engine, else FSDP2. expert:
    ranks that share out experts. group: responses of a prompt. generate: ranks of a generator.
    streamed: whether an asynchronous step trains what it has, or waits for all of it.
    """

    longest: int
    mini_batches: int
    own: tuple[bool, bool] = (True, False)
    reference: bool = False
    megatron: bool = False
    expert: int = 1
    group: int = 16
    generate: int = 4
    streamed: bool = True


SIGMA = 0.7
"""Of the logarithm of lengths: not given."""
ONE_STEP_OFF: dict[str, Any] = {"group": 12, "generate": 2, "streamed": False}
SERIES = {
    "7b-28k": Series(28 * 1024, 16),
    "7b-20k": Series(20 * 1024, 16, (True, True), **ONE_STEP_OFF),
    "7b-8k": Series(8 * 1024, 16, (True, True), megatron=True, **ONE_STEP_OFF),
    "30b-8k": Series(8 * 1024, 4, reference=True, megatron=True, expert=8),
}
PROMPTS = 512
COLUMNS = ("generator_logprobs", "scores")


def rest_s(name: str) -> float:
    """Of a step, what its printed parts leave, on average of the synchronous ones of a series."""
    found = [run.rest_s for run in VERL if run.name == name and is_fitted(run)]
    return sum(found) / len(found)


def is_fitted(run: VerlRun) -> bool:
    """Whether constants are calibrated on it."""
    return not run.generate and (run.name, run.train) != UNFITTED


def handed_s(run: VerlRun, calibrated: Calibration = CALIBRATED) -> float:
    """Of a call that scores or trains, until it has the whole batch."""
    series = SERIES[run.name]
    tokens = PROMPTS * series.group * (LONGEST_PROMPT + series.longest)
    return calibrated.handed_token_s * tokens


def of_engine(*, megatron: bool, calibrated: Calibration = CALIBRATED) -> CostConstants:
    """Of vLLM, and of Megatron or FSDP2, in 2025; what rests is on the host.

    An H20 has so few FLOP/s for its memory that a decode step of many rollouts is bound by its
    matrix products, which reach what they reach in training.
    """
    part = calibrated.megatron if megatron else calibrated.fsdp2
    return CostConstants(
        train_flops_fraction=part,
        forward_flops_fraction=part,
        decode_flops_fraction=calibrated.fsdp2,
        half_width=64.0,
        recompute=False,
        decode_step_s=0.3e-3,
        decode_layer_s=calibrated.decode_layer_s,
        decode_rollout_s=30e-6,
        link_hop_s=5e-6,
        max_running=1024,
        offloads_optimizer=True,
        offloads_weights=True,
        update_s=calibrated.update_s,
    )


def constants(run: VerlRun, calibrated: Calibration = CALIBRATED) -> CostConstants:
    """Those of its engine, with what only its own batches and steps take."""
    series, batch_s = SERIES[run.name], handed_s(run, calibrated)
    return replace(
        of_engine(megatron=series.megatron, calibrated=calibrated),
        train_step_s=rest_s(run.name) + batch_s,
        # A replica has its part of all rollouts, and waits for all of the batch.
        score_rollout_s=batch_s * (run.train // TENSOR) / (PROMPTS * series.group),
    )


def problem(run: VerlRun, calibrated: Calibration = CALIBRATED) -> PlacementProblem:
    """One model for all calls."""
    series, shape = SERIES[run.name], MODEL_SHAPES[run.model]
    models = {"policy": shape}
    if series.own[bool(run.generate)]:
        models["reward"] = shape
    if series.reference:
        models["reference"] = shape
    workload = Workload(
        PROMPTS,
        series.group,
        200,
        LognormalLengths(calibrated.medians[run.name], SIGMA, series.longest),
        mini_batches=series.mini_batches,
        micro_batch_tokens=2 * (series.longest + LONGEST_PROMPT),
        requires_whole_step=not (run.generate and series.streamed),
    )
    columns = (*COLUMNS, "ref_logprobs") if series.reference else COLUMNS
    devices = run.train + run.generate
    cluster = Cluster((NodeGroup(DEVICES["H20"], 8, devices // 8),))
    return PlacementProblem(build_dataflow(columns), models, workload, cluster)


def placement(run: VerlRun, asked: PlacementProblem) -> Placement:
    """All on all devices on policy; or generators apart, a step ahead."""
    train = Mesh(0, run.train)
    generate = Mesh(run.train, run.generate) if run.generate else train
    series = SERIES[run.name]
    zero_stage = 1 if series.expert > 1 else 3
    trained = CallAssignment(
        train, RankGrid(1, TENSOR, train.size // TENSOR), zero_stage, series.expert
    )
    calls = dict.fromkeys(asked.placed_stages, trained)
    calls["generate"] = CallAssignment(
        generate, RankGrid(1, series.generate, generate.size // series.generate)
    )
    streamed = series.streamed and run.generate > 0
    return Placement(calls, int(run.generate > 0), is_streamed=streamed)


class Costs(CostModel):
    """Of a run, with its own constants; Megatron computes entropy beside own log-probabilities."""

    def __init__(
        self, run: VerlRun, asked: PlacementProblem, calibrated: Calibration = CALIBRATED
    ) -> None:
        super().__init__(asked, constants(run, calibrated), traffic=ApproximateTraffic)
        self.own_times = calibrated.entropy if SERIES[run.name].megatron else 1.0

    def predict_timings(self, placement: Placement) -> StageTimings:
        """As of CostModel, but for the pass that stands as a reward model."""
        found = super().predict_timings(placement)
        own = found.score["reward"]
        own = replace(own, token_s=own.token_s * self.own_times)
        return replace(found, score={**found.score, "reward": own})


def step_s(run: VerlRun, calibrated: Calibration = CALIBRATED) -> float:
    """Predicted."""
    asked = problem(run, calibrated)
    model, placed = Costs(run, asked, calibrated), placement(run, asked)
    if run.generate and not SERIES[run.name].streamed:
        return one_ahead_s(asked, model, placed)
    return PlacementEstimator(asked, model).step_s(placed)


def rows() -> Iterator[Row]:
    """Steps, and what asynchrony gains at each size."""
    found = {run: step_s(run) for run in VERL}
    for run, seconds in found.items():
        split = f"{run.train}:{run.generate}" if run.generate else f"{run.train}"
        mode = "asynchronous" if run.generate else "synchronous"
        setting = f"{run.name}, {split} H20, {mode}"
        yield Row("verl", "docs", setting, "step, s", run.step_s, seconds, is_fitted(run))
    for run, seconds in found.items():
        for other, other_s in found.items():
            same = (other.name, other.train) == (run.name, run.train + run.generate)
            if run.generate and not other.generate and same:
                setting = f"{run.name}, {run.train}:{run.generate} H20"
                printed = "pays" if run.step_s < other.step_s else "loses"
                predicted = "pays" if seconds < other_s else "loses"
                yield Row("verl", "docs", setting, "asynchrony", printed, predicted)
