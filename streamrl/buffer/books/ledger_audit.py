"""Ledger audit: recompute every count from the run log and report inconsistent uids."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.buffer.books.ledger import LedgerCounts
from streamrl.messages import parse_uid


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
