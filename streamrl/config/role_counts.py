"""How many actors each role of a run has, and the slots they are on."""

from dataclasses import replace

from streamrl.config.run_config import RunConfig
from streamrl.dataflow import COST_CRITIC, CRITIC, POLICY
from streamrl.placement import SlotMap, lay_out_slots


def with_placement_mode(config: RunConfig, mode: str) -> RunConfig:
    """The config of the same run in a mode; a budget for workers goes where there are none."""
    there = config.placement
    has_workers = not (there.mode == "auto" and mode == "disaggregated")
    budget_mb = there.memory_mb if has_workers else None
    return replace(config, placement=replace(there, mode=mode, memory_mb=budget_mb))


def count_actors(config: RunConfig) -> dict[str, tuple[str, int]]:
    """How many actors each role of a run has, in flow order, and the setting that says so."""
    judges = ("scorer.replicas", config.scorer.replicas)
    shadows = ("critic.replicas", config.critic.replicas)
    policy = ("trainer.world_size", config.trainer.world_size)
    generators = ("generator.replicas", config.generator.replicas)
    known = {
        "generator": policy if config.placement.is_hybrid else generators,
        "reward": judges,
        "cost": judges,
        "reference": ("reference.replicas", config.reference.replicas),
        "value": shadows,
        "cost_value": shadows,
        POLICY: policy,
    }
    roles = config.dataflow.calls_by_role
    for role in {CRITIC, COST_CRITIC} & roles.keys():
        known[role] = ("critic.trainer.world_size", config.get_trainer_config(role).world_size)
    return {role: known[role] for role in roles}


def assign_slots(config: RunConfig) -> SlotMap:
    """The slots of every actor of a run, by role."""
    numbers = {role: count for role, (_, count) in count_actors(config).items()}
    return lay_out_slots(config.placement.shared_pools, numbers)


def describe_shared_slots(config: RunConfig) -> str:
    """Which roles share which slots, in one line; empty where none do."""
    return assign_slots(config).describe() if config.placement.shared_pools else ""
