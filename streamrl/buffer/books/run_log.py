"""The books of a run: the ledger, and the log from which a crash is made good.

The log holds every admission, every end and every step that was made, the latter with all it takes
to make it again: the micro-batches in their order. It is never cut, so that it also tells the
history of a uid.
"""

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from streamrl.buffer.assembly.micro_batch_schedule import StepSchedule
from streamrl.buffer.assembly.packing import Round
from streamrl.buffer.books.ledger import Ledger
from streamrl.buffer.codec import join_pieces
from streamrl.buffer.log.journal import RecordLog
from streamrl.buffer.log.segment_file import (
    CorruptRecord,
    JournalRecord,
    check_first_segment,
    replay_segments,
)
from streamrl.errors import JournalError
from streamrl.messages import GroupInfo, GroupOutcome, parse_uid

_EncodedSchedule = list[list[list[list[tuple[int, int]]]]]
"""Of a program: per update, round and rank the rollouts, as place of the group and index."""
_EncodedStep = tuple[list[tuple[int, GroupInfo]], dict[str, tuple[int, _EncodedSchedule]]]
_decode_step = msgspec.json.Decoder(_EncodedStep).decode
MAX_STEP_BYTES = 1 << 30
"""Most of a step in the log, which has some 20 bytes a rollout."""


@dataclass(frozen=True)
class TrainedGroup:
    """A group as a step trained it. `ready_version` was being trained when it became ready."""

    uid: str
    info: GroupInfo
    ready_version: int


@dataclass(frozen=True)
class TrainedStep:
    """The step of `version` as it was made, `schedules` by the role that is trained."""

    version: int
    groups: tuple[TrainedGroup, ...]
    schedules: Mapping[str, StepSchedule]

    def to_record(self) -> JournalRecord:
        """As the log has it: the uids in plain sight, the rest packed."""
        places = {group.uid: i for i, group in enumerate(self.groups)}
        programs = {
            role: (program.num_epochs, _encode_schedule(program, places))
            for role, program in self.schedules.items()
        }
        groups = [(group.ready_version, group.info) for group in self.groups]
        packed = zlib.compress(msgspec.json.encode((groups, programs)))
        return JournalRecord(_make_entry("step", version=self.version, uids=list(places)), packed)

    @classmethod
    def from_record(cls, record: JournalRecord) -> "TrainedStep":
        """Inverse of `to_record`."""
        uids = record.meta["uids"]
        groups, programs = _decode_step(_decompress_step(join_pieces(record.payload)))
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
                for role, (epochs, updates) in programs.items()
            },
        )


def _decompress_step(data: bytes) -> bytes:
    """Decompress; raises ValueError for more than a step can be, as of a file made to be that."""
    inflating = zlib.decompressobj()
    found = inflating.decompress(data, MAX_STEP_BYTES)
    if inflating.unconsumed_tail or not inflating.eof:
        raise ValueError("a step that is cut off, or larger than any step can be")
    return found


def _encode_schedule(program: StepSchedule, places: Mapping[str, int]) -> _EncodedSchedule:
    return [
        [[[(places[uid], index) for uid, index in picks] for picks in work] for work in rounds]
        for rounds in program.update_rounds
    ]


def _decode_rounds(
    rounds: list[list[list[tuple[int, int]]]], uids: Sequence[str]
) -> tuple[Round, ...]:
    return tuple(
        tuple(tuple((uids[i], index) for i, index in picks) for picks in work) for work in rounds
    )


def _make_entry(kind: str, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time.time(), **facts}


