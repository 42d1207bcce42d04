"""Step assembly: which ready groups enter the step of a version. Pure bookkeeping, no waiting."""

from collections.abc import Iterable
from dataclasses import replace

from streamrl.errors import StaleGroupError
from streamrl.messages import Experience


class StepAssembler:
    """Fills steps of `groups_per_step` groups in free order, within the staleness bound.

    A group admitted at version a must be trained by the step of version a + max_staleness: later,
    a token of it could be too old. Such due groups go first and keep places free for those not
    ready yet; everything else fills what is left, first come, first served. The credits make sure
    that the due groups of a step never outnumber its places.
    """

    def __init__(self, *, max_staleness: int, groups_per_step: int) -> None:
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._pending: dict[str, int] = {}
        self._ready: dict[str, Experience] = {}
        self._entered: list[Experience] = []

    def admit(self, uid: str, version: int) -> None:
        """A prompt was admitted at `version`; its group will be ready some day."""
        self._pending[uid] = version

    def drop(self, uid: str) -> None:
        """The group will never be ready."""
        del self._pending[uid]

    def offer(self, experiences: Iterable[Experience], version: int) -> None:
        """Groups that are ready to be trained, while the step of `version` is being filled."""
        for experience in experiences:
            del self._pending[experience.uid]
            self._ready[experience.uid] = replace(experience, ready_version=version)

    @property
    def complete(self) -> bool:
        """True if the step has all its groups."""
        return len(self._entered) == self._groups_per_step

    def due(self, version: int) -> list[str]:
        """Uids not ready yet that the step of `version` has to wait for."""
        newest_due = version - self._max_staleness
        return [uid for uid, admitted in self._pending.items() if admitted <= newest_due]

    def drawable(self, version: int) -> list[Experience]:
        """The ready groups that may enter the step of `version` now, the most urgent first."""
        places = self._groups_per_step - len(self._entered)
        free = places - len(self.due(version))
        chosen: list[Experience] = []
        for experience in sorted(self._ready.values(), key=lambda e: e.admitted_version):
            is_due = experience.admitted_version <= version - self._max_staleness
            if len(chosen) < (places if is_due else free):
                chosen.append(experience)
        return chosen

    def draw(self, version: int) -> list[Experience]:
        """Let the drawable groups enter the step.

        Raises StaleGroupError if one of them holds a token beyond the bound.
        """
        drawn = self.drawable(version)
        for experience in drawn:
            self._check(experience, version)
            del self._ready[experience.uid]
        self._entered += drawn
        return drawn

    def _check(self, experience: Experience, version: int) -> None:
        assert experience.info is not None, experience.uid
        staleness = version - experience.info.min_version
        if staleness > self._max_staleness:
            raise StaleGroupError(
                f"group {experience.uid} was sampled by version {experience.info.min_version}:"
                f" {staleness} behind the step of version {version},"
                f" pipeline.max_staleness is {self._max_staleness}"
            )

    def finish(self) -> list[Experience]:
        """The groups of the complete step; the next step starts empty."""
        assert self.complete
        entered, self._entered = self._entered, []
        return entered
