"""Admission by staleness credits: the rule that bounds staleness before generation starts."""

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import numpy as np

from streamrl.buffer.run_log import Ledger
from streamrl.errors import ConfigError
from streamrl.messages import ColumnAxis, find_replayed_uid, get_column_spec


def compute_credit_limit(version: int, *, depth: int, groups_per_step: int) -> int:
    """Return how many groups may have been admitted in total while `version` is the newest.

    Group number n (from 0) is trained in step n // groups_per_step. Admitting it only once
    version >= that step - depth keeps generation at most `depth` steps ahead; with
    depth <= max_staleness its tokens stay within the bound.

    Example: depth=1, groups_per_step=4. At version 0 at most 8 groups are admitted (steps 0 and 1),
    at version 1 at most 12.
    """
    return (depth + version + 1) * groups_per_step


BLOB_OVERHEAD_BYTES = 2048
"""Upper bound of a safetensors header per stage: names and dtypes of its columns."""
TEXT_BYTES_PER_TOKEN = 6
"""Compressed text: prose has 1 to 2 bytes per token, random tokens of a large vocabulary 5."""


def bound_group_bytes(
    stage_columns: Sequence[Sequence[str]],
    components: Sequence[str],
    *,
    rollouts: int,
    tokens: int,
    turns: int = 1,
    widths: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Return the largest size of one group's columns in the queue, bytes.

    stage_columns: names of the columns that each stage commits.
    components: names of the columns that come with the scores of a group.
    rollouts: number of rollouts per group.
    tokens: most tokens of a rollout, prompt included.
    turns: most turns of a rollout.
    widths: most entries per token of wide columns.
    """
    entries = {
        ColumnAxis.TOKEN: rollouts * tokens,
        ColumnAxis.TURN: rollouts * turns,
        ColumnAxis.ROLLOUT: rollouts,
        ColumnAxis.GROUP: tokens,
        ColumnAxis.TEXT: rollouts * tokens * TEXT_BYTES_PER_TOKEN,
    }
    specs = {name: get_column_spec(name) for name in chain(*stage_columns, components)}
    sizes = [
        np.dtype(spec.dtype).itemsize * entries[spec.axis] * widths.get(name, 1)
        for name, spec in specs.items()
    ]
    return sum(sizes) + BLOB_OVERHEAD_BYTES * len(stage_columns)


def check_shard_bytes(
    shard_bytes: int, *, group_bytes: int, groups: Mapping[str, int], location: str, remedy: str
) -> None:
    """Raise ConfigError if a shard cannot hold the groups that it must, at their largest.

    All groups of a step may hash to the same shard, and no group leaves before the step is trained.
    A smaller shard deadlocks: the step waits for groups that wait for capacity.

    group_bytes: largest size of a group. groups: numbers of groups, by the setting they come from.
    location: setting and node that limit the shard, for the message.
    remedy: setting that enlarges the shard; the factor by which it must grow follows.
    """
    needed = sum(groups.values()) * group_bytes
    count = " + ".join(f"{name} {number}" for name, number in groups.items() if number)
    if shard_bytes < needed:
        raise ConfigError(
            f"{location}: {shard_bytes / 2**20:.2f} MB for a shard, must be at least"
            f" {needed / 2**20:.2f} MB = {sum(groups.values())} *"
            f" {group_bytes / 2**20:.2f} MB, the largest group ({count}): raise {remedy}"
            f" {math.ceil(10 * needed / max(shard_bytes, 1)) / 10:g} times"
        )


MAX_FACTOR = 32.0
"""Largest factor: the filter rejects 97 % of the groups."""
MIN_VERDICTS = 256
"""Smallest window of filter decisions; WINDOW_STEPS steps' worth if that is more."""
WINDOW_STEPS = 8
PRIOR_KEPT = 4
"""Pseudo-count of kept groups, so that the first few decisions move the factor little."""


class OversamplingController:
    """Decides how many more groups to sample than a step trains, while a filter rejects some.

    A group is undecided between its admission and the filter's decision. `fixed` sets the factor
    (>= 1); None estimates it from recent decisions: decided groups / kept groups.
    """

    def __init__(self, fixed: float | None = 1.0, *, groups_per_step: int = 1) -> None:
        self._fixed_factor = fixed
        self._kept_uids: set[str] = set()
        self._verdicts: deque[bool] = deque(
            maxlen=max(MIN_VERDICTS, WINDOW_STEPS * groups_per_step)
        )
        self._num_kept_lately = 0

    @property
    def is_enabled(self) -> bool:
        return self._fixed_factor != 1.0

    @property
    def factor(self) -> float:
        """Undecided groups to keep in flight per open slot of a training step, >= 1."""
        if self._fixed_factor is not None:
            return self._fixed_factor
        # Example: 26 of the last 256 decisions kept the group: (256 + 4) / (26 + 4) = 8.7.
        return min(
            MAX_FACTOR, (len(self._verdicts) + PRIOR_KEPT) / (self._num_kept_lately + PRIOR_KEPT)
        )

    @property
    def num_kept(self) -> int:
        """Number of groups in flight that the filter has kept."""
        return len(self._kept_uids)

    def mark_kept(self, uid: str) -> bool:
        """Record that the filter kept a group; return False if that was recorded before."""
        if uid in self._kept_uids:
            return False
        self._kept_uids.add(uid)
        if find_replayed_uid(uid) is None:
            self._record_verdict(is_kept=True)
        return True

    def count_filtered(self) -> None:
        self._record_verdict(is_kept=False)

    def remove_groups(self, uids: Iterable[str]) -> None:
        """Forget kept groups that are no longer in flight."""
        self._kept_uids.difference_update(uids)

    def _record_verdict(self, *, is_kept: bool) -> None:
        if len(self._verdicts) == self._verdicts.maxlen:
            self._num_kept_lately -= self._verdicts[0]
        self._verdicts.append(is_kept)
        self._num_kept_lately += is_kept


class AdmissionController:
    """Counts the staleness credits; the admission loop waits here for a credit.

    Each group that was trained, or kept by the filter, has spent a credit. For each unspent credit
    `oversampling.factor` undecided groups may be in flight (1 without oversampling). After
    `total_groups` admission stops: every admitted prompt has a step that trains it.
    """

    def __init__(  # noqa: PLR0913
        self,
        ledger: Ledger,
        *,
        depth: int,
        groups_per_step: int,
        capacity_groups: int,
        total_groups: int,
        version: int = 0,
        oversampling: OversamplingController | None = None,
    ) -> None:
        self.ledger = ledger
        self.oversampling = oversampling or OversamplingController()
        self.version = version
        self.announced_version = version
        self._depth = depth
        self.groups_per_step = groups_per_step
        self._capacity_groups = capacity_groups
        self._total_groups = total_groups
        self._credit_changed = asyncio.Event()

    @property
    def num_credits(self) -> int:
        """Number of prompts that may be admitted now."""
        per_step, in_flight = self.groups_per_step, len(self.ledger.in_flight)
        limit = compute_credit_limit(
            self.announced_version, depth=self._depth, groups_per_step=per_step
        )
        # Credits not spent by trained or kept groups, times the factor, minus the undecided groups
        # that already use them. Example: limit 8, 3 trained, 1 kept, 2 undecided, factor 2:
        # missing = 8 - 4 = 4, credit = 4 * 2 - 2 = 6.
        undecided = in_flight - self.oversampling.num_kept
        missing = min(limit, self._total_groups) - (self.ledger.num_credits_spent - undecided)
        credit = math.floor(missing * self.oversampling.factor) - undecided
        return max(0, min(credit, self._capacity_groups - in_flight))

    @property
    def is_finished(self) -> bool:
        """True once all training steps of the run are finished."""
        return self.version * self.groups_per_step >= self._total_groups

    async def wait_for_credit(self, wait_s: float) -> int:
        """Wait up to `wait_s` for a staleness credit; return how many there are, 0 on timeout."""
        self._credit_changed.clear()
        if not self.num_credits:
            try:
                await asyncio.wait_for(self._credit_changed.wait(), wait_s)
            except TimeoutError:
                return 0
        return self.num_credits

    def advance_version(self, version: int, *, announced: bool = True) -> None:
        """Set the version that a finished training step has made.

        An announced version is published or being published: prompts are admitted at it, and wait
        until generators serve it. Others are never published, and their step's credits become
        available with the next announced version.
        """
        assert version == self.version + 1, (version, self.version)
        self.version = version
        if announced:
            self.announced_version = version
        self._credit_changed.set()

    def refund_credit(self) -> None:
        """Wake the admission loop: a dropped or filtered group has returned its credit."""
        self._credit_changed.set()
