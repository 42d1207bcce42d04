"""Run log: the ledger of a run and the log from which a crashed run recovers.

The log records every admission, every end of a group and every training step, a step with its
micro-batches in order, so that the step can be replayed exactly. The log is never truncated, and so
holds the history of every uid.
"""

import contextlib
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from streamrl.buffer.encoding import join_pieces
from streamrl.buffer.journal import RecordLog
from streamrl.buffer.ledger import Ledger
from streamrl.buffer.micro_batch_schedule import Round, StepSchedule
from streamrl.buffer.segment_file import (
    CorruptRecord,
    JournalRecord,
    check_first_segment,
    list_segments,
    replay_segments,
)
from streamrl.buffer.step_assembler import TrainedGroup
from streamrl.errors import JournalError, LedgerError
from streamrl.messages import GroupInfo, GroupOutcome, parse_uid

_EncodedSchedule = list[list[list[list[tuple[int, int]]]]]
"""Per update, round and rank: rollouts as (index of the group in the step, index in the group)."""
_EncodedStep = tuple[list[tuple[int, GroupInfo]], dict[str, tuple[int, _EncodedSchedule]]]
_decode_step = msgspec.json.Decoder(_EncodedStep).decode
MAX_STEP_BYTES = 1 << 30
"""Limit for decompressing a step (about 20 bytes per rollout), against a malicious log."""


@dataclass(frozen=True)
class TrainedStep:
    """A finished training step: version in training, groups, and rounds in order.

    schedules: the rounds of each trained model, by role.
    """

    version: int
    groups: tuple[TrainedGroup, ...]
    schedules: Mapping[str, StepSchedule]

    def to_record(self) -> JournalRecord:
        """Encode the training step as a journal record: uids in JSON, the schedules compressed."""
        group_indices = {group.uid: i for i, group in enumerate(self.groups)}
        schedules = {
            role: (schedule.num_epochs, _encode_schedule(schedule, group_indices))
            for role, schedule in self.schedules.items()
        }
        groups = [(group.ready_version, group.info) for group in self.groups]
        packed = zlib.compress(msgspec.json.encode((groups, schedules)))
        entry = _make_entry("step", version=self.version, uids=list(group_indices))
        return JournalRecord(entry, packed)

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


def _make_entry(kind: str, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time.time(), **facts}


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
        await self.record_log.append([JournalRecord(_make_entry("open", version=version))])

    async def record_admissions(self, uids: Sequence[str], version: int) -> None:
        """Log the admission of prompts at `version` and mark them as in flight."""
        for uid in uids:
            self.ledger.mark_admitted(uid, version)
        await self.record_log.append(
            [JournalRecord(_make_entry("admit", version=version, uids=list(uids)))]
        )

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
        version: policy version at the readmission.

        One append for both: a crash cannot separate the end of a group from its readmission.
        """
        records = [
            JournalRecord(_make_entry("end", uid=uid, **asdict(outcome)))
            for uid, outcome in ended.items()
        ]
        if readmitted:
            records.append(
                JournalRecord(_make_entry("admit", version=version, uids=list(readmitted)))
            )
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
class RecoveredRunLog:
    """State of a run, recovered from its checkpoint and run log.

    ledger: includes all changes up to the end of the log.
    steps_to_replay: by version, the steps trained since the checkpoint.
    drawn_uids: prompts drawn from the data since the checkpoint.
    """

    ledger: Ledger
    steps_to_replay: dict[int, TrainedStep]
    drawn_uids: tuple[str, ...]


def recover_run_log(
    records: Iterable[JournalRecord], state: Mapping[str, Any] | None
) -> RecoveredRunLog:
    """Rebuild the ledger from a checkpoint and the run log written since the checkpoint.

    state: the checkpoint's `Ledger.state_dict`, None without a checkpoint. Raises LedgerError if
    log and checkpoint contradict each other, JournalError for an invalid log entry.
    """
    ledger = Ledger() if state is None else Ledger.from_state(state)
    steps: dict[int, TrainedStep] = {}
    drawn: list[str] = []
    for record in records:
        meta = record.meta
        with _wrap_entry_errors():
            _apply_entry(ledger, meta)
            if meta["kind"] == "admit":
                drawn += [uid for uid in meta["uids"] if parse_uid(uid)[2] == 0]
            elif meta["kind"] == "step":
                step = TrainedStep.from_record(record)
                steps[step.version] = step
    return RecoveredRunLog(ledger, steps, tuple(drawn))


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
        _mark_finished(ledger, meta["uid"], _parse_outcome(meta))


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


def _parse_outcome(meta: Mapping[str, Any]) -> GroupOutcome:
    return GroupOutcome(meta["cause"], meta["reason"], meta["filtered"])


def read_log(folder: Path, *, first: int = 0, before: int | None = None) -> Iterator[JournalRecord]:
    """Yield the records of a run log in order, from segments with first <= number < before.

    Raises JournalError naming a damaged record.
    """
    check_first_segment(folder, first)
    for item in replay_segments(folder, first=first, before=before):
        if isinstance(item, CorruptRecord):
            raise JournalError(f"{item.file}, byte {item.position.offset}: {item.reason}")
        yield item[1]
