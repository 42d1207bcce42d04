"""Slots of each role: by strategy name, by ratio and by sets of roles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from streamrl.config.role_counts import assign_slots
from streamrl.config.run_config import RunConfig, parse_settings
from streamrl.errors import ConfigError
from streamrl.placement.pools import (
    FOLLOWED_ROLES,
    POOL_ROLES,
    POOL_STRATEGIES,
    RolePool,
    SlotMap,
    has_colocated_actor,
    lay_out_slots,
)

PPO = {"generator": 2, "reference": 1, "reward": 1, "value": 1, "policy": 2, "critic": 2}


def lay_out(pools, counts=PPO) -> dict[str, tuple[int, ...]]:
    return dict(lay_out_slots(pools, counts).slots)


def test_interleaving_places_reference_and_reward_side_by_side():
    by_role = lay_out(POOL_STRATEGIES["interleaving"])
    assert (by_role["reference"], by_role["reward"]) == ((0,), (1,))
    assert by_role["policy"] == by_role["generator"] == by_role["critic"] == (0, 1)
    # Two of each need a pool of four, half of it for each.
    by_role = lay_out(POOL_STRATEGIES["interleaving"], {**PPO, "reference": 2, "reward": 2})
    assert (by_role["reference"], by_role["reward"]) == ((0, 1), (2, 3))


def test_shadow_separates_forward_only_from_trained_roles():
    by_role = lay_out(POOL_STRATEGIES["shadow"])
    assert by_role["policy"] == by_role["critic"] == (2, 3)
    assert by_role["generator"] == (0, 1)
    assert by_role["value"] == by_role["reference"] == by_role["reward"] == (0,)
    assert not has_colocated_actor(POOL_STRATEGIES["shadow"])


def test_describe_lists_slots_in_one_line():
    counts = {"policy": 2, "generator": 2, "reference": 1, "reward": 1}
    pools: list[RolePool] = [{"policy": 1, "generator": 1}, {"reference": 0.5, "reward": 0.5}]
    line = "slots: 0 to 1 for policy, generator; 2 for reference; 3 for reward"
    assert lay_out_slots(pools, counts).describe() == line


@pytest.mark.parametrize("name", POOL_STRATEGIES)
def test_every_strategy_covers_every_role(name: str):
    assert sorted(role for pool in POOL_STRATEGIES[name] for role in pool) == sorted(POOL_ROLES)


POOLS = st.lists(st.sampled_from(POOL_ROLES), unique=True, max_size=len(POOL_ROLES)).flatmap(
    lambda roles: st.tuples(
        st.just(roles),
        st.lists(st.integers(0, 2), min_size=len(roles), max_size=len(roles)),
        st.lists(
            st.sampled_from([1.0, 0.5, 0.25, 1 / 3, 0.75, 0.1]),
            min_size=len(roles),
            max_size=len(roles),
        ),
    )
)


@given(POOLS, st.dictionaries(st.sampled_from(POOL_ROLES), st.integers(1, 9), min_size=1))
def test_every_actor_has_one_slot_in_its_pool(drawn, counts):
    pools: list[dict[str, float]] = [{}, {}, {}]
    for role, pool, fraction in zip(*drawn, strict=True):
        pools[pool][role] = fraction
    placement = lay_out_slots(pools, counts)
    assert {role: len(set(role_slots)) for role, role_slots in placement.slots.items()} == counts
    pool_by_role = {role: i for i, pool in enumerate(pools) for role in pool}
    for slot in range(placement.num_slots):
        roles = placement.list_roles(slot)
        assert roles
        # Roles on one slot belong to one pool; a role outside all pools has its own slots.
        assert len({pool_by_role.get(role, role) for role in roles}) <= 1
    check_parts_are_disjoint_until_the_pool_is_full(pools, placement)


def check_parts_are_disjoint_until_the_pool_is_full(pools, placement: SlotMap) -> None:
    for pool in pools:
        # A follower and its leader occupy one part.
        parts: dict[tuple[str, float], set[int]] = {}
        for role in pool.keys() & placement.slots.keys():
            if pool[role] < 1:
                unit = parts.setdefault((FOLLOWED_ROLES.get(role, role), pool[role]), set())
                unit.update(placement.slots[role])
        if sum(part for _, part in parts) <= 1:
            assert sum(map(len, parts.values())) == len(set().union(*parts.values()))


def make_config(*, algorithm: str = "ppo", **placement) -> RunConfig:
    settings = {
        "model": {"path": "model"},
        "data": {"train": "rows.jsonl"},
        "rewards": [{"kind": "exact"}],
        "algorithm": {"name": algorithm, "kl_coef": 0.1},
        "placement": placement,
    }
    return parse_settings(RunConfig, OmegaConf.create(settings))


@pytest.mark.parametrize(
    ("mode", "hybrid", "size"),
    [
        # The critic's ranks compute the values.
        ("disaggregated", False, 5),
        ("colocated", True, 1),
        ("interleaving", True, 2),
        ("split", True, 2),
        ("shadow", False, 2),
    ],
)
def test_mode_determines_the_number_of_slots(mode: str, hybrid: bool, size: int):
    config = make_config(mode=mode)
    assert config.placement.is_hybrid is hybrid
    assert assign_slots(config).num_slots == size


def test_colocated_run_has_one_generator_per_rank():
    config = make_config(mode="colocated")
    config.trainer.world_size = 3
    assert assign_slots(config).slots["generator"] == (0, 1, 2)
    separate = make_config(mode="mixed", pools=[{"policy": 1.0}, {"generator": 0.5}])
    assert not separate.placement.is_hybrid


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"mode": "mixed", "pools": [{}]}, r"placement.mode=mixed: needs placement.pools"),
        ({"pools": [{"policy": 1}]}, "has no effect with placement.mode=auto"),
        (
            {"mode": "mixed", "pools": [{"actor": 1}]},
            r"placement.pools\[0\].actor=1: must be one of policy, critic",
        ),
        (
            {"mode": "mixed", "pools": [{"policy": 1}, {"generator": 1.5}]},
            r"placement.pools\[1\].generator=1.5: must be at least 1/1024 and at most 1",
        ),
        (
            {"mode": "mixed", "pools": [{"policy": 1}, {"policy": 0.5}]},
            "placement.pools: policy is in 2 pools",
        ),
        (
            {"mode": "mixed", "pools": [{"policy": 1, "cost": 1}]},
            r"placement.pools=.*: the roles of ppo here are generator,"
            " reward",
        ),
    ],
)
def test_impossible_pools_are_refused(placement: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        make_config(**placement)
