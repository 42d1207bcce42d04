"""Suggestions for a run whose memory fits no placement: other settings, or more devices."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamrl.cli.output.setting_docs import format_yaml
from streamrl.config.run_config import RunConfig, with_settings
from streamrl.engines.trainer_config import OFFLOAD
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.problem import PlacementCosts, PlacementProblem
from streamrl.placement.search.hybridflow_mapping import can_fit
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices, SplitRules
from streamrl.placement.steady_state.estimator import PlacementEstimator

MICRO_BATCH_FRACTIONS = 16
"""Micro-batch sizes are tried in steps of this fraction of the configured size."""
CLUSTER_MULTIPLES = (2, 3, 4, 8)
"""Multiples of the number of devices to try."""
MAX_DEVICES = 512
LORA_RANK = 16

SettingValues = Mapping[str, Any]
PlanningInputs = tuple[PlacementProblem, PlacementCosts, SplitRules]


def suggest_fixes(
    config: RunConfig, cluster: Cluster, make_inputs: Callable[[RunConfig, Cluster], PlanningInputs]
) -> list[str]:
    """Return command-line arguments, each of which alone lets some placement fit the memory.

    make_inputs: returns the planner problem of a config on a cluster, its costs and its split
    rules.
    """

    def fits(settings: SettingValues, on: Cluster = cluster) -> bool:
        try:
            problem, costs, rules = make_inputs(with_settings(config, settings), on)
        except ConfigError:
            return False
        return can_fit(
            ParallelismChoices(PlacementEstimator(problem, costs.approximate_costs), rules=rules)
        )

    longest = make_inputs(config, cluster)[0].workload.max_rollout_tokens
    full = config.pipeline.micro_batch_tokens
    smaller = [full * k // MICRO_BATCH_FRACTIONS for k in range(1, MICRO_BATCH_FRACTIONS)]
    smaller = [size for size in smaller if size >= longest]
    fixes = [settings for settings in _iter_lossless_settings(config) if fits(settings)]
    fixes += _find_largest_fit({}, smaller, fits)
    checkpointed = {"trainer.gradient_checkpointing": True}
    if not fixes and not config.trainer.gradient_checkpointing:
        fixes += _find_largest_fit(checkpointed, smaller, fits)
    adapters = {"trainer.lora_rank": LORA_RANK}
    if not fixes and not config.trainer.lora_rank and fits(adapters):
        fixes.append(adapters)
    overrides = [
        ", ".join(f"{key}={format_yaml(value)}" for key, value in settings.items())
        for settings in fixes
    ]
    larger_clusters = (
        _scale_cluster(cluster, times)
        for times in CLUSTER_MULTIPLES
        if cluster.num_devices * times <= MAX_DEVICES
    )
    sufficient = next((larger for larger in larger_clusters if fits({}, larger)), None)
    return overrides + ([f"--cluster {sufficient}"] if sufficient else [])


def _iter_lossless_settings(config: RunConfig) -> Iterator[SettingValues]:
    """Yield changed settings that save memory, cost time and leave the learned model unchanged."""
    if not config.trainer.gradient_checkpointing:
        yield {"trainer.gradient_checkpointing": True}
    elif config.trainer.gradient_checkpointing != OFFLOAD:
        yield {"trainer.gradient_checkpointing": OFFLOAD}
    if not config.trainer.offload_optimizer:
        yield {"trainer.offload_optimizer": True}
    if config.generator.kv_cache_mb is not None:
        yield {"generator.kv_cache_mb": None}


def _find_largest_fit(
    base: SettingValues, sizes: Sequence[int], fits: Callable[[SettingValues], bool]
) -> list[SettingValues]:
    """Return a list with the settings of the largest micro-batch that fits; empty if none fits.

    sizes: in tokens, ascending. Memory grows with the size, so a binary search finds the limit.
    """
    key = "pipeline.micro_batch_tokens"
    candidates: list[SettingValues] = [{**base, key: tokens} for tokens in sizes]
    num_fitting = bisect_left(candidates, True, key=lambda settings: not fits(settings))
    return candidates[num_fitting - 1 : num_fitting] if num_fitting else []


def _scale_cluster(cluster: Cluster, times: int) -> Cluster:
    """Multiply the devices; a partly used single node grows if it has room, else nodes do."""
    groups = []
    for group in cluster.node_groups:
        per_node = group.device.devices_per_node
        if group.num_nodes == 1 and group.devices_per_node * times <= per_node:
            groups.append(replace(group, devices_per_node=group.devices_per_node * times))
        else:
            groups.append(replace(group, num_nodes=group.num_nodes * times))
    return Cluster(tuple(groups))
