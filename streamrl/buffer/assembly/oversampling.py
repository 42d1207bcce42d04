"""Oversampling factor: prompts admitted per trained group while a filter rejects some."""

from collections import deque
from collections.abc import Iterable

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
