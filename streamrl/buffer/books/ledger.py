"""The accounts of a run: where every admitted prompt is, by uid."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.errors import LedgerError


@dataclass(frozen=True)
class LedgerCounts:
    """The five numbers of the conservation law, in groups, and the drops by cause."""

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
    """Every prompt uid is in one state: in flight until it is trained, filtered or dropped.

    Raises LedgerError at the transition that would admit a uid twice or end one that is not in
    flight, which is how training a group twice would show. `in_flight` has the version each was
    admitted at. With `debug` every uid that has ended is kept, too, and the law is counted anew at
    every transition.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self.in_flight: dict[str, int] = {}
        self._outcomes: dict[str, str] | None = {} if debug else None
        self._num_admitted = 0
        self._num_trained = 0
        self._num_filtered = 0
        self._drop_counts: Counter[str] = Counter()

    def mark_admitted(self, uid: str, version: int) -> None:
        """A prompt enters the stream at `version`."""
        if uid in self.in_flight:
            raise LedgerError(f"prompt {uid} is admitted, but it is in flight already")
        if self._outcomes is not None and uid in self._outcomes:
            raise LedgerError(f"prompt {uid} is admitted, but it was {self._outcomes[uid]} before")
        self.in_flight[uid] = version
        self._num_admitted += 1
        self._check_outcomes()

    def mark_trained(self, uid: str) -> None:
        """Its group was part of an optimizer step."""
        self._mark_finished(uid, "trained")
        self._num_trained += 1
        self._check_outcomes()

    def mark_filtered(self, uid: str) -> None:
        """A predicate took its scored group out."""
        self._mark_finished(uid, "filtered")
        self._num_filtered += 1
        self._check_outcomes()

    def mark_dropped(self, uid: str, cause: str) -> None:
        """Its group was given up, for a cause that is counted."""
        self._mark_finished(uid, f"dropped ({cause})")
        self._drop_counts[cause] += 1
        self._check_outcomes()

    def _mark_finished(self, uid: str, how: str) -> None:
        if uid not in self.in_flight:
            raise LedgerError(f"prompt {uid} is {how}, but it is not in flight")
        del self.in_flight[uid]
        if self._outcomes is not None:
            self._outcomes[uid] = how

    def _check_outcomes(self) -> None:
        if self._outcomes is None:
            return
        how = Counter(state.partition(" ")[0] for state in self._outcomes.values())
        found = (how["trained"], how["filtered"], how["dropped"])
        booked = (self._num_trained, self._num_filtered, self._drop_counts.total())
        total = sum(found) + len(self.in_flight)
        if found != booked or total != self._num_admitted:
            raise LedgerError(f"the uids do not add up: {found} of {total}, booked {self.counts}")

    @property
    def counts(self) -> LedgerCounts:
        """The numbers as they stand."""
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
        """Groups that were or still may be trained: what a credit was spent on and not returned."""
        return self._num_admitted - self._num_filtered - self._drop_counts.total()

    def check_balance(
        self, held: Iterable[str], *, booked: Iterable[str] | None = None
    ) -> LedgerCounts:
        """Check the conservation law against the uids the shards hold; returns the counts.

        `booked` are the uids that must be among them, by default all in flight: those that were in
        a shard when it was asked. Raises LedgerError naming the uids that only one side knows.
        """
        counts, held = self.counts, set(held)
        ended = counts.trained + counts.filtered + counts.dropped
        if counts.admitted != ended + counts.in_flight:
            raise LedgerError(f"the ledger does not balance: {counts}")
        lost = sorted(set(self.in_flight if booked is None else booked) - held)
        unknown = sorted(held - self.in_flight.keys())
        if lost or unknown:
            raise LedgerError(f"lost from the queue: {lost[:5]}; ended but in it: {unknown[:5]}")
        return counts

    def state_dict(self) -> dict[str, object]:
        """JSON-able state for a checkpoint."""
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
        """Inverse of `state_dict`; `debug` goes on only with a state that was written with it."""
        ledger = cls(debug=debug and "ended" in state)
        if ledger._outcomes is not None:
            ledger._outcomes = dict(state["ended"])
        ledger.in_flight = dict(state["in_flight"])
        ledger._num_admitted = state["admitted"]
        ledger._num_trained = state["trained"]
        ledger._num_filtered = state["filtered"]
        ledger._drop_counts = Counter(state["drops"])
        return ledger
