"""Advice on a run: its bottleneck, and the effect of other settings by calibrated simulation."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.config.role_counts import count_actors
from streamrl.config.run_config import RunConfig, with_settings
from streamrl.dataflow import CRITIC, SERVING_ROLES
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.planner.calibration.fit_timings import fit_timings
from streamrl.planner.calibration.prediction import PlannedRun, SteadyMetrics, predict_metrics
from streamrl.planner.calibration.run_trace import RunTrace
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.rewards.group_filter import AUTO_OVERSAMPLE

MIN_ERROR = 0.02
"""Minimum relative error of the step time that advice assumes for the simulator."""
Alternative = tuple[str, Mapping[str, Any]]
"""Description of other settings for a run, and the settings by dotted key."""


@dataclass(frozen=True)
class StageLoad:
    """Load of a stage: busy fraction of its processes' time, and mean number of waiting groups.

    mean_depth: None if the run logs no queue depth for the stage.
    """

    stage: str
    busy_fraction: float
    mean_depth: float | None


@dataclass(frozen=True)
class SettingsOption:
    """Alternative settings for a run, with simulated metrics.

    settings: overrides of the config, as key=value.
    step_s_change: relative to the simulated step time of the run as it is.
    """

    description: str
    settings: tuple[str, ...]
    metrics: SteadyMetrics
    step_s_change: float


@dataclass(frozen=True)
class SettingsAdvice:
    """Measured and simulated metrics of a run, and other settings for it, fastest first."""

    measured_metrics: SteadyMetrics
    simulated_metrics: SteadyMetrics
    options: Sequence[SettingsOption]

    @property
    def simulation_error(self) -> float:
        return self.simulated_metrics.step_s / self.measured_metrics.step_s - 1

    @property
    def min_change(self) -> float:
        return max(abs(self.simulation_error), MIN_ERROR)


def recommend_settings(
    trace: RunTrace,
    cluster: Cluster | None = None,
    *,
    track: Callable[[Iterable[Alternative], int], Iterable[Alternative]] = lambda items, total: (
        items
    ),
) -> SettingsAdvice:
    """Simulate a run with its own settings and with `list_alternatives`, there or on `cluster`.

    track: wraps the alternatives, for a progress bar; its second argument is their number. Raises
    ConfigError if the run is too short or incomplete.
    """
    planned_run = PlannedRun.from_trace(trace, trace.config, cluster)
    timings = fit_timings(trace, planned_run.base_timings).timings
    simulated = predict_metrics(planned_run, timings)
    options = []
    alternatives = [*list_alternatives(trace.config), *_list_open_episodes(trace)]
    for description, settings in track(alternatives, len(alternatives)):
        metrics = _simulate_settings(trace, settings, timings, cluster)
        if metrics is not None:
            change = metrics.step_s / simulated.step_s - 1
            overrides = tuple(f"{k}={'null' if v is None else v}" for k, v in settings.items())
            options.append(SettingsOption(description, overrides, metrics, change))
    options.sort(key=lambda option: option.metrics.step_s)
    return SettingsAdvice(SteadyMetrics.from_run(trace), simulated, options)


def measure_stage_loads(trace: RunTrace) -> list[StageLoad]:
    loads = []
    for stage, idle in trace.idle_fractions.items():
        depths = [step.row.get(f"queue/depth/{stage}") for step in trace.steps]
        known_depths = [float(depth) for depth in depths if depth is not None]
        loads.append(
            StageLoad(stage, 1 - idle, statistics.fmean(known_depths) if known_depths else None)
        )
    return sorted(loads, key=lambda load: -load.busy_fraction)


@dataclass(frozen=True)
class FilterCost:
    """Cost of the group filter: rejected groups, and the time spent on them per step.

    Runs of older versions log only the fraction.

    share: rejected groups as a fraction of rejected and trained groups.
    generate_s, score_s: seconds per step spent on sampling and scoring rejected groups.
    oversample: prompts admitted per group of a step.
    """

    share: float
    generate_s: float
    score_s: float
    oversample: float


def measure_filter_cost(trace: RunTrace) -> FilterCost:
    names = {"filter/generate_s": 0.0, "filter/score_s": 0.0, "filter/oversample": 1.0}
    means = []
    for name, default in names.items():
        values = [step.row[name] for step in trace.steps if step.row.get(name) is not None]
        means.append(statistics.fmean(values) if values else default)
    return FilterCost(trace.filtered_fraction, *means)


@dataclass(frozen=True)
class EpisodeLoad:
    """Episodes of a run, as means over its steps.

    turns, calls, sampled_tokens, environment_s: of an episode.
    decode_frac, wait_frac, environment_frac: shares of an episode's time in the engine, waiting for
        a slot or the devices, and in its environment.
    max_open: most open episodes of a generator.
    needed_open: open episodes that keep its decode slots busy: by Little's law slots * (1 +
        environment time / decode time), but no more than it has of the steps in flight.
    """

    turns: float
    calls: float
    sampled_tokens: float
    environment_s: float
    decode_frac: float
    wait_frac: float
    environment_frac: float
    max_open: int
    needed_open: int

    @property
    def has_too_few_open(self) -> bool:
        """Whether the limit of open episodes leaves decode slots free."""
        return self.max_open < self.needed_open


def measure_episodes(trace: RunTrace) -> EpisodeLoad | None:
    """Return the load of a run's episodes; None without an environment."""
    config = trace.config
    if not config.environment.is_enabled:
        return None

    def average(name: str) -> float:
        values = [step.row.get(f"episode/{name}") for step in trace.steps]
        return statistics.fmean(value for value in values if value is not None)

    decode, environment = average("decode_frac"), average("environment_frac")
    slots = config.generator.max_concurrent_rollouts
    generators = {group.process for group in trace.engine_requests}
    groups = (config.pipeline.max_steps_ahead + 1) * config.pipeline.groups_per_step
    in_flight = groups * config.algorithm.group_size / len(generators)
    return EpisodeLoad(
        average("turns"),
        average("calls"),
        average("sampled_tokens"),
        average("environment_s"),
        decode,
        average("wait_frac"),
        environment,
        config.max_open_rollouts,
        math.ceil(min(slots * (1 + environment / decode), in_flight)),
    )


