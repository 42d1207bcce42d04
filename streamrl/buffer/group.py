"""The groups of a shard, and the transitions that change them.

A transition is a record. The shard journals it and applies it; a restarted shard applies what it
finds in the journal. One function says what a record does, so that the two cannot differ.
"""

import bisect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from streamrl.buffer.codec import Blob, count_blob_bytes, join_pieces
from streamrl.buffer.config import StageSchema
from streamrl.buffer.log.segment_file import JournalRecord, RecordPosition
from streamrl.errors import ContractError
from streamrl.messages import GroupInfo, GroupLease, GroupOutcome

TOKENS_PER_INCARNATION = 1 << 40
"""Lease tokens that one process of a shard may give."""
MAX_SEEN_UIDS = 100_000
"""Admitted uids that are remembered, though they have left, lest a repeated call bring them back.
"""


@dataclass(frozen=True)
class RecordLocation:
    """Where a record lies on the disk."""

    folder: Path
    position: RecordPosition


@dataclass(eq=False)
class StageColumns:
    """What one stage has committed. `data` is the blob or what stands for it in the store."""

    column_names: tuple[str, ...]
    num_bytes: int
    data: Any = None
    location: RecordLocation | None = None


@dataclass(eq=False)
class ActiveLease:
    """A lease that is out, and the request it was given to."""

    lease: GroupLease
    expires_at: float
    request_id: str = ""


