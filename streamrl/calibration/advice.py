"""What bounds a run, and what other settings would make of it, by calibrated simulation."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.calibration.fit_timings import fit_timings
from streamrl.calibration.prediction import PlannedRun, SteadyMetrics, predict_metrics
from streamrl.calibration.run_trace import RunTrace
from streamrl.config import RunConfig, with_settings
from streamrl.dataflow import COST_CALL, CRITIC, EMA_REFERENCE, REWARD_CALL
from streamrl.errors import ConfigError
from streamrl.placement import Cluster, StageTimings
from streamrl.rewards.group_filter import AUTO_OVERSAMPLE

MIN_ERROR = 0.02
"""What a simulation says is never taken for better than this."""


@dataclass(frozen=True)
class StageLoad:
    """How busy a stage's processes are, as a part of the time, and how many groups wait for it."""

    stage: str
    busy_fraction: float
    mean_depth: float | None


@dataclass(frozen=True)
class SettingsOption:
    """Settings instead of the run's, and what a simulation says of them.

    change: of the step's length, as a part of what the simulation says of the run as it is.
    """

    description: str
    settings: tuple[str, ...]
    metrics: SteadyMetrics
    step_s_change: float


@dataclass(frozen=True)
class SettingsAdvice:
    """measured: the run as it was; simulated: as it would be by what was fitted to it.

    options: the shortest step first.
    """

    measured_metrics: SteadyMetrics
    simulated_metrics: SteadyMetrics
    options: Sequence[SettingsOption]

    @property
    def simulation_error(self) -> float:
        """How far the simulation is off on the run itself, as a part of a step."""
        return self.simulated_metrics.step_s / self.measured_metrics.step_s - 1

    @property
    def min_change(self) -> float:
        """A smaller change of a step's length says nothing."""
        return max(abs(self.simulation_error), MIN_ERROR)


def recommend_settings(measured: RunTrace, cluster: Cluster | None = None) -> SettingsAdvice:
    """Simulate the run, and each other way; on the devices it was made on, or some like them.

    Raises ConfigError if the run says too little.
    """
    planned = PlannedRun.from_trace(measured, measured.config, cluster)
    timings = fit_timings(measured, planned.base_timings).timings
    simulated = predict_metrics(planned, timings)
    options = []
    for what, settings in list_alternatives(measured.config):
        figures = _simulate_settings(measured, settings, timings, cluster)
        if figures is not None:
            change = figures.step_s / simulated.step_s - 1
            options.append(SettingsOption(what, _format_overrides(settings), figures, change))
    options.sort(key=lambda option: option.metrics.step_s)
    return SettingsAdvice(SteadyMetrics.from_trace(measured), simulated, options)


def measure_stage_loads(measured: RunTrace) -> list[StageLoad]:
    """Return how busy each stage is; the busiest first, which has least time to spare."""
    found = []
    for stage, idle in measured.idle_fractions.items():
        depths = [step.row.get(f"queue/depth/{stage}") for step in measured.steps]
        known = [float(depth) for depth in depths if depth is not None]
        found.append(StageLoad(stage, 1 - idle, statistics.fmean(known) if known else None))
    return sorted(found, key=lambda load: -load.busy_fraction)


@dataclass(frozen=True)
class FilterCost:
    """What a filter takes of a run's groups, and the time that goes into these in a step.

    Of a run that says nothing of it, as one of an older streamrl, only the share is known.
    oversample: prompts that were admitted for each place.
    """

    share: float
    generate_s: float
    score_s: float
    oversample: float


def measure_filter_cost(measured: RunTrace) -> FilterCost:
    """Return what the filter takes and costs, as means of the steps."""
    names = {"filter/generate_s": 0.0, "filter/score_s": 0.0, "filter/oversample": 1.0}
    means = []
    for name, default in names.items():
        found = [step.row[name] for step in measured.steps if step.row.get(name) is not None]
        means.append(statistics.fmean(found) if found else default)
    return FilterCost(measured.filtered_fraction, *means)


def list_alternatives(config: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """One replica more of each stage, other splits of the same devices, other bounds."""
    keys = _list_replica_settings(config)
    for what, (key, count, unit) in keys.items():
        yield f"one more {what}", {key: count + unit}
    yield from _list_device_splits(config)
    if config.filter.is_enabled and config.filter.oversample_factor is not None:
        yield "as many more prompts as the filter takes", {"filter.oversample": AUTO_OVERSAMPLE}
    bound = config.pipeline.max_staleness
    for other in (bound - 1, bound + 1, bound + 2):
        if other >= 0:
            settings = {"pipeline.max_staleness": other, "pipeline.depth": None}
            yield f"staleness up to {other}", settings


def _list_replica_settings(config: RunConfig) -> Mapping[str, tuple[str, int, int]]:
    """By what there can be one more of: the setting, its value, and how many make one."""
    roles = config.dataflow.calls_by_role
    found = {}
    if not config.placement.is_hybrid:
        found["generator"] = ("generator.replicas", config.generator.replicas, 1)
    if REWARD_CALL.role in roles or COST_CALL.role in roles:
        found["scorer"] = ("scorer.replicas", config.scorer.replicas, 1)
    if EMA_REFERENCE in roles:
        found["reference"] = ("reference.replicas", config.reference.replicas, 1)
    if any(role in roles for role in ("value", "cost_value")):
        found["value replica"] = ("critic.replicas", config.critic.replicas, 1)
    trainer = config.trainer
    found["trainer replica"] = (
        "trainer.world_size",
        trainer.world_size,
        trainer.tensor_parallel,
    )
    if CRITIC in roles:
        own = config.get_trainer_config(CRITIC)
        found["critic replica"] = (
            "critic.trainer.world_size",
            own.world_size,
            own.tensor_parallel,
        )
    return found


def _list_device_splits(config: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The same devices for generators and policy, shared out otherwise."""
    generator, trainer = config.generator, config.trainer
    if config.placement.shared_pools:
        if config.placement.is_hybrid and trainer.world_size > 1:
            half = trainer.world_size // 2
            yield (
                "devices of their own for generators and policy",
                {
                    "placement.mode": "disaggregated",
                    "placement.pools": [],
                    "placement.memory_mb": None,
                    "generator.replicas": trainer.world_size - half,
                    "trainer.world_size": half,
                },
            )
        return
    if max(generator.tensor_parallel, trainer.tensor_parallel) > 1:
        return
    devices = generator.replicas + trainer.world_size
    for what, replicas in (
        ("a device from the policy to the generators", generator.replicas + 1),
        ("a device from the generators to the policy", generator.replicas - 1),
    ):
        if 0 < replicas < devices:
            yield (
                what,
                {"generator.replicas": replicas, "trainer.world_size": devices - replicas},
            )
    yield (
        "generators and policy on the same devices",
        {"placement.mode": "colocated", "trainer.world_size": devices},
    )


def _simulate_settings(
    measured: RunTrace, settings: Mapping[str, Any], timings: StageTimings, cluster: Cluster | None
) -> SteadyMetrics | None:
    """What a simulation says; None of what no run could be, or has no room."""
    try:
        config = with_settings(measured.config, settings)
        planned = PlannedRun.from_trace(measured, config, cluster)
        return predict_metrics(planned, timings)
    except ConfigError:
        return None


def _format_overrides(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as words of the command line."""
    return tuple(f"{key}={'null' if value is None else value}" for key, value in settings.items())
