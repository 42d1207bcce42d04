"""Step assembly: choose the ready groups that enter each training step. Does no I/O."""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from streamrl.buffer.run_log import TrainedGroup
from streamrl.buffer.staleness_credits import OversamplingController
from streamrl.errors import StaleGroupError
from streamrl.messages import Experience, GroupInfo, find_replayed_uid

T = TypeVar("T")


class VersionBuckets(Generic[T]):
    """Items by uid, ordered by ascending version, then by arrival.

    A run has a handful of versions in flight, whatever the number of groups.
    """

    def __init__(self) -> None:
        # An OrderedDict: a dict whose first items are deleted one by one is slow to iterate.
        self._buckets: dict[int, OrderedDict[str, T]] = {}
        self._versions: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, uid: str) -> bool:
        return uid in self._versions

    def add_item(self, uid: str, version: int, item: T) -> None:
        self._versions[uid] = version
        self._buckets.setdefault(version, OrderedDict())[uid] = item

    def pop_item(self, uid: str) -> T:
        version = self._versions.pop(uid)
        bucket = self._buckets[version]
        item = bucket.pop(uid)
        if not bucket:
            del self._buckets[version]
        return item

    def list_sizes(self) -> list[tuple[int, int]]:
        """Return (version, number of items) of every bucket, in ascending order."""
        return [(version, len(self._buckets[version])) for version in sorted(self._buckets)]

    def iter_bucket(self, version: int, count: int) -> Iterator[T]:
        """Yield the first `count` items of a version."""
        return islice(self._buckets[version].values(), count)

    def iter_before(self, version: int) -> Iterator[tuple[str, T]]:
        """Yield (uid, item) of all items with a version below `version`, in order."""
        for earlier in sorted(self._buckets):
            if earlier < version:
                yield from self._buckets[earlier].items()

    def list_uids(self) -> list[str]:
        return [uid for version in sorted(self._buckets) for uid in self._buckets[version]]


