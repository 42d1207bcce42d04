"""Run log: the ledger of a run and the log from which a crashed run recovers.

The log records every admission, every end of a group and every training step, a step with its
micro-batches in order, so that the step can be replayed exactly. The log is never truncated, and so
holds the history of every uid.
"""

import contextlib
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from streamrl.buffer.encoding import join_pieces
from streamrl.buffer.journal import (
    CorruptRecord,
    JournalRecord,
    RecordLog,
    check_first_segment,
    list_segments,
    replay_segments,
)
from streamrl.buffer.micro_batch_schedule import Round, StepSchedule
from streamrl.errors import JournalError, LedgerError
from streamrl.messages import GroupInfo, GroupOutcome, find_replayed_uid, parse_uid


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
        """Numbers of groups by epoch of their row and outcome, without replays."""
        outcomes = ("trained", "filtered", "dropped", "in_flight")
        counted = {
            name: Counter(parse_uid(u)[0] for u in getattr(self, name) if not find_replayed_uid(u))
            for name in outcomes
        }
        epochs = sorted(set().union(*counted.values()))
        return {epoch: {name: counted[name][epoch] for name in outcomes} for epoch in epochs}

    @property
    def problems(self) -> list[str]:
        """Describe each uid that was not admitted exactly once, or that ended more than once."""
        return [
            f"{uid}: admitted {self.admitted[uid]} times, {', '.join(self.outcomes.get(uid, ()))}"
            for uid in {**self.admitted, **self.outcomes}
            if self.admitted[uid] != 1 or len(self.outcomes.get(uid, ())) > 1
        ]


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


_EncodedSchedule = list[list[list[list[tuple[int, int]]]]]
"""Per update, round and rank: rollouts as (index of the group in the step, index in the group)."""
_EncodedStep = tuple[list[tuple[int, GroupInfo]], dict[str, tuple[int, _EncodedSchedule]]]
_decode_step = msgspec.json.Decoder(_EncodedStep).decode
MAX_STEP_BYTES = 1 << 30
"""Limit for decompressing a step (about 20 bytes per rollout), against a malicious log."""


@dataclass(frozen=True)
class TrainedGroup:
    """A group that a training step trained.

    ready_version: version that was in training when the group became ready.
    """

    uid: str
    info: GroupInfo
    ready_version: int


@dataclass(frozen=True)
class TrainedStep:
    """A finished training step: version in training, groups, and rounds in order.

    schedules: the rounds of each trained model, by role.
    """

    version: int
    groups: tuple[TrainedGroup, ...]
    schedules: Mapping[str, StepSchedule]

    @property
    def pass_rates(self) -> dict[str, float | None]:
        """Pass rates by uid, without replays, which an older policy sampled."""
        return {g.uid: g.info.pass_rate for g in self.groups if not find_replayed_uid(g.uid)}

    @property
    def infos(self) -> dict[str, GroupInfo]:
        return {group.uid: group.info for group in self.groups}

    def to_record(self) -> JournalRecord:
        """Encode the training step as a journal record: uids in JSON, the schedules compressed."""
        group_indices = {group.uid: i for i, group in enumerate(self.groups)}
        schedules = {
            role: (schedule.num_epochs, _encode_schedule(schedule, group_indices))
            for role, schedule in self.schedules.items()
        }
        groups = [(group.ready_version, group.info) for group in self.groups]
        packed = zlib.compress(msgspec.json.encode((groups, schedules)))
        return _make_record("step", packed, version=self.version, uids=list(group_indices))

    @classmethod
    def from_record(cls, record: JournalRecord) -> "TrainedStep":
        uids = record.meta["uids"]
        groups, schedules = _decode_step(_decompress_step(join_pieces(record.payload)))
        return cls(
            version=record.meta["version"],
            groups=tuple(
                TrainedGroup(uid, info, ready)
                for uid, (ready, info) in zip(uids, groups, strict=True)
            ),
            schedules={
                role: StepSchedule(
                    tuple(_decode_rounds(rounds, uids) for rounds in updates), epochs
                )
                for role, (epochs, updates) in schedules.items()
            },
        )


