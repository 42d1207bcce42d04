"""What a log of the books adds up to. It believes nothing: what does not add up is named."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.buffer.books.ledger import LedgerCounts
from streamrl.messages import parse_uid


@dataclass
class LedgerAudit:
    """What became of every uid: how often it was admitted, and every way in which it ended."""

    admitted: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, list[str]] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    filtered: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    drop_causes: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_starts: int = 0

    @property
    def in_flight(self) -> list[str]:
        """Uids that were admitted and have not ended, in the order of their admission."""
        return [uid for uid in self.admitted if uid not in self.outcomes]

    @property
    def counts(self) -> LedgerCounts:
        """The numbers of the conservation law, each counted by itself."""
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
        """Per epoch of the data, how many of its uids are where."""
        parts = ("trained", "filtered", "dropped", "in_flight")
        counted = {part: Counter(parse_uid(u)[0] for u in getattr(self, part)) for part in parts}
        epochs = sorted(set().union(*counted.values()))
        return {epoch: {part: counted[part][epoch] for part in parts} for epoch in epochs}

    @property
    def problems(self) -> list[str]:
        """Uids that were not admitted once or ended more than once, with what the log has."""
        odd = [uid for uid in {**self.admitted, **self.outcomes} if self._is_inconsistent(uid)]
        return [
            f"{uid}: admitted {self.admitted[uid]} times, {', '.join(self.outcomes.get(uid, ()))}"
            for uid in odd
        ]

    def _is_inconsistent(self, uid: str) -> bool:
        return self.admitted[uid] != 1 or len(self.outcomes.get(uid, ())) > 1


def audit_run_log(entries: Iterable[Mapping[str, Any]]) -> LedgerAudit:
    """Add up a log, entry by entry as `run_log.read_history` gives it."""
    account = LedgerAudit()

    def end(uids: Sequence[str], how: str, where: list[str]) -> None:
        where.extend(uids)
        for uid in uids:
            account.outcomes.setdefault(uid, []).append(how)

    for entry in entries:
        if entry["kind"] == "open":
            account.num_starts += 1
        elif entry["kind"] == "admit":
            account.admitted.update(entry["uids"])
        elif entry["kind"] == "step":
            account.num_steps += 1
            end(entry["uids"], f"trained at version {entry['version']}", account.trained)
        elif entry["filtered"]:
            end([entry["uid"]], "filtered", account.filtered)
        else:
            account.drop_causes[entry["cause"]] += 1
            end([entry["uid"]], f"dropped ({entry['cause']})", account.dropped)
    return account