def _list_open_episodes(trace: RunTrace) -> Iterator[Alternative]:
    load = measure_episodes(trace)
    if load is not None and load.has_too_few_open:
        yield (
            "open episodes for all decode slots",
            {"environment.open_episodes": load.needed_open},
        )


def list_alternatives(config: RunConfig) -> Iterator[Alternative]:
    """Yield alternatives to a config, each as a description and the settings to change.

    They are a further replica, other device splits, oversampling and other staleness bounds.
    """
    keys = _list_replica_settings(config)
    for description, (key, count, unit) in keys.items():
        yield f"one more {description}", {key: count + unit}
    yield from _list_device_splits(config)
    if config.filter.is_enabled and config.filter.oversample_factor is not None:
        yield "oversample to replace filtered groups", {"filter.oversample": AUTO_OVERSAMPLE}
    bound = config.pipeline.max_staleness
    for staleness in (bound - 1, bound + 1, bound + 2):
        if staleness >= 0:
            settings = {"pipeline.max_staleness": staleness, "pipeline.depth": None}
            yield f"max_staleness={staleness}", settings


def _list_replica_settings(config: RunConfig) -> Mapping[str, tuple[str, int, int]]:
    """Return, by kind of replica: config key, value, and the increase of the value per replica."""
    roles = config.dataflow.calls_by_role
    settings = {}
    for role, (key, count) in count_actors(config).items():
        if role in SERVING_ROLES and key == SERVING_ROLES[role].replicas:
            section = key.removesuffix(".replicas")
            settings["value replica" if section == "critic" else section] = (key, count, 1)
    trainer = config.trainer
    settings["trainer replica"] = (
        "trainer.world_size",
        trainer.world_size,
        trainer.ranks_per_batch,
    )
    if CRITIC in roles:
        critic_trainer = config.get_trainer_config(CRITIC)
        settings["critic replica"] = (
            "critic.trainer.world_size",
            critic_trainer.world_size,
            critic_trainer.ranks_per_batch,
        )
    return settings


def _list_device_splits(config: RunConfig) -> Iterator[Alternative]:
    generator, trainer = config.generator, config.trainer
    if config.placement.shared_pools:
        if config.placement.is_hybrid and trainer.world_size > 1:
            half = trainer.world_size // 2
            yield (
                "separate devices for generators and policy",
                {
                    "placement.mode": "disaggregated",
                    "placement.pools": [],
                    "placement.memory_mb": None,
                    "generator.replicas": trainer.world_size - half,
                    "trainer.world_size": half,
                },
            )
        return
    if max(generator.tensor_parallel, trainer.ranks_per_batch) > 1:
        return
    devices = generator.replicas + trainer.world_size
    for description, replicas in (
        ("one device moved from policy to generators", generator.replicas + 1),
        ("one device moved from generators to policy", generator.replicas - 1),
    ):
        if 0 < replicas < devices:
            yield (
                description,
                {"generator.replicas": replicas, "trainer.world_size": devices - replicas},
            )
    yield (
        "generators and policy on the same devices",
        {"placement.mode": "colocated", "trainer.world_size": devices},
    )


def _simulate_settings(
    trace: RunTrace, settings: Mapping[str, Any], timings: StageTimings, cluster: Cluster | None
) -> SteadyMetrics | None:
    try:
        config = with_settings(trace.config, settings)
        planned_run = PlannedRun.from_trace(trace, config, cluster)
        return predict_metrics(planned_run, timings)
    except ConfigError:
        return None
