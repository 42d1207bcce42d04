"""What would make a run fit where nothing does: settings, one at a time, and more devices."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from streamrl.config import RunConfig, with_settings
from streamrl.errors import ConfigError
from streamrl.placement import Cluster, Problem
from streamrl.placement.estimates import Costs
from streamrl.placement.schedule import Estimator
from streamrl.placement.search import Choices, Rules, can_fit

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

    found = [settings for settings in _plain(config) if fits(settings)]
    found += _smaller(config, {}, fits)
    checkpointed = {"trainer.gradient_checkpointing": True}
    if not found and not config.trainer.gradient_checkpointing:
        found += _smaller(config, checkpointed, fits)
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


def _smaller(
    config: RunConfig, with_these: Settings, fits: Callable[[Settings], bool]
) -> list[Settings]:
    """The largest micro-batches that fit; none if not even the smallest do."""
    whole = config.pipeline.micro_batch_tokens
    sizes = [whole * part // MICRO_BATCHES for part in range(1, MICRO_BATCHES)]

    def sized(tokens: int) -> Settings:
        return {**with_these, "pipeline.micro_batch_tokens": tokens}

    # What fits still fits with less; one that holds no rollout is refused.
    longest = config.generator.max_new_tokens
    fit = [size for size in sizes if size > longest]
    if not fit or not fits(sized(fit[0])):
        return []
    at, too_large = 0, len(fit)
    while too_large - at > 1:
        middle = (at + too_large) // 2
        if fits(sized(fit[middle])):
            at = middle
        else:
            too_large = middle
    return [sized(fit[at])]


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
