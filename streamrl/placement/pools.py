"""Slots of each role, where several roles share a pool of devices as a whole or in fractions.

A slot is one device, or one CPU slot on a cluster without GPUs. Roles determine the size of their
pool. Roles with a ratio below 1 lie side by side and compute at the same time; all other roles of
the pool take turns with them. The notation covers HybridFlow's sets of models (arXiv:2409.19256)
and FlexRLHF's ratios of devices (arXiv:2312.11819).

    pool {policy: 1, reference: 0.5, reward: 0.5} with 4 policy, 2 reference, 2 reward actors
    slot        0          1          2          3
    policy      x          x          x          x
    others   reference  reference   reward     reward
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import groupby

from streamrl.dataflow import GENERATE_CALL, POLICY, REWARD_CALL, SERVING_ROLES, SOURCE_CALLS

#: Roles that share a pool, and the fraction of the pool that each role gets.
RolePool = Mapping[str, float]

FOLLOWED_ROLES = {call.role: call.followed_role for call in SOURCE_CALLS if call.followed_role}
"""Roles that hold the weights of another role and use the slots of that role within a pool."""
TRAINED_ROLES = tuple(dict.fromkeys(FOLLOWED_ROLES.values()))
POOL_ROLES = (*TRAINED_ROLES, *SERVING_ROLES)
ACTOR_ROLES = (POLICY, GENERATE_CALL.role)
SCORER_ROLES = tuple(role for role in SERVING_ROLES if role not in FOLLOWED_ROLES)
CRITIC_SIDE = tuple(r for r in POOL_ROLES if r not in (*ACTOR_ROLES, *SCORER_ROLES))
"""Critics, and the roles that hold their weights."""


def make_pool(*roles: str, of: float = 1.0) -> dict[str, float]:
    return dict.fromkeys(roles, of)


POOL_STRATEGIES: dict[str, tuple[RolePool, ...]] = {
    # All roles on all devices, in turn.
    "colocated": (make_pool(*POOL_ROLES),),
    # As colocated, but reference and reward side by side on half of the devices each.
    "interleaving": (make_pool(*ACTOR_ROLES, *CRITIC_SIDE) | make_pool(*SCORER_ROLES, of=0.5),),
    # Actor and critic side by side, the critic with the reward, the actor with all other scorers.
    "split": (
        make_pool(*ACTOR_ROLES, *(role for role in SCORER_ROLES if role != REWARD_CALL.role)),
        make_pool(*CRITIC_SIDE, REWARD_CALL.role),
    ),
    # Forward-only roles, including the shadows of actor and critic, apart from trained roles.
    "shadow": (make_pool(*SERVING_ROLES), make_pool(*TRAINED_ROLES)),
}
"""Pools of roles by name of a placement strategy; roles that a run lacks are ignored."""


@dataclass(frozen=True)
class SlotMap:
    """Slot numbers of each role's actors, in the order of the actors."""

    slots: Mapping[str, tuple[int, ...]]

    @property
    def num_slots(self) -> int:
        return 1 + max(
            (slot for role_slots in self.slots.values() for slot in role_slots), default=-1
        )

    def list_roles(self, slot: int) -> list[str]:
        return [role for role, role_slots in self.slots.items() if slot in role_slots]

    def find_slots(self, roles: Collection[str]) -> set[int]:
        return {slot for role in roles for slot in self.slots.get(role, ())}

    def describe(self) -> str:
        """Format the map as `slots: 0 to 3 for policy, generator; 4 for reward`."""
        parts = [
            (", ".join(roles), list(run))
            for roles, run in groupby(range(self.num_slots), key=self.list_roles)
        ]
        spans = [
            (f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}", roles)
            for roles, run in parts
        ]
        return "slots: " + "; ".join(f"{span} for {roles}" for span, roles in spans)


def has_colocated_actor(pools: Sequence[RolePool]) -> bool:
    """Return whether policy and generator share the same slots of one pool."""
    return any("policy" in pool and pool["policy"] == pool.get("generator") for pool in pools)


def lay_out_slots(pools: Sequence[RolePool], counts: Mapping[str, int]) -> SlotMap:
    """Assign a slot to each actor; a role outside all pools gets slots of its own.

    counts: number of actors by role.
    """
    pooled = {role for pool in pools for role in pool}
    own_pools = [{role: 1.0} for role in counts if role not in pooled]
    slots: dict[str, tuple[int, ...]] = {}
    size = 0
    for pool in (*pools, *own_pools):
        present = {role: fraction for role, fraction in pool.items() if role in counts}
        ranges = _place_in_pool(present, counts)
        # Unused slots are not requested from Ray.
        used = sorted({slot for role_slots in ranges.values() for slot in role_slots})
        number = {slot: size + i for i, slot in enumerate(used)}
        slots |= {
            role: tuple(number[slot] for slot in role_slots) for role, role_slots in ranges.items()
        }
        size += len(used)
    return SlotMap({role: slots[role] for role in counts})


def _count_slots(pool: RolePool, counts: Mapping[str, int]) -> int:
    """Return how many slots a pool needs so that each role's actors fit into its fraction."""
    return max(
        (math.ceil(counts[role] / _to_fraction(fraction)) for role, fraction in pool.items()),
        default=0,
    )


def _place_in_pool(pool: RolePool, counts: Mapping[str, int]) -> dict[str, range]:
    """Place fractions side by side; when the pool is full, start again at slot 0."""
    size, end = _count_slots(pool, counts), Fraction(0)
    begins: dict[tuple[str, Fraction], Fraction] = {}
    ranges = {}
    for role, ratio in pool.items():
        fraction = _to_fraction(ratio)
        # A follower occupies the same slots as the trained role.
        unit = (FOLLOWED_ROLES.get(role, role), fraction)
        if unit not in begins:
            begins[unit] = end if end + fraction <= 1 else Fraction(0)
            end = begins[unit] + fraction if fraction < 1 else end
        first = math.floor(begins[unit] * size)
        ranges[role] = range(first, first + counts[role])
    return ranges


@cache
def _to_fraction(ratio: float) -> Fraction:
    """Convert a ratio to the nearest simple fraction, so that three thirds add up to 1."""
    return Fraction(ratio).limit_denominator(1024)
