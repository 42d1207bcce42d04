"""Predict a run's metrics by simulation, from timings fitted to the same or another run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from streamrl.config.role_counts import count_actors
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import GENERATE_CALL
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import Placement
from streamrl.planner.calibration.run_trace import ENGINE_WARM_UP_STEPS, RunTrace
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.planner.to_placement import build_run_placement
from streamrl.planner.to_planner_problem import (
    PlannerRequest,
    build_planner_problem,
    build_run_constants,
)

SIMULATED_STEPS = 60
"""Number of steps to simulate: more change the means by less than runs differ among themselves."""


@dataclass(frozen=True)
class SteadyMetrics:
    """Metrics of the steady part of a run: step time, idle fraction by stage, token staleness."""

    step_s: float
    idle: Mapping[str, float]
    staleness_mean: float

    @classmethod
    def from_run(cls, run: RunTrace | SimulationResult) -> "SteadyMetrics":
        return cls(run.mean_step_s, run.idle_fractions, run.staleness_mean)

    def compare_with(self, measured: "SteadyMetrics") -> dict[str, dict[str, float]]:
        """Compare predicted with measured metrics: {metric: {predicted, measured, error}}.

        error: relative to the measured value, 0 if both are 0; for idle fractions the difference.
        """
        pairs = {
            "step_s": (self.step_s, measured.step_s),
            **{f"idle/{stage}": (self.idle[stage], idle) for stage, idle in measured.idle.items()},
            "staleness_mean": (self.staleness_mean, measured.staleness_mean),
        }
        return {
            name: {
                "predicted": predicted,
                "measured": actual,
                "error": _compute_error(name, predicted, actual),
            }
            for name, (predicted, actual) in pairs.items()
        }


def _compute_error(name: str, predicted: float, measured: float) -> float:
    """Return the error of a predicted metric: relative, but for idle fractions the difference."""
    if name.startswith("idle/"):
        return predicted - measured
    if not measured:
        return 0.0 if not predicted else float("inf")
    return (predicted - measured) / measured


@dataclass(frozen=True)
class PlannedRun:
    """A run as a problem of the planner, and the placement that the run's config states."""

    config: RunConfig
    problem: PlacementProblem
    placement: Placement

    @classmethod
    def from_trace(
        cls, trace: RunTrace, config: RunConfig, cluster: Cluster | None = None
    ) -> "PlannedRun":
        """Build the problem and placement of a config, with the workload of a measured run.

        Without `cluster`, the devices are CPU cores. Raises ConfigError if the cluster is too small
        or a model cannot be sized.
        """
        request = PlannerRequest(
            trace.mean_prompt_tokens,
            lengths=trace.lengths,
            filtered_fraction=trace.filtered_fraction,
        )
        roles = build_planner_problem(config, cluster or Cluster.from_text("1xCPU"), request).models
        placement = build_run_placement(config, roles)
        size = max(
            assignment.mesh.first + assignment.mesh.size
            for assignment in placement.assignments.values()
        )
        if cluster is None:
            if not trace.cores:
                raise ConfigError(
                    "--cluster: missing; required unless the run used the CPU cores of one machine"
                )
            cluster = Cluster.from_text(f"1x{size}xCPU")
        if size > cluster.num_devices:
            raise ConfigError(f"--cluster {cluster}: too small: the run uses {size} devices")
        return cls(config, build_planner_problem(config, cluster, request), placement)

    @property
    def initial_constants(self) -> CostConstants:
        """Cost constants from which a calibration starts.

        On CPU, memory and compute terms of a decode step run at full speed; the fit attributes any
        slowness to the overhead of a step.
        """
        cluster = self.problem.cluster
        constants = build_run_constants(self.config, CostConstants.from_cluster(cluster))
        if cluster.is_cpu:
            constants = replace(constants, decode_flops_fraction=1.0, decode_memory_fraction=1.0)
        return constants

    @property
    def base_timings(self) -> StageTimings:
        timings = CostModel(self.problem, self.initial_constants).predict_timings(self.placement)
        generator = timings.generator
        if self.config.weights.kv == "recompute":
            generator = replace(generator, recompute_token_s=generator.prefill_token_s)
        return apply_replica_counts(replace(timings, generator=generator), self.config)


def count_generators(config: RunConfig) -> int:
    if config.placement.is_hybrid:
        _, workers = count_actors(config)[GENERATE_CALL.role]
        return workers // config.generator.tensor_parallel
    return config.generator.replicas


def apply_replica_counts(timings: StageTimings, config: RunConfig) -> StageTimings:
    counts = {role: count for role, (_, count) in count_actors(config).items()}
    generator = config.generator
    roles = {call.stage: call.role for call in config.dataflow.calls}
    return replace(
        timings,
        generator=replace(
            timings.generator,
            replicas=count_generators(config),
            max_running=generator.max_concurrent_rollouts,
        ),
        score={
            stage: replace(timing, replicas=counts[roles[stage]], batch=config.scorer.max_groups)
            for stage, timing in timings.score.items()
        },
        train={
            role: replace(timing, dp_size=config.get_trainer_config(role).fsdp_size)
            for role, timing in timings.train.items()
        },
    )


def predict_metrics(planned_run: PlannedRun, timings: StageTimings) -> SteadyMetrics:
    config = planned_run.config
    lead = config.pipeline.max_steps_ahead
    result = run_simulation(
        planned_run.problem.dataflow,
        planned_run.placement,
        apply_replica_counts(timings, config),
        planned_run.problem.workload,
        steps=SIMULATED_STEPS + 2 * lead + ENGINE_WARM_UP_STEPS,
        seed=0,
        run_options=planned_run.problem.run_options,
    )
    return SteadyMetrics.from_run(result.exclude_steps(lead + ENGINE_WARM_UP_STEPS, lead))
