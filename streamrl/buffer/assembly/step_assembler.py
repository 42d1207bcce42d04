"""Step assembly: choose the ready groups that enter each training step. Does no I/O."""

import bisect
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from streamrl.buffer.assembly.oversampling import OversamplingController
from streamrl.errors import StaleGroupError
from streamrl.messages import Experience, GroupInfo


@dataclass(frozen=True)
class TrainedGroup:
    """A group that a training step trained.

    ready_version: version that was in training when the group became ready.
    """

    uid: str
    info: GroupInfo
    ready_version: int


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
        self._pending: dict[str, int] = {}
        self._undecided: dict[str, int] = {}
        """Pending groups that the filter has not kept yet: uid -> admitted version."""
        self._ready: dict[str, Experience] = {}
        # Maintained incrementally: a step of 1000 groups calls find_drawable 1000 times.
        self._ready_by_deadline: list[Experience] = []
        """Ready groups, earliest deadline first."""
        self._num_by_version: Counter[int] = Counter()
        """Number of groups, ready or not, by admitted version."""
        self._num_undecided_by_version: Counter[int] = Counter()
        """Number of undecided groups by admitted version."""
        self._step_groups: list[Experience] = []

    def admit_group(self, uid: str, version: int) -> None:
        """Expect a group that was admitted at `version`."""
        self._pending[uid] = self._undecided[uid] = version
        self._num_by_version[version] += 1
        self._num_undecided_by_version[version] += 1

    def keep_group(self, uid: str) -> None:
        """Record that the group filter kept a group, which reserves a whole slot from now on."""
        if uid in self._undecided:
            self._num_undecided_by_version[self._undecided.pop(uid)] -= 1

    def drop_group(self, uid: str) -> None:
        """Stop expecting a group that was filtered or dropped."""
        self.keep_group(uid)
        if uid in self._pending:
            self._num_by_version[self._pending.pop(uid)] -= 1

    def offer_groups(self, experiences: Iterable[Experience]) -> None:
        """Record that groups are ready for training; ignore groups offered before or dropped."""
        for experience in experiences:
            if experience.uid in self._pending:
                self.keep_group(experience.uid)
                self._num_by_version[self._pending.pop(experience.uid)] -= 1
                self._num_by_version[experience.admitted_version] += 1
                self._ready[experience.uid] = experience
                bisect.insort(self._ready_by_deadline, experience, key=_get_admitted_version)

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
        stale = [
            experience
            for uid, experience in self._ready.items()
            if self._get_min_version(experience) < oldest and uid not in exempt
        ]
        self._remove_ready(stale)
        overdue = [
            uid
            for uid, admitted in self._pending.items()
            if admitted < oldest and not (self.should_drop_stale or uid in absent)
        ]
        return [*(experience.uid for experience in stale), *overdue]

    def _remove_ready(self, chosen: Sequence[Experience]) -> None:
        """Remove ready groups that enter a training step or are late.

        Fast if they are the groups with the earliest deadlines, as usual without `drops_stale`.
        """
        if not chosen:
            return
        for experience in chosen:
            del self._ready[experience.uid]
            self._num_by_version[experience.admitted_version] -= 1
        if self._ready_by_deadline[: len(chosen)] == list(chosen):
            del self._ready_by_deadline[: len(chosen)]
        else:
            self._ready_by_deadline = [
                experience
                for experience in self._ready_by_deadline
                if experience.uid in self._ready
            ]
        self._num_by_version, self._num_undecided_by_version = (
            +self._num_by_version,
            +self._num_undecided_by_version,
        )

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
        return sorted(self._pending, key=self._pending.__getitem__)

    def find_drawable(self, version: int) -> list[Experience]:
        """Return the ready groups that may enter the training step of `version` now.

        Order: earliest deadline first; with `drops_stale`, oldest tokens first.
        """
        slots = self._groups_per_step - len(self._step_groups)
        if self.should_drop_stale:
            oldest = sorted(
                self._ready.values(), key=lambda e: -self._compute_staleness(e, version)
            )
            return oldest[:slots]
        chosen: list[Experience] = []
        drawn_by_version: Counter[int] = Counter()
        for experience in self._ready_by_deadline:
            slots_left = slots - 1 - len(chosen)
            # If a group does not fit, no group with the same or a later deadline fits either.
            if slots_left < 0 or not self._can_others_fit(
                experience, version, slots_left, drawn_by_version
            ):
                break
            chosen.append(experience)
            drawn_by_version[experience.admitted_version] += 1
        return chosen

    def _can_others_fit(
        self, chosen: Experience, version: int, slots: int, drawn_by_version: Counter[int]
    ) -> bool:
        """Return True if all groups with earlier deadlines fit once `chosen` has a slot.

        Checks every deadline before that of `chosen`: the groups due by then must not outnumber the
        slots of the steps up to then.
        slots: slots left in the current step after `chosen`.
        drawn_by_version: number of groups chosen before for this step, by admitted version.
        """
        first, reject_rate = version - self._max_staleness, 1 - 1 / self._oversampling.factor
        for admitted in range(first, chosen.admitted_version):
            due = sum(
                n - drawn_by_version[at] for at, n in self._num_by_version.items() if at <= admitted
            )
            if reject_rate:
                undecided = sum(
                    n for at, n in self._num_undecided_by_version.items() if at <= admitted
                )
                due = math.floor(due - reject_rate * undecided)
            if due > slots + (admitted - first) * self._groups_per_step:
                return False
        return True

    def draw_groups(self, version: int) -> list[Experience]:
        """Move the groups that may enter the training step of `version` into it; return them.

        Raises StaleGroupError if a group has a token beyond the staleness bound.
        """
        drawn = self.find_drawable(version)
        for experience in drawn:
            self._check_staleness(experience, version)
        self._remove_ready(drawn)
        self._step_groups += drawn
        return drawn

    @staticmethod
    def _get_min_version(experience: Experience) -> int:
        assert experience.info is not None, experience.uid
        return experience.info.min_version

    def _compute_staleness(self, experience: Experience, version: int) -> int:
        return version - self._get_min_version(experience)

    def _check_staleness(self, experience: Experience, version: int) -> None:
        staleness = self._compute_staleness(experience, version)
        if staleness > self._max_staleness:
            raise StaleGroupError(
                f"group {experience.uid} was sampled by version {version - staleness}:"
                f" {staleness} behind the step of version {version},"
                f" pipeline.max_staleness is {self._max_staleness}"
            )

    def finish_step(self) -> tuple[TrainedGroup, ...]:
        """End the complete training step; return its groups as the run log records them."""
        assert self.is_complete
        groups, self._step_groups = self._step_groups, []
        return tuple(_to_trained_group(experience) for experience in groups)


def _get_admitted_version(experience: Experience) -> int:
    return experience.admitted_version


def _to_trained_group(experience: Experience) -> TrainedGroup:
    assert experience.info is not None and experience.ready_version is not None
    return TrainedGroup(experience.uid, experience.info, experience.ready_version)
