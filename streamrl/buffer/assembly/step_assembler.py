"""Step assembly: which ready groups enter the step of a version. Pure bookkeeping, no waiting."""

import bisect
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from streamrl.buffer.admission.oversampling import OversamplingController
from streamrl.buffer.books.run_log import TrainedGroup
from streamrl.errors import StaleGroupError
from streamrl.messages import Experience


class StepAssembler:
    """Fills steps of `groups_per_step` groups in free order, within the staleness bound.

    A group admitted at version a has a deadline: the step of version a + max_staleness. A ready
    group enters a step as soon as the groups with earlier deadlines, ready or not, still fit into
    the places that are left until then; the earliest deadline goes first. To look only at what is
    due now would not do: newcomers could crowd the groups of one deadline into their last step.
    The credits see to it that all groups fit when they are admitted.

    Where more are admitted, as a filter takes most of them out (`oversampling`), one that is not
    decided yet has such a part of a place kept as it stands for. More may stay than have places:
    those that the bound leaves no step are `late`.

    With `drops_stale` no place is kept: what is ready enters, the oldest tokens first, and a group
    that is beyond the bound by then is `late`.
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
        """Of those that are pending, the ones that the filter has not kept yet."""
        self._ready: dict[str, Experience] = {}
        # Kept up to date, not made anew: a step of a thousand groups looks a thousand times.
        self._ready_by_deadline: list[Experience] = []
        """What is ready, the earliest deadline first."""
        self._num_by_version: Counter[int] = Counter()
        """Groups, ready or not, by the version they were admitted at."""
        self._num_undecided_by_version: Counter[int] = Counter()
        """The undecided ones among them, likewise."""
        self._step_groups: list[Experience] = []

    def admit_group(self, uid: str, version: int) -> None:
        """A prompt was admitted at `version`; its group will be ready some day."""
        self._pending[uid] = self._undecided[uid] = version
        self._num_by_version[version] += 1
        self._num_undecided_by_version[version] += 1

    def keep_group(self, uid: str) -> None:
        """The filter has kept the group: a whole place is kept for it."""
        if uid in self._undecided:
            self._num_undecided_by_version[self._undecided.pop(uid)] -= 1

    def drop_group(self, uid: str) -> None:
        """The group will never be trained."""
        self.keep_group(uid)
        if uid in self._pending:
            self._num_by_version[self._pending.pop(uid)] -= 1

    def offer_groups(self, experiences: Iterable[Experience]) -> None:
        """Groups that are ready to be trained. One that was offered before is passed over."""
        for experience in experiences:
            if experience.uid in self._pending:
                self.keep_group(experience.uid)
                self._num_by_version[self._pending.pop(experience.uid)] -= 1
                self._num_by_version[experience.admitted_version] += 1
                self._ready[experience.uid] = experience
                bisect.insort(self._ready_by_deadline, experience, key=_get_admitted_version)

    def remove_late_groups(
        self, version: int, *, absent: Collection[str] = (), is_whole: bool = False
    ) -> list[str]:
        """The groups that no step can train from that of `version` on: they are for others to drop.

        Those that are ready with a token beyond the bound; and, unless they may still turn out to
        be fresh (`drops_stale`), those that are not ready and were due at an earlier step, but for
        those that are `absent`. With `is_whole` from the step behind it on: what is drawable fills
        that of `version`.
        """
        spared = {e.uid for e in self.find_drawable(version)} if is_whole else set()
        oldest = version + is_whole - self._max_staleness
        stale = [
            experience
            for uid, experience in self._ready.items()
            if self._min_version(experience) < oldest and uid not in spared
        ]
        self._remove_ready(stale)
        overdue = [
            uid
            for uid, admitted in self._pending.items()
            if admitted < oldest and not (self.should_drop_stale or uid in absent)
        ]
        return [*(experience.uid for experience in stale), *overdue]

    def _remove_ready(self, chosen: Sequence[Experience]) -> None:
        """Of those that are ready; who enters is first in the line, unless the oldest tokens go."""
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
        """True if the step has all its groups."""
        return len(self._step_groups) == self._groups_per_step

    @property
    def num_drawn(self) -> int:
        """Groups the step has so far."""
        return len(self._step_groups)

    @property
    def num_ready(self) -> int:
        """Groups that have not entered the step, though they are ready."""
        return len(self._ready)

    @property
    def pending_uids(self) -> list[str]:
        """Uids that are not ready yet, the earliest deadline first."""
        return sorted(self._pending, key=self._pending.__getitem__)

    def find_drawable(self, version: int) -> list[Experience]:
        """The ready groups that may enter the step of `version`, the earliest deadline first."""
        places = self._groups_per_step - len(self._step_groups)
        if self.should_drop_stale:
            oldest = sorted(
                self._ready.values(), key=lambda e: -self._compute_staleness(e, version)
            )
            return oldest[:places]
        chosen: list[Experience] = []
        taken: Counter[int] = Counter()
        for experience in self._ready_by_deadline:
            left = places - 1 - len(chosen)
            # Where one does not fit, those with the same deadline or a later one do not, either.
            if left < 0 or not self._can_others_fit(experience, version, left, taken):
                break
            chosen.append(experience)
            taken[experience.admitted_version] += 1
        return chosen

    def _can_others_fit(
        self, chosen: Experience, version: int, places: int, taken: Counter[int]
    ) -> bool:
        """Whether all groups with a deadline before `chosen`'s fit if it takes a place now.

        `taken` counts those that have a place already by the version they were admitted at.
        """
        first, doubt = version - self._max_staleness, 1 - 1 / self._oversampling.factor
        for admitted in range(first, chosen.admitted_version):
            due = sum(n - taken[at] for at, n in self._num_by_version.items() if at <= admitted)
            if doubt:
                doubtful = sum(
                    n for at, n in self._num_undecided_by_version.items() if at <= admitted
                )
                due = math.floor(due - doubt * doubtful)
            if due > places + (admitted - first) * self._groups_per_step:
                return False
        return True

    def draw_groups(self, version: int) -> list[Experience]:
        """Let the drawable groups enter the step.

        Raises StaleGroupError if one of them holds a token beyond the bound.
        """
        drawn = self.find_drawable(version)
        for experience in drawn:
            self._check_staleness(experience, version)
        self._remove_ready(drawn)
        self._step_groups += drawn
        return drawn

    @staticmethod
    def _min_version(experience: Experience) -> int:
        assert experience.info is not None, experience.uid
        return experience.info.min_version

    def _compute_staleness(self, experience: Experience, version: int) -> int:
        return version - self._min_version(experience)

    def _check_staleness(self, experience: Experience, version: int) -> None:
        staleness = self._compute_staleness(experience, version)
        if staleness > self._max_staleness:
            raise StaleGroupError(
                f"group {experience.uid} was sampled by version {version - staleness}:"
                f" {staleness} behind the step of version {version},"
                f" pipeline.max_staleness is {self._max_staleness}"
            )

    def finish_step(self) -> tuple[TrainedGroup, ...]:
        """The groups of the complete step; the next step starts empty."""
        assert self.is_complete
        entered, self._step_groups = self._step_groups, []
        return tuple(_to_trained_group(experience) for experience in entered)


def _get_admitted_version(experience: Experience) -> int:
    return experience.admitted_version


def _to_trained_group(experience: Experience) -> TrainedGroup:
    assert experience.info is not None and experience.ready_version is not None
    return TrainedGroup(experience.uid, experience.info, experience.ready_version)
