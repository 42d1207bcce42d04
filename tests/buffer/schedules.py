"""Random lives of a shard: all that may be asked of one, in any order, much of it at once."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from streamrl.buffer import QueueShard
from streamrl.buffer.group import GroupState, ShardState
from streamrl.errors import DeadlineError
from streamrl.messages import Columns, Experience, FilteredGroup, GroupLease
from tests.buffer.shards import STAGES, admit, put, rollouts, take

MOVES = {
    "wait": 3,
    "admit": 4,
    "admit again": 1,
    "take": 12,
    "put": 10,
    "fail": 2,
    "filter": 1,
    "renew": 1,
    "release": 1,
    "stall": 1,
    "train": 3,
    "leave": 1,
}
HOLDERS = ("worker-0", "worker-1", "worker-2")
moves = st.lists(
    st.tuples(
        st.sampled_from([move for move, weight in MOVES.items() for _ in range(weight)]),
        st.integers(0, 2**16),
    ),
    min_size=25,
    max_size=100,
)
"""What happens, and the seed of what is left open."""


class Life:
    """Asks a shard for what a schedule says, waiting only now and then for the answers.

    `accepted` has what the shard has acknowledged: columns by uid and stage; `gone` are the uids
    that have left, `tokens` what each of those that were given is for.
    """

    def __init__(self, shard: QueueShard) -> None:
        self.shard = shard
        self.uids: list[str] = []
        self.admitted: set[str] = set()
        self.accepted: dict[tuple[str, str], Columns] = {}
        self.gone: set[str] = set()
        self.held: dict[int, Experience] = {}
        self.tokens: dict[int, tuple[str, str, str]] = {}
        self.version = 0
        self._asked: list[asyncio.Future[None]] = []

    async def live(self, moves: Sequence[tuple[str, int]]) -> None:
        """Make these moves one after the other."""
        for move, seed in moves:
            rng = random.Random(seed)
            self._asked.append(asyncio.ensure_future(self._move(move, rng)))
            if rng.random() < 0.5:
                await self.settle()
            else:
                await asyncio.sleep(0)

    async def settle(self) -> None:
        """Wait for all answers."""
        await asyncio.gather(*self._asked)
        self._asked.clear()

    async def _move(self, move: str, rng: random.Random) -> None:
        act: Mapping[str, Callable[[random.Random], Awaitable[None]]] = {
            "admit": self._admit,
            "admit again": self._admit_again,
            "take": self._take,
            "put": self._put,
            "train": self._train,
            "leave": self._leave,
            "wait": self._wait,
        }
        if move in act:
            await act[move](rng)
        elif self.held:
            self._at_once(move, rng)

    async def _admit(self, rng: random.Random) -> None:
        fresh = [f"0:{len(self.uids) + i}:0" for i in range(rng.randint(1, 3))]
        self.uids += fresh
        await self._enter(fresh)

    async def _admit_again(self, rng: random.Random) -> None:
        known = [uid for uid in self.uids if uid not in self.gone]
        await self._enter(rng.sample(known, min(2, len(known))))

    async def _enter(self, uids: Sequence[str]) -> None:
        await admit(self.shard, *uids, version=self.version, wait_s=100.0)
        self.admitted.update(uids)

    async def _take(self, rng: random.Random) -> None:
        most = rng.randint(1, 4)
        for stage in rng.sample(list(STAGES), len(STAGES)):
            holder = "coordinator" if stage == "train" else rng.choice(HOLDERS)
            request = f"{holder}/{rng.randrange(4)}" if rng.random() < 0.3 else ""
            found = await take(self.shard, stage, max_groups=most, holder=holder, request=request)
            for one in found:
                work = (one.uid, stage, holder)
                assert self.tokens.setdefault(one.lease.token, work) == work
                self.held[one.lease.token] = one
            if found:
                return

    async def _put(self, rng: random.Random) -> None:
        work = [one for one in self.held.values() if one.lease.stage != "train"]
        chosen = rng.sample(work, min(rng.randint(1, 3), len(work)))
        entries = [(one.lease, made(one.lease, rng)) for one in chosen]
        refused = await put(self.shard, *entries)
        for lease, columns in entries:
            if lease.uid not in refused:
                self.accepted[lease.uid, lease.stage] = columns
            self.held.pop(lease.token, None)

    async def _train(self, rng: random.Random) -> None:
        """The coordinator takes what is ready or has ended out of the queue."""
        done = [one.uid for one in self.held.values() if one.lease.stage == "train"]
        chosen = rng.sample(done, min(rng.randint(1, 3), len(done)))
        self.version += 1
        await self._go(chosen)

    async def _leave(self, rng: random.Random) -> None:
        """A restarted coordinator does not know of a group."""
        await self._go(rng.sample(self.uids, min(1, len(self.uids))))

    async def _go(self, uids: Sequence[str]) -> None:
        self.gone.update(uids)
        await self.shard.remove_groups(uids, self.version)

    async def _wait(self, rng: random.Random) -> None:
        await asyncio.sleep(rng.choice([0.001, 0.1, 3.0, 6.0, 11.0]))

    def _at_once(self, move: str, rng: random.Random) -> None:
        one = rng.choice(list(self.held.values())).lease
        if move == "fail":
            self.shard.fail_groups([(one, DeadlineError("no verdict"))])
        elif move == "filter":
            self.shard.filter_groups([(one, FilteredGroup("all rewards are equal"))])
        elif move == "renew":
            self.shard.renew_leases([held.lease for held in self.held.values()])
        elif move == "release":
            self.shard.release_holder(rng.choice(HOLDERS))
        else:
            assert move == "stall"
            self.shard.requeue_overdue(self.shard.find_overdue(rng.choice([2.0, 8.0])))


def made(lease: GroupLease, rng: random.Random) -> Columns:
    """Columns that tell one commit from another."""
    if lease.stage == "generate":
        columns = rollouts()
        columns["generator_logprobs"] = np.full(10, -rng.random(), np.float32)
        return columns
    name, size = ("scores", 2) if lease.stage == "reward" else ("ref_logprobs", 10)
    return {name: np.full(size, rng.random(), np.float32)}


def facts(
    book: ShardState, blob_of: Callable[[Any], bytes], *, leases: bool = True
) -> dict[str, Any]:
    """All of a book that must not be lost. `blob_of` gives the bytes of a part."""
    groups = sorted(book.groups.values(), key=lambda group: group.admission_order)
    return {
        "version": book.version,
        "groups": [_facts(group, blob_of, leases) for group in groups],
    }


def _facts(group: GroupState, blob_of: Callable[[Any], bytes], leases: bool) -> tuple[Any, ...]:
    held = sorted(
        (one.lease.token, stage, one.lease.holder, one.lease.attempt, one.request_id)
        for stage, several in group.leases.items()
        for one in several
    )
    begun = (group.uid, group.prompt, group.admitted_version, group.outcome)
    common = (*begun, Counter(group.failures), held if leases else [])
    if group.outcome is not None:
        return common
    parts = {
        stage: (part.column_names, blob_of(part)) for stage, part in group.stage_columns.items()
    }
    return (*common, group.info, group.ready_version, parts)
