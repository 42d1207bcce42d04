"""The settings of a run's placement."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.errors import ConfigError
from streamrl.placement.pools import POOL_ROLES, POOL_STRATEGIES, RolePool, has_colocated_actor

MIN_OBJECT_STORE_MB = 80
DEFAULT_SLICE_S = 1.0
"""How long a stage has devices that it shares, where nothing is said, s."""
SEQUENTIAL = "sequential"
MIXED = "mixed"
MIN_POOL_FRACTION = 1 / 1024
"""Of a pool, for a role."""
MODES = ("auto", "disaggregated", *POOL_STRATEGIES, MIXED, SEQUENTIAL)


@dataclass
class PlacementConfig:
    """Which stages share devices.

    mode: disaggregated gives every stage devices of its own, all busy at once; colocated has one
        pool for all, which take turns, with trainer and generator of a rank in one process;
        interleaving is colocated but for reference and reward, which have a half each; split has
        the actor on one pool and the critic on another, with one of reference and reward each;
        shadow has what is trained on one pool and all else on another; mixed has the pools that
        are named; sequential lets one stage compute at a time (a baseline, and a way to debug);
        auto takes disaggregated, or colocated where that does not fit.
    pools: for mixed, the roles of each pool and their part of it, as {policy: 1, reference: 0.5}.
        A role in none has devices of its own.
    slice_s: how long a stage has devices that it shares before it may have to give way, s.
    address: an existing Ray cluster; empty starts a local instance for the run.
    cpus: CPU slots of the local instance; null takes as many as the run asks for.
    memory_mb: what the engines of a worker that both trains and generates may hold together, MiB:
        weights, optimizer, gradients, activations or what an update takes, KV cache; where they do
        not fit, the KV cache is released while it trains, and the optimizer's state put aside while
        it does not. null is no bound.
    object_store_mb: size of the local instance's object store, MiB.
    """

    mode: str = "auto"
    pools: list[dict[str, float]] = field(default_factory=list)
    address: str = ""
    cpus: int | None = None
    object_store_mb: int = 512
    slice_s: float = DEFAULT_SLICE_S
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            known = ", ".join(MODES)
            raise ConfigError(f"placement.mode={self.mode}: must be one of {known}")
        self._check_pools()
        if self.cpus is not None and self.cpus < 1:
            raise ConfigError(f"placement.cpus={self.cpus}: must be at least 1")
        if self.slice_s <= 0:
            raise ConfigError(f"placement.slice_s={self.slice_s}: must be above 0")
        if self.memory_mb is not None and self.memory_mb < 1:
            raise ConfigError(f"placement.memory_mb={self.memory_mb}: must be at least 1")
        if self.memory_mb is not None and not (self.is_hybrid or self.mode == "auto"):
            raise ConfigError(
                f"placement.memory_mb={self.memory_mb}: of workers that both train and generate;"
                f" with placement.mode={self.mode} there are none"
            )
        if self.object_store_mb < MIN_OBJECT_STORE_MB:
            raise ConfigError(
                f"placement.object_store_mb={self.object_store_mb}: must be at least"
                f" {MIN_OBJECT_STORE_MB} MiB"
            )

    def _check_pools(self) -> None:
        if self.mode == MIXED and not any(self.pools):
            raise ConfigError(f"placement.mode={MIXED}: needs placement.pools, and there are none")
        if self.pools and self.mode != MIXED:
            raise ConfigError(
                f"placement.pools={self.pools}: goes with placement.mode={MIXED}, not {self.mode}"
            )
        for i, pool in enumerate(self.pools):
            for role, part in pool.items():
                place = f"placement.pools[{i}].{role}={part:g}"
                if role not in POOL_ROLES:
                    raise ConfigError(f"{place}: must be one of {', '.join(POOL_ROLES)}")
                if not MIN_POOL_FRACTION <= part <= 1:
                    raise ConfigError(f"{place}: must be at least 1/1024 and at most 1")
        roles = Counter(role for pool in self.pools for role in pool)
        if twice := [role for role, times in roles.items() if times > 1]:
            raise ConfigError(f"placement.pools: {twice[0]} is in {roles[twice[0]]} of them")

    @property
    def shared_pools(self) -> Sequence[RolePool]:
        """The pools of roles that share devices; none where every role has its own."""
        return POOL_STRATEGIES.get(self.mode, self.pools)

    @property
    def is_sequential(self) -> bool:
        """Whether one actor computes at a time, wherever it is."""
        return self.mode == SEQUENTIAL

    @property
    def is_hybrid(self) -> bool:
        """Whether trainer and generator of a rank share a process, and the weights in it."""
        return has_colocated_actor(self.shared_pools)
