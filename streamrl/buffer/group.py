"""State of a shard's groups, and the transitions that change it.

Every transition is a journal record. A running shard journals and applies new records; a restarted
shard reads and applies old records. Both use the same function per kind, so that the live state and
the recovered state cannot differ.
"""

import bisect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from streamrl.buffer.config import StageSchema
from streamrl.buffer.encoding import Blob, count_blob_bytes, join_pieces
from streamrl.buffer.journal import JournalRecord, RecordPosition, read_record
from streamrl.errors import ContractError
from streamrl.messages import GroupInfo, GroupLease, GroupOutcome, find_replayed_uid

TOKENS_PER_INCARNATION = 1 << 40
"""Lease tokens available to one incarnation of a shard."""
MAX_SEEN_UIDS = 100_000
"""Latest uids that a shard remembers, so that a retried admission inserts no prompt twice."""


@dataclass(frozen=True)
class RecordLocation:
    """Place of a record on disk: journal folder and position in its segments."""

    folder: Path
    position: RecordPosition


@dataclass(eq=False)
class StageColumns:
    """Columns of one group committed by one stage.

    `data` is the blob or its reference in the object store; None if it is only on disk. `location`
    is the journal record with the blob, for columns recovered from a journal.
    """

    column_names: tuple[str, ...]
    num_bytes: int
    data: Any = None
    location: RecordLocation | None = None


def read_blob(columns: StageColumns) -> Blob:
    assert columns.location is not None, "only recovered columns are on disk"
    return read_record(columns.location.folder, columns.location.position).payload


@dataclass(eq=False)
class ActiveLease:
    """A lease that has neither ended nor expired; renewals move `expires_at` (s, shard's clock).

    `grown_at`: time at which the holder last saved longer partial rollouts, if ever.
    """

    lease: GroupLease
    expires_at: float
    request_id: str = ""
    grown_at: float | None = None

    @property
    def progress_at(self) -> float:
        return self.lease.granted_at if self.grown_at is None else self.grown_at


@dataclass(eq=False)
class GroupState:
    """State of one group in its queue shard.

    `committing_stages`: stages with a commit that is being journaled.
    `failures`: number of failed attempts per stage.
    `partial_rollouts`: partial results per stage, in memory only.
    `num_bytes`: size of the committed columns and the partial results.
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
    leases: dict[str, ActiveLease] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    committing_stages: set[str] = field(default_factory=set)
    outcome: GroupOutcome | None = None
    num_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def is_on_disk(self) -> bool:
        """True if all columns of the group were recovered from a journal, which still has them."""
        return bool(self.stage_columns) and all(
            columns.location is not None for columns in self.stage_columns.values()
        )

    def clear_progress(self) -> None:
        """Discard the group's columns, partial rollouts and leases."""
        self.stage_columns.clear()
        self.partial_rollouts.clear()
        self.column_names.clear()
        self.leases.clear()
        self.num_bytes = 0

    def save_partial(self, stage: str, columns: StageColumns) -> None:
        self.drop_partial(stage)
        self.partial_rollouts[stage] = columns
        self.num_bytes += columns.num_bytes

    def count_partial_bytes(self, stage: str) -> int:
        return self.partial_rollouts[stage].num_bytes if stage in self.partial_rollouts else 0

    def drop_partial(self, stage: str) -> None:
        if stage in self.partial_rollouts:
            self.num_bytes -= self.partial_rollouts.pop(stage).num_bytes

    def find_lease(self, stage: str, token: int) -> ActiveLease | None:
        active = self.leases.get(stage)
        return active if active and active.lease.token == token else None


