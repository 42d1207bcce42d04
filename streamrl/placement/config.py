"""Section `placement` of a run's config."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import above, at_least, check_conflicts, one_of
from streamrl.placement.pools import POOL_ROLES, POOL_STRATEGIES, RolePool, has_colocated_actor

MIN_OBJECT_STORE_MB = 80
DEFAULT_SLICE_S = 1.0
"""Seconds that a stage keeps a shared device before it may have to yield."""
SEQUENTIAL = "sequential"
MIXED = "mixed"
MIN_POOL_FRACTION = 1 / 1024
"""Smallest fraction of a pool's devices that a role may have."""
MODES = ("auto", "disaggregated", *POOL_STRATEGIES, MIXED, SEQUENTIAL)


@dataclass
class PlacementConfig:
    """Assignment of stages to devices.

    mode: disaggregated gives every stage its own devices, all busy at the same time; colocated
      time-shares one pool between all stages, with trainer and generator of a rank in one process;
      interleaving is colocated, but reference and reward get half of the pool each; split puts the
      actor on one pool and the critic on another, with one of reference and reward each; shadow
      puts trained models on one pool and all other stages on another; mixed uses the pools of
      `pools`; sequential lets one stage compute at a time (a baseline, and for debugging); auto
      takes disaggregated, or colocated if disaggregated does not fit.
    pools: for mixed, the roles of each pool and the part of the pool that each role gets, as
      {policy: 1, reference: 0.5}. A role outside all pools has its own devices.
    slice_s: seconds that a stage keeps a shared device before it may have to yield.
    address: an existing Ray cluster; empty starts a local instance for the run.
    cpus: CPU slots of the local instance; null takes as many as the run requests.
    memory_mb: budget in MiB of the engines of a worker that both trains and generates: weights,
      optimizer, gradients, activations or buffers of an update, KV cache. Above the budget the KV
      cache is released during training and the optimizer state is offloaded during generation. null
      means no budget.
    object_store_mb: size of the local instance's object store, MiB.
    """

    mode: Annotated[str, one_of(*MODES)] = "auto"
    pools: list[dict[str, float]] = field(default_factory=list)
    address: str = ""
    cpus: Annotated[int | None, at_least(1)] = None
    object_store_mb: Annotated[int, at_least(MIN_OBJECT_STORE_MB)] = 512
    slice_s: Annotated[float, above(0)] = DEFAULT_SLICE_S
    memory_mb: Annotated[int | None, at_least(1)] = None

    def __post_init__(self) -> None:
        self._check_pools()
        has_workers = self.is_hybrid or self.mode == "auto"
        reason = (
            f"has no effect: with placement.mode={self.mode} no worker both trains and generates."
            " Remove it, or set placement.mode=colocated"
        )
        conflict = (self.memory_mb is not None and not has_workers, "memory_mb", reason)
        check_conflicts(self, [conflict], "placement.")

    def _check_pools(self) -> None:
        if self.mode == MIXED and not any(self.pools):
            raise ConfigError(f"placement.mode={MIXED}: needs placement.pools, which is empty")
        if self.pools and self.mode != MIXED:
            raise ConfigError(
                f"placement.pools={self.pools} has no effect with"
                f" placement.mode={self.mode}. Remove it, or set placement.mode={MIXED}"
            )
        for i, pool in enumerate(self.pools):
            for role, fraction in pool.items():
                location = f"placement.pools[{i}].{role}={fraction:g}"
                if role not in POOL_ROLES:
                    raise ConfigError(f"{location}: must be one of {', '.join(POOL_ROLES)}")
                if not MIN_POOL_FRACTION <= fraction <= 1:
                    raise ConfigError(f"{location}: must be at least 1/1024 and at most 1")
        roles = Counter(role for pool in self.pools for role in pool)
        if repeated := [role for role, times in roles.items() if times > 1]:
            raise ConfigError(
                f"placement.pools: {repeated[0]} is in {roles[repeated[0]]} pools; must be in one"
            )

    @property
    def shared_pools(self) -> Sequence[RolePool]:
        """Pools of roles that share devices; empty if every role has devices of its own."""
        return POOL_STRATEGIES.get(self.mode, self.pools)

    @property
    def is_sequential(self) -> bool:
        """Whether only one actor of the run computes at a time, even on different devices."""
        return self.mode == SEQUENTIAL

    @property
    def is_hybrid(self) -> bool:
        """Whether a trainer rank and a generator share one process and one copy of the weights."""
        return has_colocated_actor(self.shared_pools)
