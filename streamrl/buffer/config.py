"""Settings of the experience queue, and what its shards may hold."""

from dataclasses import dataclass, field

from streamrl.buffer.log.journal import JournalConfig
from streamrl.errors import ConfigError

ON_FAILED_GROUP = ("replace", "readmit")


@dataclass
class QueueConfig:
    """The experience queue.

    shards: number of shard actors, spread over the nodes; each more costs every stage a message a
        step and hands out smaller batches, so one is fastest until its process or its share of
        the store is full.
    capacity_groups: most groups in flight over all shards; null takes what the depth needs,
        (pipeline.depth + 1) * pipeline.groups_per_step, times filter.oversample.
    store_share: share of a node's object store that the shards on it may fill.
    lease_s: how long a stage may be silent about a group before it is handed out again, s; a
        stage that works renews its leases.
    max_attempts: times a group is handed to one stage before it is dropped, and times a dropped
        prompt may be admitted.
    on_failed_group: what follows a dropped group: replace it by the next prompt, or readmit its
        own prompt.
    max_drop_rounds: the run ends with an error when more than this many steps' worth of groups
        were dropped for one step; those that became too old (pipeline.on_stale) do not count.
    hedge_s: age at which work is given to a second holder as well, the first commit wins, s; null
        never.
    journal: what makes accepted groups survive the death of their shard.
    """

    shards: int = 1
    capacity_groups: int | None = None
    store_share: float = 0.5
    lease_s: float = 120.0
    max_attempts: int = 3
    on_failed_group: str = "replace"
    max_drop_rounds: int = 10
    hedge_s: float | None = None
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
        if self.hedge_s is not None and not self.hedge_s > 0:
            raise ConfigError(f"queue.hedge_s={self.hedge_s}: must be above 0 s, or null")


@dataclass(frozen=True)
class StageSchema:
    """Columns a stage needs to see a group and columns it puts."""

    needs: tuple[str, ...]
    produces: tuple[str, ...]


@dataclass(frozen=True)
class ShardCapacity:
    """What one shard may hold. `reserved_group_bytes` are set aside for each group at its
    admission.

    What is set aside is what makes a put never wait: only admission does. With
    `reserved_group_bytes` the most a group can take, a shard never holds more than `num_bytes`;
    with less, as much more as its groups turn out larger. Raises ConfigError for bounds that let no
    group in.
    """

    max_groups: int
    max_bytes: float = float("inf")
    reserved_group_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.max_groups >= 1:
            raise ConfigError(f"a shard of at most groups={self.max_groups}: must be at least 1")
        if not self.max_bytes >= max(self.reserved_group_bytes, 1):
            raise ConfigError(
                f"a shard of at most num_bytes={self.max_bytes:g}: must have room for one group"
                f" of group_bytes={self.reserved_group_bytes}"
            )
