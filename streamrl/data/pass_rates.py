"""Running pass rates of data rows, and the sampling by difficulty that they decide.

    results of groups, tagged with a version --> pending --(a draw at a later version)--> rates

A draw at version v uses exactly the results of versions before v, in an order that does not depend
on their arrival. So at staleness 0 each run with the same seeds draws the same prompts, and a
resume that reads results and draws from the run log draws as before.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.messages import parse_uid

HALF_LIFE = 32
"""Versions after which a result counts half: the policy learns, and rates move."""
PRIOR_WEIGHT = 0.25
"""Weight of the prior pass rate 1/2, in results."""
MIN_CHANCE = 0.05
"""Least chance of a row to be drawn in an epoch, so that every rate is measured again."""
EASY_RATE, HARD_RATE = 0.8, 0.2
"""Pass rates above and below which a row counts as easy or hard in metrics."""


class PassRates:
    """Running pass rate per data row, by index in the uid, at the version of the latest draw.

    A row without results has rate 1/2. Old results lose weight, half of it in HALF_LIFE versions.
    """

    def __init__(self) -> None:
        self._version = 0
        self._sums: dict[int, tuple[float, float, int]] = {}
        """By row: decayed sum of pass rates, decayed number of results, version of that decay."""
        self._pending: list[tuple[int, str, float]] = []

    def record_results(self, version: int, rates: Mapping[str, float | None]) -> None:
        """Record pass rates of groups, in [0, 1], by uid; draws at later versions use them.

        None for a group without scores, which is skipped.
        """
        self._pending += [(version, uid, rate) for uid, rate in rates.items() if rate is not None]

    def advance_version(self, version: int) -> None:
        """Apply the results of earlier versions, for a draw at `version`."""
        self._version = version
        due = sorted(result for result in self._pending if result[0] < version)
        self._pending = [result for result in self._pending if result[0] >= version]
        for result_version, uid, rate in due:
            row = parse_uid(uid)[1]
            total, weight, since = self._decay_sums(row, result_version)
            self._sums[row] = total + rate, weight + 1.0, since

    def _decay_sums(self, row: int, version: int) -> tuple[float, float, int]:
        total, weight, since = self._sums.get(row, (0.0, 0.0, version))
        decay = 0.5 ** (max(0, version - since) / HALF_LIFE)
        return decay * total, decay * weight, max(since, version)

    def estimate_rate(self, row: int) -> float:
        """Return the estimated pass rate of a row, which tends to 1/2 as its results age."""
        total, weight, _ = self._decay_sums(row, self._version)
        return (total + 0.5 * PRIOR_WEIGHT) / (weight + PRIOR_WEIGHT)

    def is_chosen(self, *, seed: int, epoch: int, row: int) -> bool:
        """Return whether an epoch draws a row: with chance 4 p (1 - p) for pass rate p.

        The chance is at least MIN_CHANCE, and 1 for a row without results.
        """
        rate = self.estimate_rate(row)
        digest = hashlib.blake2b(f"{seed} {epoch} {row}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) < max(MIN_CHANCE, 4 * rate * (1 - rate)) * 2.0**64

    @property
    def metrics(self) -> dict[str, float]:
        """Mean estimated pass rate of rows with results, and shares of easy and hard rows."""
        rates = [self.estimate_rate(row) for row in self._sums]
        count = len(rates) or float("nan")
        return {
            "prompts/pass_rate": sum(rates) / count,
            "prompts/easy_frac": sum(rate > EASY_RATE for rate in rates) / count,
            "prompts/hard_frac": sum(rate < HARD_RATE for rate in rates) / count,
            "prompts/seen": len(rates),
        }

    def state_dict(self) -> dict[str, Any]:
        rows: Sequence[Any] = [[row, *sums] for row, sums in self._sums.items()]
        return {
            "version": self._version,
            "rows": rows,
            "pending": [list(result) for result in self._pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._version = state["version"]
        self._sums = {row: (total, weight, since) for row, total, weight, since in state["rows"]}
        self._pending = [(version, uid, rate) for version, uid, rate in state["pending"]]
