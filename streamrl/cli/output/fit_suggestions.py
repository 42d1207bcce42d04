"""What would make a run fit where nothing does: settings, one at a time, and more devices."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamrl.config import RunConfig, with_settings
from streamrl.errors import ConfigError
from streamrl.placement import Cluster, PlacementProblem
from streamrl.placement.problem import PlacementCosts
from streamrl.placement.search import ParallelismChoices, SplitRules, can_fit
from streamrl.placement.steady_state.estimator import PlacementEstimator

MICRO_BATCH_FRACTIONS = 16
"""In so many parts of its size micro-batches are made smaller until they fit."""
CLUSTER_MULTIPLES = (2, 3, 4, 8)
"""So many times as many devices are tried."""
MAX_DEVICES = 512
LORA_RANK = 16

SettingValues = Mapping[str, Any]
PlanningInputs = tuple[PlacementProblem, PlacementCosts, SplitRules]


def suggest_fixes(
    config: RunConfig, cluster: Cluster, planning_of: Callable[[RunConfig, Cluster], PlanningInputs]
) -> list[str]:
    """Each of them by itself lets something fit; as settings are written, and clusters.

    planning_of: the problem of a config on a cluster, its costs, and how calls may be split.
    """

    def fits(settings: SettingValues, on: Cluster = cluster) -> bool:
        try:
            problem, costs, rules = planning_of(with_settings(config, settings), on)
        except ConfigError:
            return False
        return can_fit(
            ParallelismChoices(PlacementEstimator(problem, costs.approximate_costs), rules=rules)
        )

    longest = planning_of(config, cluster)[0].workload.max_rollout_tokens
    smaller = [size for size in _list_micro_batch_sizes(config) if size >= longest]
    found = [settings for settings in _iter_lossless_settings(config) if fits(settings)]
    found += _find_largest_fit({}, smaller, fits)
    checkpointed = {"trainer.gradient_checkpointing": True}
    if not found and not config.trainer.gradient_checkpointing:
        found += _find_largest_fit(checkpointed, smaller, fits)
    adapters = {"trainer.lora_rank": LORA_RANK}
    if not found and not config.trainer.lora_rank and fits(adapters):
        found.append(adapters)
    told = [
        ", ".join(f"{key}={_format_value(value)}" for key, value in each.items()) for each in found
    ]
    more = (
        _scale_cluster(cluster, times)
        for times in CLUSTER_MULTIPLES
        if cluster.num_devices * times <= MAX_DEVICES
    )
    enough = next((each for each in more if fits({}, each)), None)
    return told + ([f"--cluster {enough}"] if enough else [])


def _iter_lossless_settings(config: RunConfig) -> Iterator[SettingValues]:
    """Settings that cost time, and change nothing that is learned."""
    if not config.trainer.gradient_checkpointing:
        yield {"trainer.gradient_checkpointing": True}
    if config.generator.kv_cache_mb is not None:
        yield {"generator.kv_cache_mb": None}


def _list_micro_batch_sizes(config: RunConfig) -> list[int]:
    """Of micro-batches that are smaller than the run's."""
    whole = config.pipeline.micro_batch_tokens
    return [whole * part // MICRO_BATCH_FRACTIONS for part in range(1, MICRO_BATCH_FRACTIONS)]


def _find_largest_fit(
    with_these: SettingValues, sizes: Sequence[int], fits: Callable[[SettingValues], bool]
) -> list[SettingValues]:
    """The largest micro-batches that fit, of sizes that grow; none if not even the smallest do."""
    key = "pipeline.micro_batch_tokens"
    found: list[SettingValues] = [{**with_these, key: tokens} for tokens in sizes]
    # What fits still fits with less.
    fit = bisect_left(found, True, key=lambda settings: not fits(settings))
    return found[fit - 1 : fit] if fit else []


def _scale_cluster(cluster: Cluster, times: int) -> Cluster:
    """So many times as many nodes of each kind; of a part of one node, of its devices first."""
    groups = []
    for group in cluster.node_groups:
        per_node = group.device.devices_per_node
        if group.num_nodes == 1 and group.devices_per_node * times <= per_node:
            groups.append(replace(group, devices_per_node=group.devices_per_node * times))
        else:
            groups.append(replace(group, num_nodes=group.num_nodes * times))
    return Cluster(tuple(groups))


def _format_value(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
