"""Ledger of a run: the state of every admitted prompt, by uid; and its audit from the run log."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import LedgerError
from streamrl.messages import parse_uid


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
    example on training a group twice. `in_flight` maps uids to the version at admission.
    """

    def __init__(self) -> None:
        self.in_flight: dict[str, int] = {}
        self._num_admitted = 0
        self._num_trained = 0
        self._num_filtered = 0
        self._drop_counts: Counter[str] = Counter()

    def mark_admitted(self, uid: str, version: int) -> None:
        if uid in self.in_flight:
            raise LedgerError(f"prompt {uid} is admitted, but it is in flight already")
        self.in_flight[uid] = version
        self._num_admitted += 1

    def mark_trained(self, uid: str) -> None:
        self._mark_finished(uid, "trained")
        self._num_trained += 1

    def mark_filtered(self, uid: str) -> None:
        self._mark_finished(uid, "filtered")
        self._num_filtered += 1

    def mark_dropped(self, uid: str, cause: str) -> None:
        self._mark_finished(uid, f"dropped ({cause})")
        self._drop_counts[cause] += 1

    def _mark_finished(self, uid: str, outcome: str) -> None:
        if uid not in self.in_flight:
            raise LedgerError(f"prompt {uid} is {outcome}, but it is not in flight")
        del self.in_flight[uid]

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
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Ledger":
        """Restore a ledger from its `state_dict`."""
        ledger = cls()
        ledger.in_flight = dict(state["in_flight"])
        ledger._num_admitted = state["admitted"]
        ledger._num_trained = state["trained"]
        ledger._num_filtered = state["filtered"]
        ledger._drop_counts = Counter(state["drops"])
        return ledger


@dataclass
class LedgerAudit:
    """Admissions and outcomes of every uid, recounted from the entries of the run log."""

    admitted: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, list[str]] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    filtered: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    drop_causes: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_starts: int = 0
    last_time: float = 0.0

    @property
    def in_flight(self) -> list[str]:
        return [uid for uid in self.admitted if uid not in self.outcomes]

    @property
    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            admitted=self.admitted.total(),
            trained=len(self.trained),
            filtered=len(self.filtered),
            dropped=len(self.dropped),
            in_flight=len(self.in_flight),
            drops=tuple(sorted(self.drop_causes.items())),
        )

    @property
    def counts_by_epoch(self) -> dict[int, dict[str, int]]:
        outcomes = ("trained", "filtered", "dropped", "in_flight")
        counted = {name: Counter(parse_uid(u)[0] for u in getattr(self, name)) for name in outcomes}
        epochs = sorted(set().union(*counted.values()))
        return {epoch: {name: counted[name][epoch] for name in outcomes} for epoch in epochs}

    @property
    def problems(self) -> list[str]:
        """Describe each uid that was not admitted exactly once, or that ended more than once."""
        inconsistent = [
            uid for uid in {**self.admitted, **self.outcomes} if self._is_inconsistent(uid)
        ]
        return [
            f"{uid}: admitted {self.admitted[uid]} times, {', '.join(self.outcomes.get(uid, ()))}"
            for uid in inconsistent
        ]

    def _is_inconsistent(self, uid: str) -> bool:
        return self.admitted[uid] != 1 or len(self.outcomes.get(uid, ())) > 1


def audit_run_log(entries: Iterable[Mapping[str, Any]]) -> LedgerAudit:
    """Count the admissions and outcomes of every uid in the entries of a run log."""
    audit = LedgerAudit()

    def record_outcome(uids: Sequence[str], outcome: str, finished: list[str]) -> None:
        finished.extend(uids)
        for uid in uids:
            audit.outcomes.setdefault(uid, []).append(outcome)

    for entry in entries:
        audit.last_time = entry.get("time", 0.0)
        if entry["kind"] == "open":
            audit.num_starts += 1
        elif entry["kind"] == "admit":
            audit.admitted.update(entry["uids"])
        elif entry["kind"] == "step":
            audit.num_steps += 1
            record_outcome(entry["uids"], f"trained at version {entry['version']}", audit.trained)
        elif entry["filtered"]:
            record_outcome([entry["uid"]], "filtered", audit.filtered)
        else:
            audit.drop_causes[entry["cause"]] += 1
            record_outcome([entry["uid"]], f"dropped ({entry['cause']})", audit.dropped)
    return audit