@dataclass(eq=False)
class GroupState:
    """One group as its shard holds it. `committing_stages` are stages whose commit is being
    journaled.

    `begun` is what a holder of a stage has made so far, in memory alone. `num_bytes` are those of
    its columns, those of what is begun among them.
    """

    uid: str
    prompt: bytes
    admitted_version: int
    admitted_at: float
    admission_order: int
    ready_version: int | None = None
    stage_columns: dict[str, StageColumns] = field(default_factory=dict)
    partial_rollouts: dict[str, StageColumns] = field(default_factory=dict)
    column_names: set[str] = field(default_factory=set)
    info: GroupInfo | None = None
    leases: dict[str, list[ActiveLease]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    committing_stages: set[str] = field(default_factory=set)
    outcome: GroupOutcome | None = None
    num_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def is_on_disk(self) -> bool:
        """Whether all its columns were found in a journal."""
        return bool(self.stage_columns) and all(
            part.location is not None for part in self.stage_columns.values()
        )

    def clear_progress(self) -> None:
        """Forget what was made of it, and who is at work on it."""
        self.stage_columns.clear()
        self.partial_rollouts.clear()
        self.column_names.clear()
        self.leases.clear()
        self.num_bytes = 0

    def save_partial(self, stage: str, part: StageColumns) -> None:
        """Have this in the place of what was begun in a stage before."""
        self.drop_partial(stage)
        self.partial_rollouts[stage] = part
        self.num_bytes += part.num_bytes

    def drop_partial(self, stage: str) -> None:
        """The stage has its columns: what was begun of them is of no use any more."""
        if stage in self.partial_rollouts:
            self.num_bytes -= self.partial_rollouts.pop(stage).num_bytes

    def find_lease(self, stage: str, token: int) -> ActiveLease | None:
        """The lease of a token, if it is still good."""
        for held in self.leases.get(stage, ()):
            if held.lease.token == token:
                return held
        return None

    def release_lease(self, stage: str, token: int) -> None:
        """Take one lease back."""
        left = [held for held in self.leases.get(stage, ()) if held.lease.token != token]
        if left:
            self.leases[stage] = left
        else:
            self.leases.pop(stage, None)


class ReadyQueue:
    """Groups that wait for one stage, in the order in which they were admitted."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupState] = {}
        self._orders: list[int] = []

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, group: GroupState) -> bool:
        return group.admission_order in self._groups

    def add_group(self, group: GroupState) -> None:
        """Take a place among the others."""
        self._groups[group.admission_order] = group
        bisect.insort(self._orders, group.admission_order)

    def remove_group(self, group: GroupState) -> None:
        """Leave the line, from wherever it stands."""
        del self._groups[group.admission_order]
        del self._orders[bisect.bisect_left(self._orders, group.admission_order)]

    def update_groups(
        self, groups: Iterable[GroupState], is_ready: Callable[[GroupState], bool]
    ) -> bool:
        """Have those of `groups` in line that are ready, and no others; whether it is longer now,
        or shorter."""
        before = len(self)
        for group in groups:
            if is_ready(group) != (group in self):
                (self.remove_group if group in self else self.add_group)(group)
        return len(self) != before

    def peek_groups(self, count: int) -> list[GroupState]:
        """At most so many from the head of the line; they stay in it."""
        return [self._groups[order] for order in self._orders[:count]]


def make_admit_record(uid: str, prompt: bytes, version: int) -> JournalRecord:
    """A prompt came in. Raises ContractError for what is no version."""
    return JournalRecord(
        {"kind": "admit", "uid": uid, "version": _validate_version(version)}, prompt
    )


def make_lease_record(
    stage: str, holder: str, *, request: str, grants: Sequence[tuple[str, int, int]]
) -> JournalRecord:
    """Work of one stage was handed to one holder: uid, token and attempt of each group."""
    meta = {"kind": "lease", "stage": stage, "holder": holder, "request": request}
    return JournalRecord({**meta, "grants": list(grants)})


def make_commit_record(
    lease: GroupLease, blob: Blob, *, names: Iterable[str], info: GroupInfo | None, version: int
) -> JournalRecord:
    """A stage's columns came in; `version` was being trained then. No `info` before rollouts."""
    meta = {
        "kind": "put",
        "uid": lease.uid,
        "stage": lease.stage,
        "version": version,
        "names": tuple(names),
        "info": info,
    }
    return JournalRecord(meta, blob)


def make_nack_record(lease: GroupLease, *, failed: bool) -> JournalRecord:
    """Work came back undone; `failed` counts against its attempts."""
    meta = {"kind": "back", "uid": lease.uid, "stage": lease.stage, "token": lease.token}
    return JournalRecord({**meta, "failed": failed})


def make_finish_record(uid: str, how: GroupOutcome) -> JournalRecord:
    """The group will not be trained; the coordinator is yet to hear of it."""
    return JournalRecord({"kind": "end", "uid": uid, **asdict(how)})


def make_remove_record(uids: Sequence[str], version: int) -> JournalRecord:
    """Groups left the queue: trained, or their end is on the books.

    Raises ContractError for what is no version.
    """
    return JournalRecord(
        {"kind": "leave", "uids": list(uids), "version": _validate_version(version)}
    )


def make_open_record(session: str, incarnation: int, *, forgets: bool = False) -> JournalRecord:
    """A process took the shard over, the `incarnation`-th.

    `forgets` is whether it found a damaged journal, and took back what was computed from columns
    that are lost: who reads this journal again must do so at the same point.
    """
    meta = {"kind": "open", "session": session, "incarnation": incarnation}
    return JournalRecord({**meta, "forgets": forgets})


def make_seal_record() -> JournalRecord:
    """A snapshot ends here: one without has lost its end."""
    return JournalRecord({"kind": "seal"})


def _validate_version(version: object) -> int:
    # Whatever is in the journal is applied at every restart: nothing may be there that cannot be.
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ContractError(f"version {version!r}: must be a whole number, 0 or more")
    return version


class ShardState:
    """All groups of a shard by uid, and `retired_groups`: where to find those that have left.

    Retired are the groups that a journal has, for their step may have to be made again; what came
    in since is not kept. `should_keep_retired` is on while a journal is read.
    `incarnation` counts the processes that had the shard; `session` is the run of the last one.
    `is_damaged` is whether records of the journal could not be read.
    A uid comes in once in a session, the latest REMEMBERED at least.
    """

    def __init__(self, stages: Mapping[str, StageSchema]) -> None:
        self.stages = stages
        self._required_columns = {stage: frozenset(ports.needs) for stage, ports in stages.items()}
        self._num_producers = sum(bool(ports.produces) for ports in stages.values())
        self.last_stage = next(s for s, ports in stages.items() if not ports.produces)
        self.groups: dict[str, GroupState] = {}
        self._seen_uids: OrderedDict[str, None] = OrderedDict()
        self.retired_groups: dict[str, dict[str, StageColumns]] = {}
        self.should_keep_retired = False
        self.version = 0
        self.incarnation = 0
        self.session = ""
        self.clock: Callable[[], float] = float
        self.lease_s = 0.0
        self.is_sealed = False
        self.is_damaged = False
        self._next_order = 0
        self._excused_tokens: OrderedDict[int, None] = OrderedDict()
        self._handlers = {
            "open": self._apply_open,
            "admit": self._apply_admit,
            "lease": self._apply_lease,
            "put": self._apply_commit,
            "back": self._apply_nack,
            "end": self._apply_finish,
            "leave": self._apply_remove,
            "seal": self._apply_seal,
        }

    def apply_record(
        self, record: JournalRecord, *, spot: RecordLocation | None = None, data: Any = None
    ) -> list[GroupState]:
        """Do what a record says; returns the groups it changed. What is unknown is passed over:
        a lease or a commit of a group that has left since."""
        return self._handlers[record.meta["kind"]](record, spot, data)

    def has_seen(self, uid: str) -> bool:
        """Whether the group is here, or has come and gone in this session."""
        return uid in self.groups or uid in self._seen_uids

    def pop_excuse(self, lease: GroupLease) -> bool:
        """Whether it took no fault for the work under a lease to become useless; told once."""
        return self._excused_tokens.pop(lease.token, lease) is None

    def excuse_leases(self, leases: Iterable[ActiveLease]) -> None:
        """Work under these leases is of no use any more, and whoever has them is not to blame."""
        self._excused_tokens.update((held.lease.token, None) for held in leases)
        while len(self._excused_tokens) > MAX_SEEN_UIDS:
            self._excused_tokens.popitem(last=False)

    def _excuse_group(self, group: GroupState) -> None:
        """The group ends or leaves while some may be at work on it."""
        for stage, held in group.leases.items():
            if stage != self.last_stage:
                self.excuse_leases(held)

    def find_leased_group(self, lease: GroupLease) -> GroupState | None:
        """The group of a lease, if it is still good."""
        group = self.groups.get(lease.uid)
        return group if group and group.find_lease(lease.stage, lease.token) else None

    def is_ready(self, group: GroupState, stage: str) -> bool:
        """Whether a stage may take the group. The last one is handed those that ended, too."""
        is_taken = (
            stage in group.leases
            or stage in group.stage_columns
            or stage in group.committing_stages
        )
        if is_taken or group.uid not in self.groups:
            return False
        if group.outcome is not None:
            return stage == self.last_stage
        return group.column_names >= self._required_columns[stage]

    def is_complete(self, group: GroupState) -> bool:
        """Whether no stage will add columns to it any more."""
        return group.outcome is not None or len(group.stage_columns) == self._num_producers

    def _apply_open(
        self, record: JournalRecord, spot: RecordLocation | None, data: Any
    ) -> list[GroupState]:
        self.incarnation = record.meta["incarnation"]
        if record.meta.get("forgets"):
            self.forget_incomplete()
        if self.session != record.meta["session"]:
            self.session = record.meta["session"]
            self._seen_uids.clear()
            for group in self.groups.values():
                group.leases.clear()
        return []

    def _apply_seal(
        self, record: JournalRecord, spot: RecordLocation | None, data: Any
    ) -> list[GroupState]:
        self.is_sealed = True
        return []

    def _apply_admit(
        self, record: JournalRecord, spot: RecordLocation | None, data: Any
    ) -> list[GroupState]:
        uid, version = record.meta["uid"], record.meta["version"]
        group = GroupState(
            uid, join_pieces(record.payload), version, self.clock(), self._next_order
        )
        self._next_order += 1
        self.version = max(self.version, version)
        self.groups[uid] = group
        self._seen_uids[uid] = None
        if len(self._seen_uids) > MAX_SEEN_UIDS:
            self._seen_uids.popitem(last=False)
        return [group]

    def _apply_lease(
        self, record: JournalRecord, spot: RecordLocation | None, data: Any
    ) -> list[GroupState]:
        stage, holder, now = record.meta["stage"], record.meta["holder"], self.clock()
        # The coordinator's leases last until its groups leave: it does not work on them itself.
        until = math.inf if stage == self.last_stage else now + self.lease_s
        changed = []
        for uid, token, attempt in record.meta["grants"]:
            # Also if the record that says so is damaged: no token is given twice.
            self.incarnation = max(self.incarnation, token // TOKENS_PER_INCARNATION)
            group = self.groups.get(uid)
            if group is not None:
                lease = GroupLease(token, uid, stage, attempt, until, holder, now)
                held = ActiveLease(lease, until, record.meta["request"])
                group.leases.setdefault(stage, []).append(held)
                changed.append(group)
        return changed

    def _apply_commit(
        self, record: JournalRecord, spot: RecordLocation | None, data: Any
    ) -> list[GroupState]:
        meta = record.meta
        group = self.groups.get(meta["uid"])
        if group is None or group.outcome is not None:
            return []
        group.info = group.info or msgspec.convert(meta["info"], GroupInfo | None)
        part = StageColumns(tuple(meta["names"]), count_blob_bytes(record.payload), data, spot)
        group.drop_partial(meta["stage"])
        group.stage_columns[meta["stage"]] = part
        group.num_bytes += part.num_bytes
        group.column_names.update(meta["names"])
        group.leases.pop(meta["stage"], None)
        self.version = max(self.version, meta["version"])
        if group.ready_version is None and self.is_ready(group, self.last_stage):
            group.ready_version = meta["version"]
        return [group]

    def _apply_nack(
        self, record: JournalRecord, spot: RecordLocation | None, data: Any
    ) -> list[GroupState]:
        stage = record.meta["stage"]
        group = self.groups.get(record.meta["uid"])
        if group is None:
            return []
        group.release_lease(stage, record.meta["token"])
        group.failures[stage] += record.meta["failed"]
        return [group]

    def _apply_finish(
        self, record: JournalRecord, spot: RecordLocation | None, data: Any
    ) -> list[GroupState]:
        group = self.groups.get(record.meta["uid"])
        if group is None or group.outcome is not None:
            return []
        names = ("cause", "reason", "filtered")
        group.outcome = GroupOutcome(**{name: record.meta[name] for name in names})
        self._excuse_group(group)
        group.clear_progress()
        return [group]

    def _apply_remove(
        self, record: JournalRecord, spot: RecordLocation | None, data: Any
    ) -> list[GroupState]:
        self.version = max(self.version, record.meta["version"])
        found = [self.groups.pop(uid) for uid in record.meta["uids"] if uid in self.groups]
        for group in found:
            self._excuse_group(group)
            if self.should_keep_retired or group.is_on_disk:
                self.retired_groups[group.uid] = {
                    s: _without_data(p) for s, p in group.stage_columns.items()
                }
        return found

    def order_by_version(self) -> None:
        """Have groups of an earlier version stand before the others, as they were admitted."""
        groups = sorted(
            self.groups.values(), key=lambda one: (one.admitted_version, one.admission_order)
        )
        for place, group in enumerate(groups):
            group.admission_order = place

    def forget_incomplete(self) -> None:
        """Take back what was computed from columns that a damaged journal has lost."""
        for group in self.groups.values():
            stages = {*group.stage_columns, *group.leases} if group.outcome is None else set()
            if any(not set(self.stages[stage].needs) <= group.column_names for stage in stages):
                group.clear_progress()
                group.info = group.ready_version = None


def _without_data(part: StageColumns) -> StageColumns:
    """A part without its columns in memory, if the disk has them."""
    return part if part.location is None else replace(part, data=None)
