"""Which slots each role has: strategies by name, by ratio and by sets of roles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from streamrl.config import RunConfig, parse_settings
from streamrl.config.role_counts import assign_slots
from streamrl.errors import ConfigError
from streamrl.placement import POOL_STRATEGIES, SlotMap, lay_out_slots
from streamrl.placement.pools import FOLLOWED_ROLES, POOL_ROLES, RolePool, has_colocated_actor

PPO = {"generator": 2, "reference": 1, "reward": 1, "value": 1, "policy": 2, "critic": 2}


def slots(pools, counts=PPO) -> dict[str, tuple[int, ...]]:
    return dict(lay_out_slots(pools, counts).slots)


def test_colocated_roles_are_on_the_same_slots() -> None:
    assert slots(POOL_STRATEGIES["colocated"]) == {
        "generator": (0, 1),
        "reference": (0,),
        "reward": (0,),
        "value": (0,),
        "policy": (0, 1),
        "critic": (0, 1),
    }


def test_interleaving_has_reference_and_reward_side_by_side() -> None:
    found = slots(POOL_STRATEGIES["interleaving"])
    assert (found["reference"], found["reward"]) == ((0,), (1,))
    assert found["policy"] == found["generator"] == found["critic"] == (0, 1)
    # Two of each need a pool of four, of which they have a half each.
    found = slots(POOL_STRATEGIES["interleaving"], {**PPO, "reference": 2, "reward": 2})
    assert (found["reference"], found["reward"]) == ((0, 1), (2, 3))


def test_split_has_actor_and_critic_side_by_side() -> None:
    found = slots(POOL_STRATEGIES["split"])
    assert found["policy"] == found["generator"] == (0, 1)
    assert found["critic"] == (2, 3)
    assert (found["reference"], found["value"], found["reward"]) == ((0,), (2,), (2,))


def test_shadows_are_apart_from_what_is_trained() -> None:
    found = slots(POOL_STRATEGIES["shadow"])
    assert found["policy"] == found["critic"] == (2, 3)
    assert found["generator"] == (0, 1)
    assert found["value"] == found["reference"] == found["reward"] == (0,)
    assert not has_colocated_actor(POOL_STRATEGIES["shadow"])


def test_a_role_in_no_pool_has_slots_of_its_own() -> None:
    found = slots([{"policy": 1, "generator": 1}])
    assert found["policy"] == found["generator"] == (0, 1)
    alone = [found[role] for role in ("reference", "reward", "value", "critic")]
    assert sorted(slot for each in alone for slot in each) == [2, 3, 4, 5, 6]


def test_without_pools_every_actor_has_a_slot_of_its_own() -> None:
    placement = lay_out_slots((), PPO)
    assert placement.num_slots == sum(PPO.values())
    assert all(len(placement.list_roles(slot)) == 1 for slot in range(placement.num_slots))


def test_a_placement_is_told_in_one_line() -> None:
    counts = {"policy": 2, "generator": 2, "reference": 1, "reward": 1}
    pools: list[RolePool] = [{"policy": 1, "generator": 1}, {"reference": 0.5, "reward": 0.5}]
    told = "slots: 0 to 1 for policy, generator; 2 for reference; 3 for reward"
    assert lay_out_slots(pools, counts).describe() == told
    assert lay_out_slots(
        [{"reward": 0.5}, {"policy": 1}], {"reward": 1, "policy": 1}
    ).describe() == ("slots: 0 for reward; 1 for policy")


@pytest.mark.parametrize("name", POOL_STRATEGIES)
def test_every_strategy_has_a_part_for_every_role(name: str) -> None:
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
def test_every_actor_has_one_slot_of_its_roles_pool(drawn, counts) -> None:
    pools: list[dict[str, float]] = [{}, {}, {}]
    for role, pool, part in zip(*drawn, strict=True):
        pools[pool][role] = part
    placement = lay_out_slots(pools, counts)
    assert {role: len(set(each)) for role, each in placement.slots.items()} == counts
    homes = {role: i for i, pool in enumerate(pools) for role in pool}
    for slot in range(placement.num_slots):
        there = placement.list_roles(slot)
        assert there
        # Who shares a slot is in one pool; whoever is in none is alone.
        assert len({homes.get(role, role) for role in there}) <= 1
    _no_two_parts_overlap_before_the_pool_is_full(pools, placement)


def _no_two_parts_overlap_before_the_pool_is_full(pools, placement: SlotMap) -> None:
    for pool in pools:
        # Partners have one part together.
        parts: dict[tuple[str, float], set[int]] = {}
        for role in pool.keys() & placement.slots.keys():
            if pool[role] < 1:
                unit = parts.setdefault((FOLLOWED_ROLES.get(role, role), pool[role]), set())
                unit.update(placement.slots[role])
        if sum(part for _, part in parts) <= 1:
            assert sum(map(len, parts.values())) == len(set().union(*parts.values()))


def config_of(*, algorithm: str = "ppo", **placement) -> RunConfig:
    loose = {
        "model": {"path": "model"},
        "data": {"train": "rows.jsonl"},
        "rewards": [{"kind": "exact"}],
        "algorithm": {"name": algorithm, "kl_coef": 0.1},
        "placement": placement,
    }
    return parse_settings(OmegaConf.create(loose), place="test")


@pytest.mark.parametrize(
    ("mode", "hybrid", "size"),
    [
        ("disaggregated", False, 6),
        ("colocated", True, 1),
        ("interleaving", True, 2),
        ("split", True, 2),
        ("shadow", False, 2),
    ],
)
def test_a_mode_says_how_many_slots_a_run_needs(mode: str, hybrid: bool, size: int) -> None:
    config = config_of(mode=mode)
    assert config.placement.is_hybrid is hybrid
    assert assign_slots(config).num_slots == size


def test_a_run_of_one_process_per_rank_has_as_many_generators_as_ranks() -> None:
    config = config_of(mode="colocated")
    config.trainer.world_size = 3
    assert assign_slots(config).slots["generator"] == (0, 1, 2)
    apart = config_of(mode="mixed", pools=[{"policy": 1.0}, {"generator": 0.5}])
    assert not apart.placement.is_hybrid


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"mode": "mixed"}, r"placement.mode=mixed: needs placement.pools"),
        ({"mode": "mixed", "pools": [{}]}, r"placement.mode=mixed: needs placement.pools"),
        ({"pools": [{"policy": 1}]}, "goes with placement.mode=mixed, not auto"),
        (
            {"mode": "mixed", "pools": [{"actor": 1}]},
            r"placement.pools\[0\].actor=1: must be one of policy, generator",
        ),
        (
            {"mode": "mixed", "pools": [{"policy": 1}, {"generator": 1.5}]},
            r"placement.pools\[1\].generator=1.5: must be at least 1/1024 and at most 1",
        ),
        (
            {"mode": "mixed", "pools": [{"policy": 1e-9}]},
            r"placement.pools\[0\].policy=1e-09: must be at least 1/1024",
        ),
        (
            {"mode": "mixed", "pools": [{"policy": 1}, {"policy": 0.5}]},
            "placement.pools: policy is in 2 of them",
        ),
        (
            {"mode": "mixed", "pools": [{"policy": 1, "cost": 1}]},
            r"placement.pools\[0\].cost: ppo has no such role here; the roles are generator, reward",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused(placement: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**placement)
