"""Step assembly: which ready groups enter the step of a version. Pure bookkeeping, no waiting."""

import bisect
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from streamrl.buffer.admission.oversampling import Oversampling
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
        oversampling: Oversampling | None = None,
    ) -> None:
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self.drops_stale = drops_stale
        self._oversampling = oversampling or Oversampling()
        self._pending: dict[str, int] = {}
        self._undecided: dict[str, int] = {}
        """Of those that are pending, the ones that the filter has not kept yet."""
        self._ready: dict[str, Experience] = {}
        # Kept up to date, not made anew: a step of a thousand groups looks a thousand times.
        self._line: list[Experience] = []
        """What is ready, the earliest deadline first."""
        self._waiting: Counter[int] = Counter()
        """Groups, ready or not, by the version they were admitted at."""
        self._doubtful: Counter[int] = Counter()
        """The undecided ones among them, likewise."""
        self._entered: list[Experience] = []

    def admit(self, uid: str, version: int) -> None:
        """A prompt was admitted at `version`; its group will be ready some day."""
        self._pending[uid] = self._undecided[uid] = version
        self._waiting[version] += 1
        self._doubtful[version] += 1

    def keep(self, uid: str) -> None:
        """The filter has kept the group: a whole place is kept for it."""
        if uid in self._undecided:
            self._doubtful[self._undecided.pop(uid)] -= 1

    def drop(self, uid: str) -> None:
        """The group will never be trained."""
        self.keep(uid)
        if uid in self._pending:
            self._waiting[self._pending.pop(uid)] -= 1

    def offer(self, experiences: Iterable[Experience]) -> None:
        """Groups that are ready to be trained. One that was offered before is passed over."""
        for experience in experiences:
            if experience.uid in self._pending:
                self.keep(experience.uid)
                self._waiting[self._pending.pop(experience.uid)] -= 1
                self._waiting[experience.admitted_version] += 1
                self._ready[experience.uid] = experience
                bisect.insort(self._line, experience, key=_admitted)

    def take_late(
        self, version: int, *, absent: Collection[str] = (), is_whole: bool = False
    ) -> list[str]:
        """The groups that no step can train from that of `version` on: they are for others to drop.

        Those that are ready with a token beyond the bound; and, unless they may still turn out to
        be fresh (`drops_stale`), those that are not ready and were due at an earlier step, but for
        those that are `absent`. With `is_whole` from the step behind it on: what is drawable fills
        that of `version`.
        """
        spared = {e.uid for e in self.drawable(version)} if is_whole else set()
        oldest = version + is_whole - self._max_staleness
        stale = [
            experience
            for uid, experience in self._ready.items()
            if self._min_version(experience) < oldest and uid not in spared
        ]
        self._remove(stale)
        overdue = [
            uid
            for uid, admitted in self._pending.items()
            if admitted < oldest and not (self.drops_stale or uid in absent)
        ]
        return [*(experience.uid for experience in stale), *overdue]

    def _remove(self, chosen: Sequence[Experience]) -> None:
        """Of those that are ready; who enters is first in the line, unless the oldest tokens go."""
        if not chosen:
            return
        for experience in chosen:
            del self._ready[experience.uid]
            self._waiting[experience.admitted_version] -= 1
        if self._line[: len(chosen)] == list(chosen):
            del self._line[: len(chosen)]
        else:
            self._line = [experience for experience in self._line if experience.uid in self._ready]
        self._waiting, self._doubtful = +self._waiting, +self._doubtful

    @property
    def complete(self) -> bool:
        """True if the step has all its groups."""
        return len(self._entered) == self._groups_per_step

    @property
    def num_entered(self) -> int:
        """Groups the step has so far."""
        return len(self._entered)

    @property
    def num_ready(self) -> int:
        """Groups that have not entered the step, though they are ready."""
        return len(self._ready)

    @property
    def awaited(self) -> list[str]:
        """Uids that are not ready yet, the earliest deadline first."""
        return sorted(self._pending, key=self._pending.__getitem__)

    def drawable(self, version: int) -> list[Experience]:
        """The ready groups that may enter the step of `version`, the earliest deadline first."""
        places = self._groups_per_step - len(self._entered)
        if self.drops_stale:
            oldest = sorted(self._ready.values(), key=lambda e: -self._staleness(e, version))
            return oldest[:places]
        chosen: list[Experience] = []
        taken: Counter[int] = Counter()
        for experience in self._line:
            left = places - 1 - len(chosen)
            # Where one does not fit, those with the same deadline or a later one do not, either.
            if left < 0 or not self._others_fit(experience, version, left, taken):
                break
            chosen.append(experience)
            taken[experience.admitted_version] += 1
        return chosen

    def _others_fit(
        self, chosen: Experience, version: int, places: int, taken: Counter[int]
    ) -> bool:
        """Whether all groups with a deadline before `chosen`'s fit if it takes a place now.

        `taken` counts those that have a place already by the version they were admitted at.
        """
        first, doubt = version - self._max_staleness, 1 - 1 / self._oversampling.factor
        for admitted in range(first, chosen.admitted_version):
            due = sum(n - taken[at] for at, n in self._waiting.items() if at <= admitted)
            if doubt:
                doubtful = sum(n for at, n in self._doubtful.items() if at <= admitted)
                due = math.floor(due - doubt * doubtful)
            if due > places + (admitted - first) * self._groups_per_step:
                return False
        return True

    def draw(self, version: int) -> list[Experience]:
        """Let the drawable groups enter the step.

        Raises StaleGroupError if one of them holds a token beyond the bound.
        """
        drawn = self.drawable(version)
        for experience in drawn:
            self._check(experience, version)
        self._remove(drawn)
        self._entered += drawn
        return drawn

    @staticmethod
    def _min_version(experience: Experience) -> int:
        assert experience.info is not None, experience.uid
        return experience.info.min_version

    def _staleness(self, experience: Experience, version: int) -> int:
        return version - self._min_version(experience)

    def _check(self, experience: Experience, version: int) -> None:
        staleness = self._staleness(experience, version)
        if staleness > self._max_staleness:
            raise StaleGroupError(
                f"group {experience.uid} was sampled by version {version - staleness}:"
                f" {staleness} behind the step of version {version},"
                f" pipeline.max_staleness is {self._max_staleness}"
            )

    def finish(self) -> tuple[TrainedGroup, ...]:
        """The groups of the complete step; the next step starts empty."""
        assert self.complete
        entered, self._entered = self._entered, []
        return tuple(_as_trained(experience) for experience in entered)


def _admitted(experience: Experience) -> int:
    return experience.admitted_version


def _as_trained(experience: Experience) -> TrainedGroup:
    assert experience.info is not None and experience.ready_version is not None
    return TrainedGroup(experience.uid, experience.info, experience.ready_version)
