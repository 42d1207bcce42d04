"""What would make a run fit where nothing does: settings, one at a time, and more devices."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamrl.config import RunConfig, with_settings
from streamrl.errors import ConfigError
from streamrl.placement import Cluster, Problem
from streamrl.placement.problem import Costs
from streamrl.placement.search import Choices, Rules, can_fit
from streamrl.placement.steady_state.estimator import Estimator

MICRO_BATCHES = 16
"""In so many parts of its size micro-batches are made smaller until they fit."""
TIMES = (2, 3, 4, 8)
"""So many times as many devices are tried."""
MOST_DEVICES = 512
LORA_RANK = 16

Settings = Mapping[str, Any]
Planning = tuple[Problem, Costs, Rules]


def remedies(
    config: RunConfig, cluster: Cluster, planning_of: Callable[[RunConfig, Cluster], Planning]
) -> list[str]:
    """Each of them by itself lets something fit; as settings are written, and clusters.

    planning_of: the problem of a config on a cluster, its costs, and how calls may be split.
    """

    def fits(settings: Settings, on: Cluster = cluster) -> bool:
        try:
            problem, costs, rules = planning_of(with_settings(config, settings), on)
        except ConfigError:
            return False
        return can_fit(Choices(Estimator(problem, costs.rough), rules=rules))

    longest = planning_of(config, cluster)[0].workload.most_tokens
    smaller = [size for size in _sizes(config) if size >= longest]
    found = [settings for settings in _plain(config) if fits(settings)]
    found += _largest({}, smaller, fits)
    checkpointed = {"trainer.gradient_checkpointing": True}
    if not found and not config.trainer.gradient_checkpointing:
        found += _largest(checkpointed, smaller, fits)
    adapters = {"trainer.lora_rank": LORA_RANK}
    if not found and not config.trainer.lora_rank and fits(adapters):
        found.append(adapters)
    told = [", ".join(f"{key}={_written(value)}" for key, value in each.items()) for each in found]
    more = (_larger(cluster, times) for times in TIMES if cluster.size * times <= MOST_DEVICES)
    enough = next((each for each in more if fits({}, each)), None)
    return told + ([f"--cluster {enough}"] if enough else [])


def _plain(config: RunConfig) -> Iterator[Settings]:
    """Settings that cost time, and change nothing that is learned."""
    if not config.trainer.gradient_checkpointing:
        yield {"trainer.gradient_checkpointing": True}
    if config.generator.kv_cache_mb is not None:
        yield {"generator.kv_cache_mb": None}


def _sizes(config: RunConfig) -> list[int]:
    """Of micro-batches that are smaller than the run's."""
    whole = config.pipeline.micro_batch_tokens
    return [whole * part // MICRO_BATCHES for part in range(1, MICRO_BATCHES)]


def _largest(
    with_these: Settings, sizes: Sequence[int], fits: Callable[[Settings], bool]
) -> list[Settings]:
    """The largest micro-batches that fit, of sizes that grow; none if not even the smallest do."""
    key = "pipeline.micro_batch_tokens"
    found: list[Settings] = [{**with_these, key: tokens} for tokens in sizes]
    # What fits still fits with less.
    fit = bisect_left(found, True, key=lambda settings: not fits(settings))
    return found[fit - 1 : fit] if fit else []


def _larger(cluster: Cluster, times: int) -> Cluster:
    """So many times as many nodes of each kind; of a part of one node, of its devices first."""
    groups = []
    for group in cluster.groups:
        per_node = group.device.per_node
        if group.count == 1 and group.devices * times <= per_node:
            groups.append(replace(group, devices=group.devices * times))
        else:
            groups.append(replace(group, count=group.count * times))
    return Cluster(tuple(groups))


def _written(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
