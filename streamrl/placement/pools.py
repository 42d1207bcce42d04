"""Which devices each role has: pools of slots, shared by the roles in them, whole or in parts.

A slot is one device, or one CPU slot of a cluster without any. A pool is as large as its roles
need it to be. One that has a ratio below 1 of it lies beside the others that have, so that they
compute at the same time; all others of the pool take turns with them. Sets of models
that share devices (arXiv:2409.19256) and ratios of devices (arXiv:2312.11819) are both written so.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

#: A role's part of a pool, by role.
RolePool = Mapping[str, float]

FOLLOWED_ROLES = {"generator": "policy", "value": "critic", "cost_value": "cost_critic"}
"""Those that hold the weights of another, and have a part of the pool together with it."""
ACTOR_ROLES = ("policy", "generator")
CRITIC_ROLES = ("critic", "value")
COST_CRITIC_ROLES = ("cost_critic", "cost_value")
SCORER_ROLES = ("reference", "reward", "cost")
POOL_ROLES = (*ACTOR_ROLES, *CRITIC_ROLES, *COST_CRITIC_ROLES, *SCORER_ROLES)


def make_pool(*roles: str, of: float = 1.0) -> dict[str, float]:
    """Roles that have the same part of a pool each."""
    return dict.fromkeys(roles, of)


POOL_STRATEGIES: dict[str, tuple[RolePool, ...]] = {
    # All on all devices, one after the other.
    "colocated": (make_pool(*POOL_ROLES),),
    # As colocated, but reference and reward side by side.
    "interleaving": (
        make_pool(*ACTOR_ROLES, *CRITIC_ROLES, *COST_CRITIC_ROLES)
        | make_pool(*SCORER_ROLES, of=0.5),
    ),
    # Actor and critic side by side, each with one of those that score.
    "split": (
        make_pool(*ACTOR_ROLES, "reference", "cost"),
        make_pool(*CRITIC_ROLES, *COST_CRITIC_ROLES, "reward"),
    ),
    # What only computes forward, shadows of actor and critic among it, apart from what is trained.
    "shadow": (
        make_pool("generator", "value", "cost_value", *SCORER_ROLES),
        make_pool("policy", "critic", "cost_critic"),
    ),
}
"""By name, the pools of each; roles that a run does not have are left away."""


@dataclass(frozen=True)
class SlotMap:
    """The slots of each role, one for each of its actors, in order."""

    slots: Mapping[str, tuple[int, ...]]

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return 1 + max((slot for each in self.slots.values() for slot in each), default=-1)

    def list_roles(self, slot: int) -> list[str]:
        """The roles with an actor on a slot."""
        return [role for role, each in self.slots.items() if slot in each]

    def find_slots(self, roles: Collection[str]) -> set[int]:
        """The slots on which any of these roles has an actor."""
        return {slot for role in roles for slot in self.slots.get(role, ())}

    def describe(self) -> str:
        """As in `slots: 0 to 3 for policy, generator; 4 for reward`."""
        parts = [
            (", ".join(roles), list(each))
            for roles, each in groupby(range(self.num_slots), key=self.list_roles)
        ]
        spans = [
            (f"{each[0]} to {each[-1]}" if len(each) > 1 else f"{each[0]}", roles)
            for roles, each in parts
        ]
        return "slots: " + "; ".join(f"{span} for {roles}" for span, roles in spans)


def has_colocated_actor(pools: Sequence[RolePool]) -> bool:
    """Whether the policy's trainer and the generators have the same part of the same pool."""
    return any("policy" in pool and pool["policy"] == pool.get("generator") for pool in pools)


def lay_out_slots(pools: Sequence[RolePool], counts: Mapping[str, int]) -> SlotMap:
    """The slots of so many actors of each role; one that is in no pool has slots of its own."""
    held = {role for pool in pools for role in pool}
    alone = [{role: 1.0} for role in counts if role not in held]
    slots: dict[str, tuple[int, ...]] = {}
    size = 0
    for pool in (*pools, *alone):
        present = {role: part for role, part in pool.items() if role in counts}
        found = _place_in_pool(present, counts)
        # A slot that nobody has is not asked for.
        used = sorted({slot for each in found.values() for slot in each})
        number = {slot: size + i for i, slot in enumerate(used)}
        slots |= {role: tuple(number[slot] for slot in each) for role, each in found.items()}
        size += len(used)
    return SlotMap({role: slots[role] for role in counts})


def _count_slots(pool: RolePool, counts: Mapping[str, int]) -> int:
    """The fewest slots of which each role's part has one for each of its actors."""
    return max(
        (math.ceil(counts[role] / _to_fraction(part)) for role, part in pool.items()), default=0
    )


def _place_in_pool(pool: RolePool, counts: Mapping[str, int]) -> dict[str, range]:
    """Parts are laid one behind the other, and from the beginning again where one has no room."""
    size, end = _count_slots(pool, counts), Fraction(0)
    begins: dict[tuple[str, Fraction], Fraction] = {}
    found = {}
    for role, ratio in pool.items():
        part = _to_fraction(ratio)
        unit = (FOLLOWED_ROLES.get(role, role), part)
        if unit not in begins:
            begins[unit] = end if end + part <= 1 else Fraction(0)
            end = begins[unit] + part if part < 1 else end
        first = math.floor(begins[unit] * size)
        found[role] = range(first, first + counts[role])
    return found


def _to_fraction(ratio: float) -> Fraction:
    return Fraction(ratio).limit_denominator(1024)
