"""verl's synchronous and fully asynchronous steps: GRPO and DAPO on H20.

Batch sizes, lengths and parallelism are those of verl's scripts. The 20k and 8k series are one step
off: they wait for all of the previous step. Sequence, context and pipeline parallelism are modeled
as tensor parallelism of the same degree, and the policy's log-probability pass as a reward model.
Values that are not published, such as mean response lengths, are fitted on synchronous steps
(`VerlCalibration`, by `verl_fit`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.published.batches import predict_one_ahead_s
from benchmarks.published.points import VERL, VerlRun
from benchmarks.published.rows import Row
from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import MODEL_SHAPES
from streamrl.placement.clusters import DEVICES, Cluster, NodeGroup
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.steady_state.estimator import PlacementEstimator
from streamrl.resharding.grids import RankGrid

UNFITTED = ("7b-28k", 32)
"""Excluded from calibration: this run takes more than twice as long as on twice as many devices."""
TENSOR = 4
"""Tensor parallelism of the trainer."""
LONGEST_PROMPT = 2048


@dataclass(frozen=True)
class VerlCalibration:
    """Values fitted on parts of synchronous steps.

    fsdp2, megatron: fraction of peak FLOP/s in matrix products, by engine. entropy: duration of
    Megatron's policy log-probability pass, which computes entropy, over that of a reference pass.
    handoff_token_s: seconds per token for the single controller to hand a padded batch to a scoring
    or training call. update_s, decode_layer_s: see `CostConstants`. medians: response tokens, by
    series.
    """

    fsdp2: float = 0.839
    megatron: float = 0.387
    entropy: float = 1.18
    handoff_token_s: float = 0.1832e-6
    update_s: float = 3.1
    decode_layer_s: float = 0.68e-3
    medians: Mapping[str, float] = field(
        default_factory=lambda: {"7b-28k": 452, "7b-20k": 801, "7b-8k": 490, "30b-8k": 797}
    )


DEFAULT_CALIBRATION = VerlCalibration()


@dataclass(frozen=True)
class VerlSeries:
    """Runs that differ in devices only.

    longest: maximum response tokens. recompute_logprobs: whether (synchronous, asynchronous) steps
    have a policy log-probability pass. reference: whether steps have a reference pass. megatron:
    the engine; FSDP2 otherwise. expert: expert parallelism. group: responses per prompt. generate:
    ranks per generator. streamed: whether an asynchronous step trains on parts of its batch.
    """

    longest: int
    mini_batches: int
    recompute_logprobs: tuple[bool, bool] = (True, False)
    reference: bool = False
    megatron: bool = False
    expert: int = 1
    group: int = 16
    generate: int = 4
    streamed: bool = True


SIGMA = 0.7
"""Standard deviation of log lengths; not published."""
ONE_STEP_OFF: dict[str, Any] = {"group": 12, "generate": 2, "streamed": False}
SERIES = {
    "7b-28k": VerlSeries(28 * 1024, 16),
    "7b-20k": VerlSeries(20 * 1024, 16, (True, True), **ONE_STEP_OFF),
    "7b-8k": VerlSeries(8 * 1024, 16, (True, True), megatron=True, **ONE_STEP_OFF),
    "30b-8k": VerlSeries(8 * 1024, 4, reference=True, megatron=True, expert=8),
}
PROMPTS = 512
COLUMNS = ("generator_logprobs", "scores")


def average_rest_s(name: str) -> float:
    """Average the seconds outside the published parts over a series' synchronous runs."""
    rest = [run.rest_s for run in VERL if run.name == name and is_fitted(run)]
    return sum(rest) / len(rest)


def is_fitted(run: VerlRun) -> bool:
    """Return whether constants are calibrated on this run."""
    return not run.generate and (run.name, run.train) != UNFITTED


def compute_handoff_s(run: VerlRun, calibration: VerlCalibration = DEFAULT_CALIBRATION) -> float:
    """Compute seconds to hand the whole batch to a scoring or training call."""
    series = SERIES[run.name]
    tokens = PROMPTS * series.group * (LONGEST_PROMPT + series.longest)
    return calibration.handoff_token_s * tokens


def build_engine_constants(
    *, megatron: bool, calibration: VerlCalibration = DEFAULT_CALIBRATION
) -> CostConstants:
    """Build constants of vLLM with Megatron or FSDP2 in 2025; idle models are offloaded.

    An H20 has few FLOP/s for its memory bandwidth: a decode step of many rollouts is bound by
    matrix products, which reach the same fraction of peak as in training.
    """
    part = calibration.megatron if megatron else calibration.fsdp2
    return CostConstants(
        train_flops_fraction=part,
        forward_flops_fraction=part,
        decode_flops_fraction=calibration.fsdp2,
        half_width=64.0,
        recompute=False,
        decode_step_s=0.3e-3,
        decode_layer_s=calibration.decode_layer_s,
        decode_rollout_s=30e-6,
        link_hop_s=5e-6,
        max_running=1024,
        offloads_optimizer=True,
        offloads_weights=True,
        update_s=calibration.update_s,
    )