class ReadyQueue:
    """Groups of a shard that are ready for one stage, in the order of their admission."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupState] = {}
        self._orders: list[int] = []

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, group: GroupState) -> bool:
        return group.admission_order in self._groups

    def add_group(self, group: GroupState) -> None:
        self._groups[group.admission_order] = group
        bisect.insort(self._orders, group.admission_order)

    def remove_group(self, group: GroupState) -> None:
        del self._groups[group.admission_order]
        del self._orders[bisect.bisect_left(self._orders, group.admission_order)]

    def update_groups(
        self, groups: Iterable[GroupState], is_ready: Callable[[GroupState], bool]
    ) -> bool:
        """Add those of `groups` that are ready now and remove those that are not.

        Returns True if the length of the queue changed.
        """
        before = len(self)
        for group in groups:
            if is_ready(group) != (group in self):
                (self.remove_group if group in self else self.add_group)(group)
        return len(self) != before

    def peek_groups(self, count: int) -> list[GroupState]:
        return [self._groups[order] for order in self._orders[:count]]


def make_admit_record(uid: str, prompt: bytes, version: int) -> JournalRecord:
    return JournalRecord(
        {"kind": "admit", "uid": uid, "version": _validate_version(version)}, prompt
    )


def make_lease_record(
    stage: str, holder: str, *, request: str, grants: Sequence[tuple[str, int, int]]
) -> JournalRecord:
    """Build the journal record of leases. grants: (uid, lease token, attempt) of each."""
    meta = {"kind": "lease", "stage": stage, "holder": holder, "request": request}
    return JournalRecord({**meta, "grants": list(grants)})


def make_commit_record(
    uid: str,
    stage: str,
    blob: Blob,
    *,
    names: Iterable[str],
    info: GroupInfo | None,
    version: int,
) -> JournalRecord:
    """Build the journal record of a commit of columns, which are encoded in `blob`.

    names: names of the columns.
    info: sizes of the group; None before its rollouts exist.
    version: policy version in training at the time of the commit.
    """
    meta = {"kind": "put", "uid": uid, "stage": stage, "version": version}
    return JournalRecord({**meta, "names": tuple(names), "info": info}, blob)


def make_nack_record(lease: GroupLease, *, failed: bool) -> JournalRecord:
    """Build the journal record that ends a lease without a commit; `failed` counts an attempt."""
    meta = {"kind": "back", "uid": lease.uid, "stage": lease.stage, "token": lease.token}
    return JournalRecord({**meta, "failed": failed})


def make_finish_record(uid: str, outcome: GroupOutcome) -> JournalRecord:
    """Build the journal record of a group that is filtered or dropped, but not yet removed."""
    return JournalRecord({"kind": "end", "uid": uid, **asdict(outcome)})


def make_remove_record(
    uids: Sequence[str], version: int, keep: Sequence[str] | None = None
) -> JournalRecord:
    """Build the journal record of groups that leave the shard: trained, filtered or dropped.

    version: policy version in training from now on. keep: all groups, of these or earlier ones,
    whose columns the shard keeps for replays; None: as before. Raises ContractError for an invalid
    version.
    """
    meta = {"kind": "leave", "uids": list(uids), "version": _validate_version(version)}
    return JournalRecord(meta if keep is None else {**meta, "keep": list(keep)})


def make_open_record(session: str, incarnation: int, *, forgets: bool = False) -> JournalRecord:
    """Build the journal record of a process that takes the shard over, a new incarnation.

    `session` identifies the run. `forgets` is true if the process found a damaged journal and
    discarded results computed from lost columns (`ShardState.forget_incomplete`). A later replay
    must discard them at this point, too.
    """
    meta = {"kind": "open", "session": session, "incarnation": incarnation}
    return JournalRecord({**meta, "forgets": forgets})


def make_seal_record() -> JournalRecord:
    """Build the record that ends a snapshot; a snapshot without this record is truncated."""
    return JournalRecord({"kind": "seal"})


def _validate_version(version: object) -> int:
    # Every restart applies the journal, so an invalid record would break the shard for good.
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ContractError(f"version {version!r}: must be a whole number, 0 or more")
    return version


class ShardState:
    """All groups of a shard by uid, and the location of the columns of removed ("retired") groups.

    `kept_groups` have left, too, but a replay may take their columns, which are in memory.
    `retired_groups` covers only groups recovered from the journal: their training step may be
    replayed.
    `incarnation` counts the processes that owned the shard; `session` is the run of the last owner.
    `is_damaged` is true if records of the journal were unreadable.
    A uid is admitted at most once per session, as long as it is among the last MAX_SEEN_UIDS uids.
    """

    def __init__(self, stages: Mapping[str, StageSchema]) -> None:
        self.stages = stages
        self._required_columns = {stage: frozenset(ports.needs) for stage, ports in stages.items()}
        self._num_producers = sum(bool(ports.produces) for ports in stages.values())
        self.last_stage = next(s for s, ports in stages.items() if not ports.produces)
        self.groups: dict[str, GroupState] = {}
        self._seen_uids: OrderedDict[str, None] = OrderedDict()
        self.kept_groups: dict[str, GroupState] = {}
        self.kept_bytes = 0
        self.retired_groups: dict[str, dict[str, StageColumns]] = {}
        self.version = 0
        self.incarnation = 0
        self.session = ""
        self.clock: Callable[[], float] = float
        self.lease_s = 0.0
        self.is_sealed = False
        self.is_damaged = False
        self._next_order = 0
        self._handlers: Mapping[str, Callable[[JournalRecord], list[GroupState]]] = {
            "open": self._apply_open,
            "admit": self._apply_admit,
            "lease": self._apply_lease,
            "back": self._apply_nack,
            "end": self._apply_finish,
            "leave": self._apply_remove,
            "seal": self._apply_seal,
        }

    def apply_record(
        self, record: JournalRecord, *, location: RecordLocation | None = None, data: Any = None
    ) -> list[GroupState]:
        """Change the state as a journal record says; return the changed groups.

        location: segment and offset of the record on disk, during recovery.
        data: blob of a commit, or its reference in the object store.

        Records of removed groups have no effect.
        """
        if record.meta["kind"] == "put":
            return self._apply_commit(record, data, location)
        return self._handlers[record.meta["kind"]](record)

    def has_seen(self, uid: str) -> bool:
        """Return True if a uid was admitted in this session, even if its group is gone by now."""
        return uid in self.groups or uid in self._seen_uids

    def is_unfinished(self, lease: GroupLease) -> bool:
        """Return True if the group of a lease has not ended; the lease may be lost."""
        group = self.groups.get(lease.uid)
        return group is not None and group.outcome is None

    def find_leased_group(self, lease: GroupLease) -> GroupState | None:
        """Return the group of a lease, or None if the lease is not active."""
        found = self.find_active(lease)
        return found[0] if found else None

    def find_active(self, lease: GroupLease) -> tuple[GroupState, ActiveLease] | None:
        """Return the group and the state of an active lease; None if it is not active."""
        group = self.groups.get(lease.uid)
        active = group.find_lease(lease.stage, lease.token) if group else None
        return (group, active) if group and active else None

    def is_ready(self, group: GroupState, stage: str) -> bool:
        """Return True if a stage may lease the group now.

        The group has all columns that the stage needs, and the stage has neither leased nor
        committed it. Filtered and dropped groups are ready for the last stage only.
        """
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
        """Return True if no stage will add columns: all have committed, or the group has ended."""
        return group.outcome is not None or len(group.stage_columns) == self._num_producers

    def _apply_open(self, record: JournalRecord) -> list[GroupState]:
        """Begin a new incarnation; if it belongs to a different run, void all leases."""
        self.incarnation = record.meta["incarnation"]
        if record.meta.get("forgets"):
            self.forget_incomplete()
        if self.session != record.meta["session"]:
            self.session = record.meta["session"]
            self._seen_uids.clear()
            for group in self.groups.values():
                group.leases.clear()
        return []

    def _apply_seal(self, record: JournalRecord) -> list[GroupState]:
        self.is_sealed = True
        return []

    def _apply_admit(self, record: JournalRecord) -> list[GroupState]:
        uid, version = record.meta["uid"], record.meta["version"]
        group = GroupState(
            uid, join_pieces(record.payload), version, self.clock(), self._next_order
        )
        self._next_order += 1
        self.version = max(self.version, version)
        self._copy_kept_columns(group)
        self.groups[uid] = group
        self._seen_uids[uid] = None
        if len(self._seen_uids) > MAX_SEEN_UIDS:
            self._seen_uids.popitem(last=False)
        return [group]

    def _copy_kept_columns(self, group: GroupState) -> None:
        """Give a replay the columns of its group; without them its prompt is sampled anew."""
        kept = self.kept_groups.get(find_replayed_uid(group.uid) or "")
        if kept and kept.column_names >= self._required_columns[self.last_stage]:
            group.stage_columns.update(kept.stage_columns)
            group.column_names |= kept.column_names
            group.info, group.num_bytes = kept.info, kept.num_bytes
            group.ready_version = self.version

    def _apply_lease(self, record: JournalRecord) -> list[GroupState]:
        stage, holder, now = record.meta["stage"], record.meta["holder"], self.clock()
        # Leases of the last stage never expire: the coordinator holds them until removal.
        expires_at = math.inf if stage == self.last_stage else now + self.lease_s
        changed = []
        for uid, token, attempt in record.meta["grants"]:
            # Tokens stay unique even if the "open" record of this incarnation is damaged.
            self.incarnation = max(self.incarnation, token // TOKENS_PER_INCARNATION)
            group = self.groups.get(uid)
            if group is not None:
                lease = GroupLease(token, uid, stage, attempt, expires_at, holder, now)
                active = ActiveLease(lease, expires_at, record.meta["request"])
                group.leases[stage] = active
                changed.append(group)
        return changed

    def _apply_commit(
        self, record: JournalRecord, data: Any, location: RecordLocation | None
    ) -> list[GroupState]:
        meta = record.meta
        group = self.groups.get(meta["uid"])
        if group is None or group.outcome is not None:
            return []
        info = msgspec.convert(meta["info"], GroupInfo | None)
        # Scoring adds the pass rate; a concurrent commit of another stage does not know it.
        if group.info is None or (info is not None and info.pass_rate is not None):
            group.info = info
        num_bytes = count_blob_bytes(record.payload)
        columns = StageColumns(tuple(meta["names"]), num_bytes, data, location)
        group.drop_partial(meta["stage"])
        group.stage_columns[meta["stage"]] = columns
        group.num_bytes += columns.num_bytes
        group.column_names.update(meta["names"])
        group.leases.pop(meta["stage"], None)
        self.version = max(self.version, meta["version"])
        if group.ready_version is None and self.is_ready(group, self.last_stage):
            group.ready_version = meta["version"]
        return [group]

    def _apply_nack(self, record: JournalRecord) -> list[GroupState]:
        stage = record.meta["stage"]
        group = self.groups.get(record.meta["uid"])
        if group is None:
            return []
        if group.find_lease(stage, record.meta["token"]):
            del group.leases[stage]
        group.failures[stage] += record.meta["failed"]
        return [group]

    def _apply_finish(self, record: JournalRecord) -> list[GroupState]:
        group = self.groups.get(record.meta["uid"])
        if group is None or group.outcome is not None:
            return []
        names = ("cause", "reason", "filtered")
        facts = {name: record.meta[name] for name in names}
        # Journals of earlier versions have no pass rates.
        group.outcome = GroupOutcome(**facts, pass_rate=record.meta.get("pass_rate"))
        group.clear_progress()
        return [group]

    def _apply_remove(self, record: JournalRecord) -> list[GroupState]:
        self.version = max(self.version, record.meta["version"])
        removed = [self.groups.pop(uid) for uid in record.meta["uids"] if uid in self.groups]
        for group in removed:
            if group.is_on_disk:
                self.retired_groups[group.uid] = {
                    stage: replace(columns, data=None)
                    for stage, columns in group.stage_columns.items()
                }
        if (keep := record.meta.get("keep")) is not None:
            known = self.kept_groups | {group.uid: group for group in removed}
            self.kept_groups = {uid: known[uid] for uid in keep if uid in known}
            self.kept_bytes = sum(group.num_bytes for group in self.kept_groups.values())
        return removed

    def order_by_version(self) -> None:
        """Renumber the groups, so that their order of admission follows the admitted version."""
        groups = sorted(
            self.groups.values(), key=lambda group: (group.admitted_version, group.admission_order)
        )
        for order, group in enumerate(groups):
            group.admission_order = order

    def forget_incomplete(self) -> None:
        """Discard results that were computed from columns lost in a damaged journal."""
        for group in self.groups.values():
            stages = {*group.stage_columns, *group.leases} if group.outcome is None else set()
            if any(not set(self.stages[stage].needs) <= group.column_names for stage in stages):
                group.clear_progress()
                group.info = group.ready_version = None
