"""What a simulation says of a run, from timings that were fitted to it or to another one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from streamrl.calibration.run_trace import ENGINE_WARM_UP_STEPS, RunTrace
from streamrl.config import RunConfig
from streamrl.config.role_counts import count_actors
from streamrl.config.to_placement import build_run_placement
from streamrl.config.to_planner_problem import (
    PlannerRequest,
    build_planner_problem,
    build_run_constants,
)
from streamrl.dataflow import GENERATE_CALL, POLICY
from streamrl.engines.generator_config import KV_CACHE_MB_ON_CPU
from streamrl.errors import ConfigError
from streamrl.placement import Cluster, GeneratorTiming, Placement, PlacementProblem, StageTimings
from streamrl.placement.costs import CostConstants, CostModel
from streamrl.simulator.simulation import run_simulation

SIMULATED_STEPS = 60
"""Steps of a simulation; more change its means by less than a run's differ among themselves."""
DEFAULT_SEED = 0


@dataclass(frozen=True)
class SteadyMetrics:
    """How a run goes, in its steady part: idle by stage, staleness of a trained token."""

    step_s: float
    step_s_median: float
    idle: Mapping[str, float]
    staleness_mean: float

    @classmethod
    def from_trace(cls, measured: RunTrace) -> "SteadyMetrics":
        """As it was."""
        return cls(
            measured.mean_step_s,
            measured.median_step_s,
            measured.idle_fractions,
            measured.staleness_mean,
        )

    def compare_with(self, measured: "SteadyMetrics") -> dict[str, dict[str, float]]:
        """Of each figure what was predicted, by this, what was measured, and how far off it is.

        error: as a part of what was measured, 0 where neither is anything; of idle time, which is
        a part of a step's as it is, the difference.
        """
        pairs = {
            "step_s": (self.step_s, measured.step_s),
            "step_s_median": (self.step_s_median, measured.step_s_median),
            **{f"idle/{stage}": (self.idle[stage], idle) for stage, idle in measured.idle.items()},
            "staleness_mean": (self.staleness_mean, measured.staleness_mean),
        }
        return {
            name: {
                "predicted": mine,
                "measured": theirs,
                "error": _compute_error(name, mine, theirs),
            }
            for name, (mine, theirs) in pairs.items()
        }


def _compute_error(name: str, predicted: float, measured: float) -> float:
    if name.startswith("idle/"):
        return predicted - measured
    if not measured:
        return 0.0 if not predicted else float("inf")
    return (predicted - measured) / measured


@dataclass(frozen=True)
class PlannedRun:
    """A run as the planner sees it."""

    config: RunConfig
    problem: PlacementProblem
    placement: Placement

    @classmethod
    def from_trace(
        cls, measured: RunTrace, config: RunConfig, cluster: Cluster | None = None
    ) -> "PlannedRun":
        """A config, with the prompts and completions of a run; on CPU cores unless told.

        Raises ConfigError for a cluster that is too small, or a model that cannot be sized.
        """
        lengths = measured.grouped_lengths
        asked = PlannerRequest(
            measured.mean_prompt_tokens,
            lengths=lengths,
            filtered_fraction=measured.filtered_fraction,
        )
        roles = build_planner_problem(config, cluster or Cluster.from_text("1xCPU"), asked).models
        placement = build_run_placement(config, roles)
        size = max(one.mesh.first + one.mesh.size for one in placement.assignments.values())
        if cluster is None:
            if not measured.machine.cores:
                raise ConfigError("--cluster: missing; the run was not made on one machine's cores")
            cluster = Cluster.from_text(f"1x{size}xCPU")
        if size > cluster.num_devices:
            raise ConfigError(f"--cluster {cluster}: the run has {size} devices")
        return cls(config, build_planner_problem(config, cluster, asked), placement)

    @property
    def default_constants(self) -> CostConstants:
        """What is taken of its devices before anything is measured."""
        return CostConstants.from_cluster(self.problem.cluster)

    @property
    def initial_constants(self) -> CostConstants:
        """What a calibration starts from.

        A core's figures are taken for what they are: whatever is slower than them is what a decode
        step takes on top.
        """
        found = build_run_constants(self.config, self.default_constants, on_gpu=not self.is_on_cpu)
        if self.is_on_cpu:
            found = replace(found, decode_flops_fraction=1.0, decode_memory_fraction=1.0)
        return found

    @property
    def base_timings(self) -> StageTimings:
        """Its timings before anything is measured."""
        found = CostModel(self.problem, self.initial_constants).predict_timings(self.placement)
        generator = self._set_kv_tokens(found.generator)
        weights = self.config.weights
        if (weights.on_update, weights.kv) == ("interrupt", "recompute"):
            generator = replace(generator, recompute_token_s=generator.prefill_token_s)
        return apply_replica_counts(replace(found, generator=generator), self.config)

    @property
    def is_on_cpu(self) -> bool:
        """Whether its devices are cores."""
        return self.problem.cluster.is_cpu

    def _set_kv_tokens(self, generator: GeneratorTiming) -> GeneratorTiming:
        """With as many tokens as the run's engines have room for, where it says so."""
        kv_cache_mb = self.config.generator.kv_cache_mb
        if kv_cache_mb is None and self.is_on_cpu:
            kv_cache_mb = KV_CACHE_MB_ON_CPU
        if kv_cache_mb is None:
            return generator
        shape = self.problem.models[POLICY]
        itemsize = self.default_constants.kv_bytes
        token_bytes = shape.kv_bytes_per_token(itemsize) / self.config.generator.tensor_parallel
        return replace(generator, kv_tokens=(kv_cache_mb << 20) / token_bytes)


def apply_replica_counts(timings: StageTimings, config: RunConfig) -> StageTimings:
    """The same pace of everything, with the replicas that a run has."""
    numbers = {role: count for role, (_, count) in count_actors(config).items()}
    generator = config.generator
    replicas = generator.replicas
    if config.placement.is_hybrid:
        replicas = numbers[GENERATE_CALL.role] // generator.tensor_parallel
    roles = {call.stage: call.role for call in config.dataflow.calls}
    return replace(
        timings,
        generator=replace(
            timings.generator,
            replicas=replicas,
            max_running=generator.max_concurrent_rollouts,
        ),
        score={
            stage: replace(one, replicas=numbers[roles[stage]], batch=config.scorer.max_groups)
            for stage, one in timings.score.items()
        },
        train={
            role: replace(one, dp_size=config.get_trainer_config(role).dp_size)
            for role, one in timings.train.items()
        },
    )


def predict_metrics(
    planned: PlannedRun,
    timings: StageTimings,
    *,
    steps: int = SIMULATED_STEPS,
    seed: int = DEFAULT_SEED,
) -> SteadyMetrics:
    """What the run would do, by simulation."""
    config = planned.config
    lead = config.pipeline.max_steps_ahead
    found = run_simulation(
        planned.problem.dataflow,
        planned.placement,
        apply_replica_counts(timings, config),
        planned.problem.workload,
        steps=steps + 2 * lead + ENGINE_WARM_UP_STEPS,
        seed=seed,
        run_options=planned.problem.run_options,
    )
    steady = found.exclude_steps(lead + ENGINE_WARM_UP_STEPS, lead)
    return SteadyMetrics(
        steady.mean_step_s, steady.median_step_s, steady.idle_fractions, steady.staleness_mean
    )
