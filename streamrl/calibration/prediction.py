"""What a simulation says of a run, from timings that were fitted to it or to another one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from streamrl.calibration.run_trace import SETTLING_STEPS, Measured
from streamrl.config import RunConfig
from streamrl.config.role_counts import counts
from streamrl.config.to_placement import run_placement
from streamrl.config.to_planner_problem import Asked, problem_of, run_constants
from streamrl.dataflow import GENERATE, POLICY
from streamrl.engines.generator_config import KV_CACHE_MB_ON_CPU
from streamrl.errors import ConfigError
from streamrl.placement import Cluster, GeneratorTiming, Placement, Problem, Timings
from streamrl.placement.costs import Constants, CostModel
from streamrl.simulator.simulation import simulate

STEPS = 60
"""Steps of a simulation; more change its means by less than a run's differ among themselves."""
SEED = 0


@dataclass(frozen=True)
class Figures:
    """How a run goes, in its steady part: idle by stage, staleness of a trained token."""

    step_s: float
    step_s_median: float
    idle: Mapping[str, float]
    staleness_mean: float

    @classmethod
    def of(cls, measured: Measured) -> "Figures":
        """As it was."""
        return cls(measured.mean_step_s, measured.step_s, measured.idle, measured.staleness_mean)

    def against(self, measured: "Figures") -> dict[str, dict[str, float]]:
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
            name: {"predicted": mine, "measured": theirs, "error": _error(name, mine, theirs)}
            for name, (mine, theirs) in pairs.items()
        }


def _error(name: str, predicted: float, measured: float) -> float:
    if name.startswith("idle/"):
        return predicted - measured
    if not measured:
        return 0.0 if not predicted else float("inf")
    return (predicted - measured) / measured


@dataclass(frozen=True)
class PlannedRun:
    """A run as the planner sees it."""

    config: RunConfig
    problem: Problem
    placement: Placement

    @classmethod
    def of(
        cls, measured: Measured, config: RunConfig, cluster: Cluster | None = None
    ) -> "PlannedRun":
        """A config, with the prompts and completions of a run; on CPU cores unless told.

        Raises ConfigError for a cluster that is too small, or a model that cannot be sized.
        """
        lengths = measured.grouped_lengths
        asked = Asked(measured.prompt_tokens, lengths=lengths, filtered=measured.filtered)
        roles = problem_of(config, cluster or Cluster.parse("1xCPU"), asked).models
        placement = run_placement(config, roles)
        size = max(one.mesh.first + one.mesh.size for one in placement.calls.values())
        if cluster is None:
            if not measured.machine.cores:
                raise ConfigError("--cluster: missing; the run was not made on one machine's cores")
            cluster = Cluster.parse(f"1x{size}xCPU")
        if size > cluster.size:
            raise ConfigError(f"--cluster {cluster}: the run has {size} devices")
        return cls(config, problem_of(config, cluster, asked), placement)

    @property
    def defaults(self) -> Constants:
        """What is taken of its devices before anything is measured."""
        return Constants.of(self.problem.cluster)

    @property
    def start(self) -> Constants:
        """What a calibration starts from.

        A core's figures are taken for what they are: whatever is slower than them is what a decode
        step takes on top.
        """
        found = run_constants(self.config, self.defaults, on_gpu=not self.is_on_cpu)
        if self.is_on_cpu:
            found = replace(found, decode_flops_fraction=1.0, decode_memory_fraction=1.0)
        return found

    @property
    def base(self) -> Timings:
        """Its timings before anything is measured."""
        found = CostModel(self.problem, self.start).timings(self.placement)
        generator = self._with_room(found.generator)
        weights = self.config.weights
        if (weights.on_update, weights.kv) == ("interrupt", "recompute"):
            generator = replace(generator, recompute_token_s=generator.prefill_token_s)
        return timed(replace(found, generator=generator), self.config)

    @property
    def is_on_cpu(self) -> bool:
        """Whether its devices are cores."""
        return self.problem.cluster.is_cpu

    def _with_room(self, generator: GeneratorTiming) -> GeneratorTiming:
        """With as many tokens as the run's engines have room for, where it says so."""
        kv_cache_mb = self.config.generator.kv_cache_mb
        if kv_cache_mb is None and self.is_on_cpu:
            kv_cache_mb = KV_CACHE_MB_ON_CPU
        if kv_cache_mb is None:
            return generator
        shape = self.problem.models[POLICY]
        itemsize = self.defaults.kv_bytes
        token_bytes = shape.kv_bytes_per_token(itemsize) / self.config.generator.tensor_parallel
        return replace(generator, kv_tokens=(kv_cache_mb << 20) / token_bytes)


def timed(timings: Timings, config: RunConfig) -> Timings:
    """The same pace of everything, with the replicas that a run has."""
    numbers = {role: count for role, (_, count) in counts(config).items()}
    generator = config.generator
    replicas = generator.replicas
    if config.placement.is_hybrid:
        replicas = numbers[GENERATE.role] // generator.tensor_parallel
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
            role: replace(one, shares=config.trainer_of(role).num_shares)
            for role, one in timings.train.items()
        },
    )


def predict(
    planned: PlannedRun, timings: Timings, *, steps: int = STEPS, seed: int = SEED
) -> Figures:
    """What the run would do, by simulation."""
    config = planned.config
    lead = config.pipeline.lead
    found = simulate(
        planned.problem.dataflow,
        planned.placement,
        timed(timings, config),
        planned.problem.workload,
        steps=steps + 2 * lead + SETTLING_STEPS,
        seed=seed,
        manner=planned.problem.manner,
    )
    steady = found.without(lead + SETTLING_STEPS, lead)
    return Figures(steady.step_s, steady.step_s_median, steady.idle, steady.staleness_mean)
