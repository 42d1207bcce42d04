"""Settings of the experience queue and the capacity of its shards."""

from dataclasses import dataclass, field

from streamrl.buffer.journal import JournalConfig
from streamrl.errors import ConfigError

ON_FAILED_GROUP = ("replace", "readmit")


@dataclass
class QueueConfig:
    """The experience queue.

    shards: number of shard actors, spread over the nodes. Each further shard costs every stage one
        message per step and makes batches smaller, so a single shard is fastest until the shard's
        process or share of the object store is full.
    capacity_groups: most groups in flight over all shards; null derives
        (pipeline.depth + 1) * pipeline.groups_per_step * filter.oversample.
    store_share: fraction of a node's object store that its shards may fill.
    lease_s: time without a renewal after which a leased group is handed out again, s; a working
        stage renews its leases.
    max_attempts: attempts of a stage at a group before the group is dropped, and admissions of a
        dropped prompt.
    on_failed_group: action after a drop: `replace` admits the next prompt, `readmit` the
        same prompt.
    max_drop_rounds: the run fails once more than this many steps' worth of groups were dropped
        for one step; groups dropped as stale (pipeline.on_stale) do not count.
    journal: durability of accepted groups.
    """

    shards: int = 1
    capacity_groups: int | None = None
    store_share: float = 0.5
    lease_s: float = 120.0
    max_attempts: int = 3
    on_failed_group: str = "replace"
    max_drop_rounds: int = 10
    journal: JournalConfig = field(default_factory=JournalConfig)

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigError(f"queue.shards={self.shards}: must be at least 1")
        if not 1 <= self.lease_s < float("inf"):
            raise ConfigError(f"queue.lease_s={self.lease_s}: must be at least 1 s")
        if self.max_attempts < 1:
            raise ConfigError(f"queue.max_attempts={self.max_attempts}: must be at least 1")
        if not 0 < self.store_share <= 1:
            raise ConfigError(f"queue.store_share={self.store_share}: must be above 0, at most 1")
        if self.on_failed_group not in ON_FAILED_GROUP:
            raise ConfigError(
                f"queue.on_failed_group={self.on_failed_group}: must be replace or readmit"
            )
        if self.max_drop_rounds < 1:
            raise ConfigError(f"queue.max_drop_rounds={self.max_drop_rounds}: must be at least 1")


@dataclass(frozen=True)
class StageSchema:
    """Columns that must exist before a stage leases a group, and columns that the stage commits."""

    needs: tuple[str, ...]
    produces: tuple[str, ...]


@dataclass(frozen=True)
class ShardCapacity:
    """Most groups and bytes that one queue shard may hold.

    Admission reserves `reserved_group_bytes` for each group. The reservation makes admission the
    only operation that waits for capacity; a commit never does. If `reserved_group_bytes` is the
    largest possible group, a shard never exceeds `max_bytes`; otherwise a shard may exceed the
    limit by as much as its groups exceed their reservations. Raises ConfigError for limits that
    admit no group.
    """

    max_groups: int
    max_bytes: float = float("inf")
    reserved_group_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.max_groups >= 1:
            raise ConfigError(f"shard capacity max_groups={self.max_groups}: must be at least 1")
        if not self.max_bytes >= max(self.reserved_group_bytes, 1):
            raise ConfigError(
                f"shard capacity max_bytes={self.max_bytes:g}: must hold one group of"
                f" reserved_group_bytes={self.reserved_group_bytes}"
            )
