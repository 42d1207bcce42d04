"""Ledger of a run: the state of every admitted prompt, by uid."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.errors import LedgerError


@dataclass(frozen=True)
class LedgerCounts:
    """Numbers of groups by outcome: admitted = trained + filtered + dropped + in flight.

    `drops`: pairs of (cause, number of groups dropped for this cause).
    """

    admitted: int
    trained: int
    filtered: int
    dropped: int
    in_flight: int
    drops: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return (
            f"admitted {self.admitted} = trained {self.trained} + filtered {self.filtered}"
            f" + dropped {self.dropped} + in flight {self.in_flight}"
        )


class Ledger:
    """State of every prompt uid: in flight, then trained, filtered or dropped.

    Raises LedgerError on admitting a uid twice and on ending a uid that is not in flight, for
    example on training a group twice. `in_flight` maps uids to the version at admission. `debug`
    keeps the uids of ended groups, too, and recounts all outcomes at every change.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self.in_flight: dict[str, int] = {}
        self._outcomes: dict[str, str] | None = {} if debug else None
        self._num_admitted = 0
        self._num_trained = 0
        self._num_filtered = 0
        self._drop_counts: Counter[str] = Counter()

    def mark_admitted(self, uid: str, version: int) -> None:
        if uid in self.in_flight:
            raise LedgerError(f"prompt {uid} is admitted, but it is in flight already")
        if self._outcomes is not None and uid in self._outcomes:
            raise LedgerError(f"prompt {uid} is admitted, but it was {self._outcomes[uid]} before")
        self.in_flight[uid] = version
        self._num_admitted += 1
        self._check_outcomes()

    def mark_trained(self, uid: str) -> None:
        self._mark_finished(uid, "trained")
        self._num_trained += 1
        self._check_outcomes()

    def mark_filtered(self, uid: str) -> None:
        self._mark_finished(uid, "filtered")
        self._num_filtered += 1
        self._check_outcomes()

    def mark_dropped(self, uid: str, cause: str) -> None:
        self._mark_finished(uid, f"dropped ({cause})")
        self._drop_counts[cause] += 1
        self._check_outcomes()

    def _mark_finished(self, uid: str, outcome: str) -> None:
        if uid not in self.in_flight:
            raise LedgerError(f"prompt {uid} is {outcome}, but it is not in flight")
        del self.in_flight[uid]
        if self._outcomes is not None:
            self._outcomes[uid] = outcome

    def _check_outcomes(self) -> None:
        """Recount the outcomes of all uids if `debug`; raise LedgerError on a difference."""
        if self._outcomes is None:
            return
        outcomes = Counter(state.partition(" ")[0] for state in self._outcomes.values())
        recounted = (outcomes["trained"], outcomes["filtered"], outcomes["dropped"])
        counted = (self._num_trained, self._num_filtered, self._drop_counts.total())
        total = sum(recounted) + len(self.in_flight)
        if recounted != counted or total != self._num_admitted:
            raise LedgerError(
                f"the uids do not add up: {recounted} of {total}, ledger: {self.counts}"
            )

    @property
    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            admitted=self._num_admitted,
            trained=self._num_trained,
            filtered=self._num_filtered,
            dropped=self._drop_counts.total(),
            in_flight=len(self.in_flight),
            drops=tuple(sorted(self._drop_counts.items())),
        )

    @property
    def num_credits_spent(self) -> int:
        """Number of staleness credits in use: one per group in flight or trained."""
        return self._num_admitted - self._num_filtered - self._drop_counts.total()

    def check_balance(
        self, shard_uids: Iterable[str], *, inserted: Iterable[str] | None = None
    ) -> LedgerCounts:
        """Compare the ledger with the uids that the shards hold; return the ledger's counts.

        inserted: uids in flight that must be in a shard, by default all; leave out prompts that are
        still being inserted. Raises LedgerError if the counts do not add up, or naming uids that
        only the ledger or only the shards have.
        """
        counts, shard_uids = self.counts, set(shard_uids)
        finished = counts.trained + counts.filtered + counts.dropped
        if counts.admitted != finished + counts.in_flight:
            raise LedgerError(f"the ledger does not balance: {counts}")
        lost = sorted(set(self.in_flight if inserted is None else inserted) - shard_uids)
        unknown = sorted(shard_uids - self.in_flight.keys())
        if lost or unknown:
            raise LedgerError(f"lost from the queue: {lost[:5]}; ended but in it: {unknown[:5]}")
        return counts

    def state_dict(self) -> dict[str, object]:
        return {
            "in_flight": dict(self.in_flight),
            "admitted": self._num_admitted,
            "trained": self._num_trained,
            "filtered": self._num_filtered,
            "drops": dict(self._drop_counts),
            **({} if self._outcomes is None else {"ended": dict(self._outcomes)}),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, debug: bool = False) -> "Ledger":
        """Restore a ledger from its `state_dict`.

        debug: keep and recount all uids; without effect if the saved ledger did not.
        """
        ledger = cls(debug=debug and "ended" in state)
        if ledger._outcomes is not None:
            ledger._outcomes = dict(state["ended"])
        ledger.in_flight = dict(state["in_flight"])
        ledger._num_admitted = state["admitted"]
        ledger._num_trained = state["trained"]
        ledger._num_filtered = state["filtered"]
        ledger._drop_counts = Counter(state["drops"])
        return ledger
