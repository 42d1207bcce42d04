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

from streamrl.buffer.codec import Blob, join, size_of
from streamrl.buffer.config import Ports
from streamrl.buffer.log.segment_file import Position, Record
from streamrl.errors import ContractError
from streamrl.messages import Ended, GroupInfo, Lease

TOKENS_PER_INCARNATION = 1 << 40
"""Lease tokens that one process of a shard may give."""
REMEMBERED = 100_000
"""Admitted uids that are remembered, though they have left, lest a repeated call bring them back.
"""


@dataclass(frozen=True)
class Spot:
    """Where a record lies on the disk."""

    folder: Path
    position: Position


@dataclass(eq=False)
class Part:
    """What one stage has committed. `data` is the blob or what stands for it in the store."""

    names: tuple[str, ...]
    num_bytes: int
    data: Any = None
    spot: Spot | None = None


@dataclass(eq=False)
class Held:
    """A lease that is out, and the request it was given to."""

    lease: Lease
    expires_at: float
    request: str = ""


@dataclass(eq=False)
class Group:
    """One group as its shard holds it. `committing` are stages whose commit is being journaled.

    `begun` is what a holder of a stage has made so far, in memory alone. `num_bytes` are those of
    its columns, those of what is begun among them.
    """

    uid: str
    prompt: bytes
    admitted_version: int
    admitted_at: float
    order: int
    ready_version: int | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    begun: dict[str, Part] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    info: GroupInfo | None = None
    leases: dict[str, list[Held]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    committing: set[str] = field(default_factory=set)
    ended: Ended | None = None
    num_bytes: int = 0
    charge: int = 0

    @property
    def is_on_disk(self) -> bool:
        """Whether all its columns were found in a journal."""
        return bool(self.parts) and all(part.spot is not None for part in self.parts.values())

    def clear(self) -> None:
        """Forget what was made of it, and who is at work on it."""
        self.parts.clear()
        self.begun.clear()
        self.columns.clear()
        self.leases.clear()
        self.num_bytes = 0

    def keep_begun(self, stage: str, part: Part) -> None:
        """Have this in the place of what was begun in a stage before."""
        self.drop_begun(stage)
        self.begun[stage] = part
        self.num_bytes += part.num_bytes

    def drop_begun(self, stage: str) -> None:
        """The stage has its columns: what was begun of them is of no use any more."""
        if stage in self.begun:
            self.num_bytes -= self.begun.pop(stage).num_bytes

    def held(self, stage: str, token: int) -> Held | None:
        """The lease of a token, if it is still good."""
        for held in self.leases.get(stage, ()):
            if held.lease.token == token:
                return held
        return None

    def release(self, stage: str, token: int) -> None:
        """Take one lease back."""
        left = [held for held in self.leases.get(stage, ()) if held.lease.token != token]
        if left:
            self.leases[stage] = left
        else:
            self.leases.pop(stage, None)


class ReadyLine:
    """Groups that wait for one stage, in the order in which they were admitted."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._orders: list[int] = []

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, group: Group) -> bool:
        return group.order in self._groups

    def add(self, group: Group) -> None:
        """Take a place among the others."""
        self._groups[group.order] = group
        bisect.insort(self._orders, group.order)

    def remove(self, group: Group) -> None:
        """Leave the line, from wherever it stands."""
        del self._groups[group.order]
        del self._orders[bisect.bisect_left(self._orders, group.order)]

    def update(self, groups: Iterable[Group], is_ready: Callable[[Group], bool]) -> bool:
        """Have those of `groups` in line that are ready, and no others; whether it is longer now,
        or shorter."""
        before = len(self)
        for group in groups:
            if is_ready(group) != (group in self):
                (self.remove if group in self else self.add)(group)
        return len(self) != before

    def first(self, count: int) -> list[Group]:
        """At most so many from the head of the line; they stay in it."""
        return [self._groups[order] for order in self._orders[:count]]


def admitted(uid: str, prompt: bytes, version: int) -> Record:
    """A prompt came in. Raises ContractError for what is no version."""
    return Record({"kind": "admit", "uid": uid, "version": _checked(version)}, prompt)


def leased(
    stage: str, holder: str, *, request: str, grants: Sequence[tuple[str, int, int]]
) -> Record:
    """Work of one stage was handed to one holder: uid, token and attempt of each group."""
    meta = {"kind": "lease", "stage": stage, "holder": holder, "request": request}
    return Record({**meta, "grants": list(grants)})


def committed(
    lease: Lease, blob: Blob, *, names: Iterable[str], info: GroupInfo | None, version: int
) -> Record:
    """A stage's columns came in; `version` was being trained then. No `info` before rollouts."""
    meta = {
        "kind": "put",
        "uid": lease.uid,
        "stage": lease.stage,
        "version": version,
        "names": tuple(names),
        "info": info,
    }
    return Record(meta, blob)


def given_back(lease: Lease, *, failed: bool) -> Record:
    """Work came back undone; `failed` counts against its attempts."""
    meta = {"kind": "back", "uid": lease.uid, "stage": lease.stage, "token": lease.token}
    return Record({**meta, "failed": failed})


def ended(uid: str, how: Ended) -> Record:
    """The group will not be trained; the coordinator is yet to hear of it."""
    return Record({"kind": "end", "uid": uid, **asdict(how)})


def left(uids: Sequence[str], version: int) -> Record:
    """Groups left the queue: trained, or their end is on the books.

    Raises ContractError for what is no version.
    """
    return Record({"kind": "leave", "uids": list(uids), "version": _checked(version)})


def opened(session: str, incarnation: int, *, forgets: bool = False) -> Record:
    """A process took the shard over, the `incarnation`-th.

    `forgets` is whether it found a damaged journal, and took back what was computed from columns
    that are lost: who reads this journal again must do so at the same point.
    """
    meta = {"kind": "open", "session": session, "incarnation": incarnation}
    return Record({**meta, "forgets": forgets})


def sealed() -> Record:
    """A snapshot ends here: one without has lost its end."""
    return Record({"kind": "seal"})


def _checked(version: object) -> int:
    # Whatever is in the journal is applied at every restart: nothing may be there that cannot be.
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ContractError(f"version {version!r}: must be a whole number, 0 or more")
    return version


class GroupBook:
    """All groups of a shard by uid, and `retired`: where to find those that have left.

    Retired are the groups that a journal has, for their step may have to be made again; what came
    in since is not kept. `keeps_retired` is on while a journal is read.
    `incarnation` counts the processes that had the shard; `session` is the run of the last one.
    `is_damaged` is whether records of the journal could not be read.
    A uid comes in once in a session, the latest REMEMBERED at least.
    """

    def __init__(self, stages: Mapping[str, Ports]) -> None:
        self.stages = stages
        self._needs = {stage: frozenset(ports.needs) for stage, ports in stages.items()}
        self._num_makers = sum(bool(ports.produces) for ports in stages.values())
        self.last_stage = next(s for s, ports in stages.items() if not ports.produces)
        self.groups: dict[str, Group] = {}
        self._admitted: OrderedDict[str, None] = OrderedDict()
        self.retired: dict[str, dict[str, Part]] = {}
        self.keeps_retired = False
        self.version = 0
        self.incarnation = 0
        self.session = ""
        self.now: Callable[[], float] = float
        self.lease_s = 0.0
        self.is_sealed = False
        self.is_damaged = False
        self._order = 0
        self._excused: OrderedDict[int, None] = OrderedDict()
        self._apply = {
            "open": self._open,
            "admit": self._admit,
            "lease": self._lease,
            "put": self._put,
            "back": self._back,
            "end": self._end,
            "leave": self._leave,
            "seal": self._seal,
        }

    def apply(self, record: Record, *, spot: Spot | None = None, data: Any = None) -> list[Group]:
        """Do what a record says; returns the groups it changed. What is unknown is passed over:
        a lease or a commit of a group that has left since."""
        return self._apply[record.meta["kind"]](record, spot, data)

    def has_had(self, uid: str) -> bool:
        """Whether the group is here, or has come and gone in this session."""
        return uid in self.groups or uid in self._admitted

    def excuses(self, lease: Lease) -> bool:
        """Whether it took no fault for the work under a lease to become useless; told once."""
        return self._excused.pop(lease.token, lease) is None

    def excuse(self, leases: Iterable[Held]) -> None:
        """Work under these leases is of no use any more, and whoever has them is not to blame."""
        self._excused.update((held.lease.token, None) for held in leases)
        while len(self._excused) > REMEMBERED:
            self._excused.popitem(last=False)

    def _excuse_all(self, group: Group) -> None:
        """The group ends or leaves while some may be at work on it."""
        for stage, held in group.leases.items():
            if stage != self.last_stage:
                self.excuse(held)

    def leased(self, lease: Lease) -> Group | None:
        """The group of a lease, if it is still good."""
        group = self.groups.get(lease.uid)
        return group if group and group.held(lease.stage, lease.token) else None

    def is_ready(self, group: Group, stage: str) -> bool:
        """Whether a stage may take the group. The last one is handed those that ended, too."""
        is_taken = stage in group.leases or stage in group.parts or stage in group.committing
        if is_taken or group.uid not in self.groups:
            return False
        if group.ended is not None:
            return stage == self.last_stage
        return group.columns >= self._needs[stage]

    def is_whole(self, group: Group) -> bool:
        """Whether no stage will add columns to it any more."""
        return group.ended is not None or len(group.parts) == self._num_makers

    def _open(self, record: Record, spot: Spot | None, data: Any) -> list[Group]:
        self.incarnation = record.meta["incarnation"]
        if record.meta.get("forgets"):
            self.forget_incomplete()
        if self.session != record.meta["session"]:
            self.session = record.meta["session"]
            self._admitted.clear()
            for group in self.groups.values():
                group.leases.clear()
        return []

    def _seal(self, record: Record, spot: Spot | None, data: Any) -> list[Group]:
        self.is_sealed = True
        return []

    def _admit(self, record: Record, spot: Spot | None, data: Any) -> list[Group]:
        uid, version = record.meta["uid"], record.meta["version"]
        group = Group(uid, join(record.payload), version, self.now(), self._order)
        self._order += 1
        self.version = max(self.version, version)
        self.groups[uid] = group
        self._admitted[uid] = None
        if len(self._admitted) > REMEMBERED:
            self._admitted.popitem(last=False)
        return [group]

    def _lease(self, record: Record, spot: Spot | None, data: Any) -> list[Group]:
        stage, holder, now = record.meta["stage"], record.meta["holder"], self.now()
        # The coordinator's leases last until its groups leave: it does not work on them itself.
        until = math.inf if stage == self.last_stage else now + self.lease_s
        changed = []
        for uid, token, attempt in record.meta["grants"]:
            # Also if the record that says so is damaged: no token is given twice.
            self.incarnation = max(self.incarnation, token // TOKENS_PER_INCARNATION)
            group = self.groups.get(uid)
            if group is not None:
                lease = Lease(token, uid, stage, attempt, until, holder, now)
                held = Held(lease, until, record.meta["request"])
                group.leases.setdefault(stage, []).append(held)
                changed.append(group)
        return changed

    def _put(self, record: Record, spot: Spot | None, data: Any) -> list[Group]:
        meta = record.meta
        group = self.groups.get(meta["uid"])
        if group is None or group.ended is not None:
            return []
        group.info = group.info or msgspec.convert(meta["info"], GroupInfo | None)
        part = Part(tuple(meta["names"]), size_of(record.payload), data, spot)
        group.drop_begun(meta["stage"])
        group.parts[meta["stage"]] = part
        group.num_bytes += part.num_bytes
        group.columns.update(meta["names"])
        group.leases.pop(meta["stage"], None)
        self.version = max(self.version, meta["version"])
        if group.ready_version is None and self.is_ready(group, self.last_stage):
            group.ready_version = meta["version"]
        return [group]

    def _back(self, record: Record, spot: Spot | None, data: Any) -> list[Group]:
        stage = record.meta["stage"]
        group = self.groups.get(record.meta["uid"])
        if group is None:
            return []
        group.release(stage, record.meta["token"])
        group.failures[stage] += record.meta["failed"]
        return [group]

    def _end(self, record: Record, spot: Spot | None, data: Any) -> list[Group]:
        group = self.groups.get(record.meta["uid"])
        if group is None or group.ended is not None:
            return []
        names = ("cause", "reason", "filtered")
        group.ended = Ended(**{name: record.meta[name] for name in names})
        self._excuse_all(group)
        group.clear()
        return [group]

    def _leave(self, record: Record, spot: Spot | None, data: Any) -> list[Group]:
        self.version = max(self.version, record.meta["version"])
        found = [self.groups.pop(uid) for uid in record.meta["uids"] if uid in self.groups]
        for group in found:
            self._excuse_all(group)
            if self.keeps_retired or group.is_on_disk:
                self.retired[group.uid] = {s: _shed(p) for s, p in group.parts.items()}
        return found

    def order_by_version(self) -> None:
        """Have groups of an earlier version stand before the others, as they were admitted."""
        groups = sorted(self.groups.values(), key=lambda one: (one.admitted_version, one.order))
        for place, group in enumerate(groups):
            group.order = place

    def forget_incomplete(self) -> None:
        """Take back what was computed from columns that a damaged journal has lost."""
        for group in self.groups.values():
            stages = {*group.parts, *group.leases} if group.ended is None else set()
            if any(not set(self.stages[stage].needs) <= group.columns for stage in stages):
                group.clear()
                group.info = group.ready_version = None


def _shed(part: Part) -> Part:
    """A part without its columns in memory, if the disk has them."""
    return part if part.spot is None else replace(part, data=None)
