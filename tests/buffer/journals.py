"""Journals under test, and records to write to them."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from streamrl.buffer.encoding import Blob
from streamrl.buffer.journal import (
    CorruptRecord,
    Journal,
    JournalConfig,
    JournalRecord,
    RecordPosition,
    replay_segments,
)

ROOT = Path(__file__).resolve().parents[2]


def note(i: int, payload: Blob = b"payload") -> JournalRecord:
    return JournalRecord({"kind": "note", "i": i}, payload)


def read_numbers(folder: Path, **bounds: Any) -> list[int | None]:
    """Return the numbers of the replayed notes; None for a corrupt record."""
    return [
        None if isinstance(item, CorruptRecord) else item[1].meta["i"]
        for item in replay_segments(folder, **bounds)
    ]


def intact(
    items: Iterable[tuple[RecordPosition, JournalRecord] | CorruptRecord],
) -> list[tuple[RecordPosition, JournalRecord]]:
    """Return the replayed records; fail at a corrupt record."""
    records = []
    for item in items:
        assert not isinstance(item, CorruptRecord), item
        records.append(item)
    return records


def open_journal(folder: Path, **config: Any) -> Journal:
    return Journal(folder, JournalConfig(**config))


async def write_journal(folder: Path, *rounds: range, **config: Any) -> list[RecordPosition]:
    """Write a journal with one segment per round; return the positions."""
    journal, positions = open_journal(folder, **config), []
    for n, notes in enumerate(rounds):
        if n:
            await journal.rotate()
        positions += await journal.append([note(i) for i in notes])
    await journal.close()
    return positions


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
