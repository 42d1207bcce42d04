"""Groups dealt to another number of shards: what was accepted is where it hashes to."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.buffer import Bounds, Shard
from streamrl.buffer.codec import join
from streamrl.buffer.group import GroupBook, Part, ended
from streamrl.buffer.log.journal import Journal, JournalConfig
from streamrl.buffer.log.segment_file import segment_path
from streamrl.buffer.recovery import Base, payload, recover, snapshot
from streamrl.buffer.repartition import redeal
from streamrl.buffer.wire_types import shard_of
from streamrl.messages import Ended
from tests.buffer.shards import STAGES, admit, make_shard, put, rollouts, take

UIDS = [f"0:{i}:0" for i in range(12)]


async def live(journal: Path, base: Path, uids: list[str]) -> Base:
    """A shard: some groups in a snapshot, then a commit, a departure and an end behind it."""
    log = Journal(journal, JournalConfig(fsync_s=None))
    shard: Shard = make_shard(log=log, session="run", bounds=Bounds(100))
    for i, uid in enumerate(uids):
        await admit(shard, uid, version=i % 2)
    (first, second, *_) = await take(shard, "generate", max_groups=3)
    await put(shard, (first.lease, rollouts()))
    cut = await log.rotate()
    snapshot(STAGES, journal, Base(), before=cut, out=base)
    log.discard_before(cut)
    await put(shard, (second.lease, rollouts()))
    await shard.leave([second.uid], 2)
    shard._post(ended(uids[-1], Ended("filtered", "equal", filtered=True)))
    await log.close()
    return Base(base, cut)


def _columns(parts: Mapping[str, Part]) -> Iterator[tuple[str, bytes]]:
    yield from ((stage, join(payload(part))) for stage, part in parts.items())


def facts(book: GroupBook) -> dict[str, Any]:
    """All that matters of the groups, those that left among them."""
    here = {
        uid: (
            *(group.prompt, group.admitted_version, group.ended, group.ready_version),
            *_columns(group.parts),
        )
        for uid, group in book.groups.items()
    }
    gone = {uid: tuple(_columns(parts)) for uid, parts in book.retired.items()}
    return {**here, **{f"left {uid}": parts for uid, parts in gone.items()}}


@pytest.mark.parametrize(("was", "now"), [(2, 3), (3, 1), (1, 2)])
def test_every_group_is_where_it_hashes_to(tmp_path: Path, was: int, now: int) -> None:
    before: dict[str, Any] = {}
    sources = []
    for place in range(was):
        mine = [uid for uid in UIDS if shard_of(uid, was) == place]
        journal = tmp_path / f"shard-{place}"
        base = asyncio.run(live(journal, tmp_path / f"queue-{place}", mine))
        sources.append((journal, base))
        before |= facts(recover(STAGES, journal, base)[0])
    targets = [tmp_path / f"shard-{place}.1" for place in range(now)]
    redeal(sources, targets)
    after: dict[str, Any] = {}
    for place, target in enumerate(targets):
        book, corrupt = recover(STAGES, target, Base())
        assert not corrupt
        assert {shard_of(uid, now) for uid in (*book.groups, *book.retired)} <= {place}
        assert not any(group.leases for group in book.groups.values())
        versions = [g.admitted_version for g in sorted(book.groups.values(), key=lambda g: g.order)]
        assert versions == sorted(versions), "who was admitted first is served first"
        after |= facts(book)
    assert after == before
    assert any(name.startswith("left") for name in after)


def test_a_damaged_record_is_left_out_as_it_is_of_a_shard(tmp_path: Path) -> None:
    base = asyncio.run(live(tmp_path / "shard-0", tmp_path / "queue", UIDS))
    path = segment_path(tmp_path / "shard-0", base.first)
    data = bytearray(path.read_bytes())
    data[80] ^= 1  # in the first record behind the cut, the commit
    path.write_bytes(data)
    alone, corrupt = recover(STAGES, tmp_path / "shard-0", base)
    assert len(corrupt) == 1
    redeal([(tmp_path / "shard-0", base)], [tmp_path / "a", tmp_path / "b"])
    books = [recover(STAGES, tmp_path / name, Base())[0] for name in ("a", "b")]
    assert facts(books[0]) | facts(books[1]) == facts(alone)