class StepAssembler:
    """Chooses the groups of each training step, out of order but within `max_staleness`.

    Deadlines: a group admitted at version a must enter the step of version a + max_staleness or an
    earlier step. The rule is earliest deadline first with reservations: a ready group may enter if
    all groups with earlier deadlines, ready or not, still fit into the slots that the steps up to
    their deadlines have left (a step has `groups_per_step` slots). Considering only groups due in
    the current step is not enough: newcomers could push all groups of a deadline into the last
    possible step, which may be too small. Credits guarantee that all groups fit at admission.

    Example: groups_per_step=2, max_staleness=2. a, b, c were admitted at version 0 (deadline: step
    2), d and e at version 1. In step 1 only d and e are ready. d may enter: one slot of step 1 and
    two of step 2 remain for a, b and c. e must wait.

    With `oversampling`, a group without a filter decision (undecided) reserves only the fraction
    1 / factor of a slot, the estimated probability that the filter keeps it. More groups than
    slots may survive the filter; groups that find no slot before their deadline are late.

    With `drops_stale` nothing is reserved: ready groups enter, oldest tokens first, and a group
    with a token older than `max_staleness` is late.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        groups_per_step: int,
        drops_stale: bool = False,
        oversampling: OversamplingController | None = None,
    ) -> None:
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self.should_drop_stale = drops_stale
        self._oversampling = oversampling or OversamplingController()
        # Indexed by version: a step of 4096 groups calls count_drawable 4096 times.
        self._pending = VersionBuckets[None]()
        """Groups that are not ready, by admitted version."""
        self._undecided: dict[str, int] = {}
        """Pending groups that the filter has not kept yet: uid -> admitted version."""
        self._num_undecided_by_version: Counter[int] = Counter()
        self._ready = VersionBuckets[Experience]()
        """Ready groups in the order in which they enter a step: by admitted version, the deadline;
        with `drops_stale` by the version of their oldest token."""
        self._ready_by_token = VersionBuckets[Experience]()
        """Ready groups by the version of their oldest token."""
        self._step_groups: list[Experience] = []
        self.late_infos: dict[str, GroupInfo | None] = {}
        """Sizes of the ready groups that `remove_late_groups` returned last."""

    def admit_group(self, uid: str, version: int) -> None:
        """Expect a group that was admitted at `version`."""
        self._pending.add_item(uid, version, None)
        self._undecided[uid] = version
        self._num_undecided_by_version[version] += 1

    def keep_group(self, uid: str) -> None:
        """Record that the group filter kept a group, which reserves a whole slot from now on."""
        if uid in self._undecided:
            self._num_undecided_by_version[self._undecided.pop(uid)] -= 1

    def drop_group(self, uid: str) -> None:
        """Stop expecting a group that was filtered or dropped."""
        self.keep_group(uid)
        if uid in self._pending:
            self._pending.pop_item(uid)

    def offer_groups(self, experiences: Iterable[Experience]) -> None:
        """Record that groups are ready for training; ignore groups offered before or dropped."""
        for experience in experiences:
            if experience.uid in self._pending:
                self.keep_group(experience.uid)
                self._pending.pop_item(experience.uid)
                oldest = self._get_min_version(experience)
                order = oldest if self.should_drop_stale else experience.admitted_version
                self._ready.add_item(experience.uid, order, experience)
                self._ready_by_token.add_item(experience.uid, oldest, experience)

    def remove_late_groups(
        self, version: int, *, absent: Collection[str] = (), is_full: bool = False
    ) -> list[str]:
        """Return the uids of late groups, which no training step from `version` on can train.

        Late are ready groups with a token beyond the staleness bound; these are removed. Late are
        also, without `drops_stale`, groups that are not ready and whose deadline has passed; the
        caller removes these with `drop_group`.
        absent: uids that are never late.
        is_full: the step of `version` has ready groups for all its slots, so that later steps
            count.
        """
        exempt = {e.uid for e in self.find_drawable(version)} if is_full else set()
        oldest = version + is_full - self._max_staleness
        found = self._ready_by_token.iter_before(oldest)
        self.late_infos = {uid: group.info for uid, group in found if uid not in exempt}
        stale = list(self.late_infos)
        self._remove_ready(stale)
        if self.should_drop_stale:
            return stale
        return [*stale, *(uid for uid, _ in self._pending.iter_before(oldest) if uid not in absent)]

    def _remove_ready(self, uids: Iterable[str]) -> None:
        """Remove ready groups that enter a training step or are late."""
        for uid in uids:
            self._ready.pop_item(uid)
            self._ready_by_token.pop_item(uid)
        self._num_undecided_by_version = +self._num_undecided_by_version

    @property
    def is_complete(self) -> bool:
        return len(self._step_groups) == self._groups_per_step

    @property
    def num_drawn(self) -> int:
        return len(self._step_groups)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def pending_uids(self) -> list[str]:
        """Uids of admitted groups that are not ready for training, earliest deadline first."""
        return self._pending.list_uids()

    def count_drawable(self, version: int) -> int:
        """Return the number of groups that `find_drawable` returns, without a look at each."""
        return sum(count for _, count in self._count_drawable_by_bucket(version))

    def find_drawable(self, version: int) -> list[Experience]:
        """Return the ready groups that may enter the training step of `version` now.

        Order: earliest deadline first; with `drops_stale`, oldest tokens first.
        """
        return [
            experience
            for order, count in self._count_drawable_by_bucket(version)
            for experience in self._ready.iter_bucket(order, count)
        ]

    def _count_drawable_by_bucket(self, version: int) -> Iterator[tuple[int, int]]:
        """Yield (bucket of `_ready`, number of its groups that may enter the step of `version`).

        For every deadline before that of a group, the pending groups due by then must not outnumber
        the slots that the steps up to then have left. Ready groups with earlier deadlines enter
        first; if one does not fit, no group with the same or a later deadline fits either.
        """
        first, reject_rate = version - self._max_staleness, 1 - 1 / self._oversampling.factor
        limit = slots = self._groups_per_step - len(self._step_groups)
        num_drawn = 0
        for order, size in self._ready.list_sizes():
            if not self.should_drop_stale:
                for admitted in range(first, order):
                    limit = min(
                        limit,
                        slots
                        + (admitted - first) * self._groups_per_step
                        - self._count_due(admitted, reject_rate),
                    )
            count = max(0, min(size, limit - num_drawn))
            yield order, count
            if count < size:
                return
            num_drawn += count

    def _count_due(self, admitted: int, reject_rate: float) -> int:
        """Return how many of the pending groups admitted up to a version will need a slot."""
        due = sum(size for at, size in self._pending.list_sizes() if at <= admitted)
        undecided = sum(n for at, n in self._num_undecided_by_version.items() if at <= admitted)
        return math.floor(due - reject_rate * undecided)

    def draw_groups(self, version: int) -> list[Experience]:
        """Move the groups that may enter the training step of `version` into it; return them.

        Raises StaleGroupError if a group has a token beyond the staleness bound.
        """
        drawn = self.find_drawable(version)
        for experience in drawn:
            staleness = version - self._get_min_version(experience)
            if staleness > self._max_staleness:
                raise StaleGroupError(
                    f"group {experience.uid} was sampled by version {version - staleness}:"
                    f" {staleness} behind the step of version {version},"
                    f" pipeline.max_staleness is {self._max_staleness}"
                )
        self._remove_ready(experience.uid for experience in drawn)
        self._step_groups += drawn
        return drawn

    @staticmethod
    def _get_min_version(experience: Experience) -> int:
        """Return the oldest version of a group's tokens; of a replay, which the draw bounds,
        that of its admission.
        """
        assert experience.info is not None, experience.uid
        is_replay = find_replayed_uid(experience.uid) is not None
        return experience.admitted_version if is_replay else experience.info.min_version

    def finish_step(self) -> tuple[TrainedGroup, ...]:
        """End the complete training step; return its groups as the run log records them."""
        assert self.is_complete
        groups, self._step_groups = self._step_groups, []
        return tuple(_to_trained_group(experience) for experience in groups)


def _to_trained_group(experience: Experience) -> TrainedGroup:
    assert experience.info is not None and experience.ready_version is not None
    return TrainedGroup(experience.uid, experience.info, experience.ready_version)