def build_constants(
    run: VerlRun, calibration: VerlCalibration = DEFAULT_CALIBRATION
) -> CostConstants:
    """Build the constants of a run: its engine's, with times per batch and step."""
    series, batch_s = SERIES[run.name], compute_handoff_s(run, calibration)
    return replace(
        build_engine_constants(megatron=series.megatron, calibration=calibration),
        train_step_s=average_rest_s(run.name) + batch_s,
        # A replica scores its part of the rollouts, but waits for the whole batch.
        score_rollout_s=batch_s * (run.train // TENSOR) / (PROMPTS * series.group),
    )


def build_problem(
    run: VerlRun, calibration: VerlCalibration = DEFAULT_CALIBRATION
) -> PlacementProblem:
    """Build the problem of a run: one model for all calls."""
    series, shape = SERIES[run.name], MODEL_SHAPES[run.model]
    models = {"policy": shape}
    if series.recompute_logprobs[bool(run.generate)]:
        models["reward"] = shape
    if series.reference:
        models["reference"] = shape
    workload = Workload(
        PROMPTS,
        series.group,
        200,
        LognormalLengths(calibration.medians[run.name], SIGMA, series.longest),
        mini_batches=series.mini_batches,
        micro_batch_tokens=2 * (series.longest + LONGEST_PROMPT),
        requires_whole_step=not (run.generate and series.streamed),
    )
    columns = (*COLUMNS, "ref_logprobs") if series.reference else COLUMNS
    devices = run.train + run.generate
    cluster = Cluster((NodeGroup(DEVICES["H20"], 8, devices // 8),))
    return PlacementProblem(build_dataflow(columns), models, workload, cluster)


def build_placement(run: VerlRun, problem: PlacementProblem) -> Placement:
    """Place all calls on all devices; if asynchronous, generators on their own, one step ahead."""
    train = Mesh(0, run.train)
    generate = Mesh(run.train, run.generate) if run.generate else train
    series = SERIES[run.name]
    zero_stage = 1 if series.expert > 1 else 3
    trained = CallAssignment(
        train, RankGrid(1, TENSOR, train.size // TENSOR), zero_stage, series.expert
    )
    calls = dict.fromkeys(problem.placed_stages, trained)
    calls["generate"] = CallAssignment(
        generate, RankGrid(1, series.generate, generate.size // series.generate)
    )
    streamed = series.streamed and run.generate > 0
    return Placement(calls, int(run.generate > 0), is_streamed=streamed)


class VerlCosts(CostModel):
    """Cost model of a run; Megatron computes entropy with the policy's log-probabilities."""

    def __init__(
        self,
        run: VerlRun,
        problem: PlacementProblem,
        calibration: VerlCalibration = DEFAULT_CALIBRATION,
    ) -> None:
        super().__init__(problem, build_constants(run, calibration))
        self.entropy_factor = calibration.entropy if SERIES[run.name].megatron else 1.0

    def predict_timings(self, placement: Placement) -> StageTimings:
        timings = super().predict_timings(placement)
        reward = timings.score["reward"]
        reward = replace(reward, token_s=reward.token_s * self.entropy_factor)
        return replace(timings, score={**timings.score, "reward": reward})


def predict_step_s(run: VerlRun, calibration: VerlCalibration = DEFAULT_CALIBRATION) -> float:
    problem = build_problem(run, calibration)
    costs, placement = VerlCosts(run, problem, calibration), build_placement(run, problem)
    if run.generate and not SERIES[run.name].streamed:
        return predict_one_ahead_s(problem, costs, placement)
    return PlacementEstimator(problem, costs).estimate_step_s(placement)


def iter_rows() -> Iterator[Row]:
    """Yield steps, and at each size whether asynchrony pays."""
    predictions = {run: predict_step_s(run) for run in VERL}
    for run, seconds in predictions.items():
        split = f"{run.train}:{run.generate}" if run.generate else f"{run.train}"
        mode = "asynchronous" if run.generate else "synchronous"
        setting = f"{run.name}, {split} H20, {mode}"
        yield Row("verl", "docs", setting, "step, s", run.step_s, seconds, is_fitted(run))
    for run, seconds in predictions.items():
        for base, base_s in predictions.items():
            is_same_size = (base.name, base.train) == (run.name, run.train + run.generate)
            if run.generate and not base.generate and is_same_size:
                setting = f"{run.name}, {run.train}:{run.generate} H20"
                printed = "pays" if run.step_s < base.step_s else "loses"
                predicted = "pays" if seconds < base_s else "loses"
                yield Row("verl", "docs", setting, "asynchrony", printed, predicted)
