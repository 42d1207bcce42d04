"""Settings of the experience queue and the capacity of its shards."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from streamrl.buffer.journal import JournalConfig
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import at_least, one_of
from streamrl.messages import FIRST_REPLAY_ATTEMPT


@dataclass
class QueueConfig:
    """The experience queue.

    shards: number of shard actors, spread over the nodes. Each further shard costs every stage one
        message per step and makes batches smaller, so a single shard is fastest until the shard's
        process or share of the object store is full.
    lease_s: time without a renewal after which a leased group is handed out again, s; a working
        stage renews its leases.
    max_attempts: attempts of a stage at a group before the group is dropped, and admissions of a
        dropped prompt.
    on_failed_group: action after a drop: `replace` admits the next prompt, `readmit` the
        same prompt.
    journal: durability of accepted groups.
    """

    store_share: ClassVar[float] = 0.5
    """Fraction of a node's object store that its shards may fill."""
    max_drop_rounds: ClassVar[int] = 10
    """The run fails once more than this many steps' worth of groups were dropped for one step.

    Groups dropped as stale (pipeline.on_stale) do not count.
    """
    shards: Annotated[int, at_least(1)] = 1
    lease_s: Annotated[float, at_least(1)] = 120.0
    max_attempts: Annotated[int, at_least(1, FIRST_REPLAY_ATTEMPT)] = 3
    on_failed_group: Annotated[str, one_of("replace", "readmit")] = "replace"
    journal: JournalConfig = field(default_factory=JournalConfig)


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