def _decompress_step(data: bytes) -> bytes:
    """Decompress an encoded step. Raises ValueError beyond MAX_STEP_BYTES."""
    decompressor = zlib.decompressobj()
    step = decompressor.decompress(data, MAX_STEP_BYTES)
    if decompressor.unconsumed_tail or not decompressor.eof:
        raise ValueError("a step that is truncated, or larger than any step can be")
    return step


def _encode_schedule(schedule: StepSchedule, group_indices: Mapping[str, int]) -> _EncodedSchedule:
    """Encode a schedule for the run log; uids become indices of groups in the training step."""
    return [
        [
            [[(group_indices[uid], index) for uid, index in picks] for picks in micro_batches]
            for micro_batches in rounds
        ]
        for rounds in schedule.update_rounds
    ]


def _decode_rounds(
    rounds: list[list[list[tuple[int, int]]]], uids: Sequence[str]
) -> tuple[Round, ...]:
    return tuple(
        tuple(tuple((uids[i], index) for i, index in picks) for picks in micro_batches)
        for micro_batches in rounds
    )


def _make_record(kind: str, payload: bytes = b"", **facts: Any) -> JournalRecord:
    return JournalRecord({"kind": kind, "time": time.time(), **facts}, payload)


@dataclass
class RunLog:
    """Ledger of a run with its durable log. Every change is logged before it takes effect.

    steps_to_replay: by version, the steps that a predecessor of this process trained after its last
    checkpoint; this process trains them again with the same schedules.
    """

    ledger: Ledger
    record_log: RecordLog
    steps_to_replay: dict[int, TrainedStep] = field(default_factory=dict)

    async def record_start(self, version: int) -> None:
        """Log that a process starts the run, or takes the run over, at `version`."""
        await self.record_log.append([_make_record("open", version=version)])

    async def record_admissions(self, uids: Sequence[str], version: int) -> None:
        """Log the admission of prompts at `version` and mark them as in flight."""
        for uid in uids:
            self.ledger.mark_admitted(uid, version)
        await self.record_log.append([_make_record("admit", version=version, uids=list(uids))])

    async def record_step(self, step: TrainedStep) -> None:
        """Log a training step and mark its groups as trained; skip a replayed step."""
        if self.steps_to_replay.pop(step.version, None) is None:
            await self.record_log.append([step.to_record()])
            for group in step.groups:
                self.ledger.mark_trained(group.uid)

    async def record_finished(
        self, ended: Mapping[str, GroupOutcome], *, readmitted: Sequence[str] = (), version: int = 0
    ) -> None:
        """Log groups that were filtered or dropped, and the readmission of some of their prompts.

        ended: outcome of each group, by uid.
        readmitted: new uids of the readmitted prompts.
        version: announced policy version, at which the prompts are readmitted.

        One append for both: a crash cannot separate the end of a group from its readmission.
        """
        records = [
            _make_record("end", uid=uid, version=version, **asdict(outcome))
            for uid, outcome in ended.items()
        ]
        if readmitted:
            records.append(_make_record("admit", version=version, uids=list(readmitted)))
        await self.record_log.append(records)
        for uid, outcome in ended.items():
            _mark_finished(self.ledger, uid, outcome)
        for uid in readmitted:
            self.ledger.mark_admitted(uid, version)


def _mark_finished(ledger: Ledger, uid: str, outcome: GroupOutcome) -> None:
    if outcome.filtered:
        ledger.mark_filtered(uid)
    else:
        ledger.mark_dropped(uid, outcome.cause)


@dataclass(frozen=True)
class StreamEvent:
    """Prompts drawn from the data at a version, or pass rates of groups that ended at it.

    pass_rates: by uid; None for a group without one. trained: groups of a training step.
    """

    version: int
    drawn_uids: tuple[str, ...] = ()
    pass_rates: Mapping[str, float | None] = field(default_factory=dict)
    trained: Mapping[str, GroupInfo] = field(default_factory=dict)


