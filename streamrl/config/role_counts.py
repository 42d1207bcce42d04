"""Actor counts per role of a run, and the placement slots of those actors."""

from dataclasses import replace
from operator import attrgetter

from streamrl.config.run_config import RunConfig
from streamrl.dataflow import COST_CRITIC, CRITIC, GENERATE_CALL, POLICY, SERVING_ROLES
from streamrl.placement.pools import SlotMap, lay_out_slots


def with_placement_mode(config: RunConfig, mode: str) -> RunConfig:
    """Return the config with placement mode `mode` in place of "auto".

    In place of "auto", disaggregated also drops placement.memory_mb, a limit of colocated
    processes.
    """
    placement = config.placement
    has_workers = not (placement.mode == "auto" and mode == "disaggregated")
    budget_mb = placement.memory_mb if has_workers else None
    return replace(config, placement=replace(placement, mode=mode, memory_mb=budget_mb))


def count_actors(config: RunConfig) -> dict[str, tuple[str, int]]:
    """Return the number of actors of each role, with the setting that determines the number.

    Roles come in the order of the dataflow.
    """
    roles = config.dataflow.calls_by_role
    counts: dict[str, tuple[str, int]] = {}
    for role, facts in SERVING_ROLES.items():
        ranks = count_ranks_per_replica(config, role)
        times = f" * {facts.ranks or 'the world_size of its model'}" * (ranks > 1)
        setting = f"{facts.replicas}{times}"
        replicas: int | None = attrgetter(facts.replicas)(config)
        counts[role] = setting, (1 if replicas is None else replicas) * ranks
    counts[POLICY] = ("trainer.world_size", config.trainer.world_size)
    if config.placement.is_hybrid:
        counts[GENERATE_CALL.role] = counts[POLICY]
    for role in {CRITIC, COST_CRITIC} & roles.keys():
        counts[role] = ("critic.trainer.world_size", config.get_trainer_config(role).world_size)
    return {role: counts[role] for role in roles}


def count_ranks_per_replica(config: RunConfig, role: str) -> int:
    """Return the number of actors that hold a copy of a serving role's model together."""
    if split := config.find_split_reward(role):
        return split.options.world_size
    setting = SERVING_ROLES[role].ranks if role in SERVING_ROLES else ""
    ranks: int = attrgetter(setting)(config) if setting else 1
    return ranks


def assign_slots(config: RunConfig) -> SlotMap:
    """Assign each role its placement slots; roles of a shared pool have slots in common."""
    counts = {role: count for role, (_, count) in count_actors(config).items()}
    return lay_out_slots(config.placement.shared_pools, counts)


def describe_shared_slots(config: RunConfig) -> str:
    """Describe in one line which roles use which placement slots; "" if no roles share a pool."""
    return assign_slots(config).describe() if config.placement.shared_pools else ""