@dataclass
class RunLog:
    """The ledger and its log. A change is in the log before the stream acts on it.

    `steps` were made by a predecessor that died after its last checkpoint, by version: they are
    made again as they were.
    """

    ledger: Ledger
    record_log: RecordLog
    steps_to_replay: dict[int, TrainedStep] = field(default_factory=dict)

    async def record_start(self, version: int) -> None:
        """A process took the books over; the trainer is at `version`."""
        await self.record_log.append([JournalRecord(_make_entry("open", version=version))])

    async def record_admissions(self, uids: Sequence[str], version: int) -> None:
        """Prompts enter the stream at `version`."""
        for uid in uids:
            self.ledger.mark_admitted(uid, version)
        await self.record_log.append(
            [JournalRecord(_make_entry("admit", version=version, uids=list(uids)))]
        )

    async def record_step(self, step: TrainedStep) -> None:
        """A step was made; it is on the books from here on, unless it was made again."""
        if self.steps_to_replay.pop(step.version, None) is None:
            await self.record_log.append([step.to_record()])
            for group in step.groups:
                self.ledger.mark_trained(group.uid)

    async def record_finished(
        self, ended: Mapping[str, GroupOutcome], *, again: Sequence[str] = (), version: int = 0
    ) -> None:
        """Groups ended untrained; `again` are the uids some of their prompts enter anew under.

        Both at once: no crash comes between the end of the one and the admission of the other.
        """
        records = [
            JournalRecord(_make_entry("end", uid=uid, **asdict(how))) for uid, how in ended.items()
        ]
        if again:
            records.append(JournalRecord(_make_entry("admit", version=version, uids=list(again))))
        await self.record_log.append(records)
        for uid, how in ended.items():
            _mark_finished(self.ledger, uid, how)
        for uid in again:
            self.ledger.mark_admitted(uid, version)


def _mark_finished(ledger: Ledger, uid: str, how: GroupOutcome) -> None:
    if how.filtered:
        ledger.mark_filtered(uid)
    else:
        ledger.mark_dropped(uid, how.cause)


@dataclass(frozen=True)
class RecoveredRunLog:
    """What state and log together say: the ledger, steps to make again, prompts drawn since."""

    ledger: Ledger
    steps_to_replay: dict[int, TrainedStep]
    drawn_uids: tuple[str, ...]


def recover_run_log(
    records: Iterable[JournalRecord], state: Mapping[str, Any] | None, *, debug: bool = False
) -> RecoveredRunLog:
    """The books as they were: a checkpoint's ledger, and what the log has behind its cut.

    Raises LedgerError if they contradict each other, JournalError for an entry that says nothing.
    """
    ledger = Ledger(debug=debug) if state is None else Ledger.from_state(state, debug=debug)
    steps: dict[int, TrainedStep] = {}
    drawn: list[str] = []
    for record in records:
        meta = record.meta
        try:
            if meta["kind"] == "admit":
                for uid in meta["uids"]:
                    ledger.mark_admitted(uid, meta["version"])
                drawn += [uid for uid in meta["uids"] if parse_uid(uid)[2] == 0]
            elif meta["kind"] == "step":
                step = TrainedStep.from_record(record)
                steps[step.version] = step
                for uid in meta["uids"]:
                    ledger.mark_trained(uid)
            elif meta["kind"] == "end":
                _mark_finished(ledger, meta["uid"], _parse_outcome(meta))
        except (LookupError, TypeError, ValueError, AttributeError, zlib.error) as error:
            raise JournalError(f"the books: an entry cannot be used: {error!r}") from error
    return RecoveredRunLog(ledger, steps, tuple(drawn))


def read_history(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Every entry of a log in order: kind, time (epoch s), version or cause, uid or uids."""
    for record in read_log(folder):
        yield record.meta


def _parse_outcome(meta: Mapping[str, Any]) -> GroupOutcome:
    return GroupOutcome(meta["cause"], meta["reason"], meta["filtered"])


def read_log(folder: Path, *, first: int = 0) -> Iterator[JournalRecord]:
    """The entries of a log from segment `first` on; JournalError names one that is not readable."""
    check_first_segment(folder, first)
    for item in replay_segments(folder, first=first):
        if isinstance(item, CorruptRecord):
            raise JournalError(f"{item.file}, byte {item.position.offset}: {item.reason}")
        yield item[1]
