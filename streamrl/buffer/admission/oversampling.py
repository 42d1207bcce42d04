"""How many prompts are admitted for each place of a step, where a filter takes groups out."""

from collections import deque
from collections.abc import Iterable

MAX_FACTOR = 32.0
"""Most prompts that are admitted for a place: the filter takes 97 %."""
MIN_VERDICTS = 256
"""So many of the last verdicts count, or those on some steps' groups if these are more."""
WINDOW_STEPS = 8
PRIOR_KEPT = 4
"""Groups that count as kept before any were: a few verdicts say little."""


class OversamplingController:
    """The undecided groups there may be for each place that nobody has yet, and who has one.

    A group is undecided from its admission until the filter has kept it or taken it out. `fixed` is
    their number for a place, at least 1; None takes as many as it took lately for one to be kept.
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
        """Whether there may be more undecided groups than places."""
        return self._fixed_factor != 1.0

    @property
    def factor(self) -> float:
        """Undecided groups for a place."""
        if self._fixed_factor is not None:
            return self._fixed_factor
        return min(
            MAX_FACTOR, (len(self._verdicts) + PRIOR_KEPT) / (self._num_kept_lately + PRIOR_KEPT)
        )

    @property
    def num_kept(self) -> int:
        """Groups in flight that the filter has kept."""
        return len(self._kept_uids)

    def mark_kept(self, uid: str) -> bool:
        """The filter has kept a group in flight; whether that is news."""
        if uid in self._kept_uids:
            return False
        self._kept_uids.add(uid)
        self._record_verdict(is_kept=True)
        return True

    def count_filtered(self) -> None:
        """The filter has taken a group out."""
        self._record_verdict(is_kept=False)

    def remove_groups(self, uids: Iterable[str]) -> None:
        """These groups are in flight no more."""
        self._kept_uids.difference_update(uids)

    def _record_verdict(self, *, is_kept: bool) -> None:
        if len(self._verdicts) == self._verdicts.maxlen:
            self._num_kept_lately -= self._verdicts[0]
        self._verdicts.append(is_kept)
        self._num_kept_lately += is_kept