@dataclass(frozen=True)
class RecoveredRunLog:
    """State of a run, recovered from its checkpoint and run log.

    ledger: includes all changes up to the end of the log.
    steps_to_replay: by version, the steps trained since the checkpoint.
    stream_events: what the stream of prompts learned and yielded since the checkpoint, in order.
    """

    ledger: Ledger
    steps_to_replay: dict[int, TrainedStep]
    stream_events: tuple[StreamEvent, ...]

    @property
    def drawn_uids(self) -> tuple[str, ...]:
        """Prompts drawn from the data since the checkpoint."""
        return tuple(uid for event in self.stream_events for uid in event.drawn_uids)


def recover_run_log(
    records: Iterable[JournalRecord], state: Mapping[str, Any] | None
) -> RecoveredRunLog:
    """Rebuild the ledger from a checkpoint and the run log written since the checkpoint.

    state: the checkpoint's `Ledger.state_dict`, None without a checkpoint. Raises LedgerError if
    log and checkpoint contradict each other, JournalError for an invalid log entry.
    """
    ledger = Ledger() if state is None else Ledger.from_state(state)
    steps: dict[int, TrainedStep] = {}
    events: list[StreamEvent] = []
    for record in records:
        meta = record.meta
        with _wrap_entry_errors():
            _apply_entry(ledger, meta)
            if meta["kind"] == "admit":
                drawn = tuple(uid for uid in meta["uids"] if parse_uid(uid)[2] == 0)
                events.append(StreamEvent(meta["version"], drawn))
            elif meta["kind"] == "end" and meta.get("pass_rate") is not None:
                rates = {meta["uid"]: meta["pass_rate"]}
                events.append(StreamEvent(meta["version"], pass_rates=rates))
            elif meta["kind"] == "step":
                step = TrainedStep.from_record(record)
                steps[step.version] = step
                events.append(StreamEvent(step.version, (), step.pass_rates, step.infos))
    return RecoveredRunLog(ledger, steps, tuple(events))


@contextlib.contextmanager
def _wrap_entry_errors() -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise JournalError(f"run log: an entry cannot be used: {error!r}") from error


def _apply_entry(ledger: Ledger, meta: Mapping[str, Any]) -> None:
    """Apply an entry of a run log to the ledger. Raises LedgerError if they contradict."""
    if meta["kind"] == "admit":
        for uid in meta["uids"]:
            ledger.mark_admitted(uid, meta["version"])
    elif meta["kind"] == "step":
        for uid in meta["uids"]:
            ledger.mark_trained(uid)
    elif meta["kind"] == "end":
        outcome = GroupOutcome(meta["cause"], meta["reason"], meta["filtered"])
        _mark_finished(ledger, meta["uid"], outcome)


def check_checkpoint(folder: Path, state: Mapping[str, Any], *, cut: int) -> None:
    """Compare the ledger and the version of a checkpoint with the run log before its cut.

    state: contents of the checkpoint's state.json. Raises LedgerError if they differ. Does nothing
    if the log lacks its first segment: a fork begins with a checkpoint.
    """
    if list_segments(folder)[:1] != [1]:
        return
    ledger, version = Ledger(), 0
    for record in read_log(folder, before=cut):
        with _wrap_entry_errors():
            _apply_entry(ledger, record.meta)
            if record.meta["kind"] == "step":
                version = record.meta["version"] + 1
    saved = Ledger.from_state(state["ledger"])
    if (version, ledger.state_dict()) != (state["version"], saved.state_dict()):
        raise LedgerError(
            f"state.json does not match {folder}: version {state['version']}, {saved.counts} there,"
            f" version {version}, {ledger.counts} here; with run.name=NEW the checkpoint alone is"
            " resumed"
        )


def read_history(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield every run log entry in order: kind, time (Unix time, s), version or cause, uids."""
    for record in read_log(folder):
        yield record.meta


def read_log(folder: Path, *, first: int = 0, before: int | None = None) -> Iterator[JournalRecord]:
    """Yield the records of a run log in order, from segments with first <= number < before.

    Raises JournalError naming a damaged record.
    """
    check_first_segment(folder, first)
    for item in replay_segments(folder, first=first, before=before):
        if isinstance(item, CorruptRecord):
            raise JournalError(f"{item.file}, byte {item.position.offset}: {item.reason}")
        yield item[1]
