"""Random schedules of calls to a shard, mostly concurrent."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from streamrl.buffer import QueueShard
from streamrl.buffer.encoding import join_pieces
from streamrl.buffer.group import GroupState, ShardState, StageColumns, read_blob
from streamrl.errors import DeadlineError
from streamrl.messages import Columns, Experience, FilteredGroup, GroupLease
from tests.buffer.shards import WITH_A_GREEDY_ONE, admit, put, rollouts, take

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
"""Moves, each with the seed of its random choices."""


class Life:
    """A run of a schedule against a shard; it waits for replies only at random moves.

    `accepted`: acknowledged columns by uid and stage. `removed`: removed uids. `tokens`: uid, stage
    and holder of each lease token.
    """

    def __init__(self, shard: QueueShard) -> None:
        self.shard = shard
        self.uids: list[str] = []
        self.admitted: set[str] = set()
        self.accepted: dict[tuple[str, str], Columns] = {}
        self.removed: set[str] = set()
        self.leased: dict[int, Experience] = {}
        self.tokens: dict[int, tuple[str, str, str]] = {}
        self.version = 0
        self._calls: list[asyncio.Future[None]] = []

    async def live(self, moves: Sequence[tuple[str, int]]) -> None:
        """Start the calls of all moves in order."""
        for move, seed in moves:
            rng = random.Random(seed)
            self._calls.append(asyncio.ensure_future(self._move(move, rng)))
            if rng.random() < 0.5:
                await self.settle()
            else:
                await asyncio.sleep(0)

    async def settle(self) -> None:
        """Wait for the replies of all calls in flight."""
        await asyncio.gather(*self._calls)
        self._calls.clear()

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
        elif self.leased:
            await self._settle_lease(move, rng)

    async def _admit(self, rng: random.Random) -> None:
        fresh = [f"0:{len(self.uids) + i}:0" for i in range(rng.randint(1, 3))]
        self.uids += fresh
        await self._admit_uids(fresh)

    async def _admit_again(self, rng: random.Random) -> None:
        present_uids = [uid for uid in self.uids if uid not in self.removed]
        await self._admit_uids(rng.sample(present_uids, min(2, len(present_uids))))

    async def _admit_uids(self, uids: Sequence[str]) -> None:
        await admit(self.shard, *uids, version=self.version, wait_s=100.0)
        self.admitted.update(uids)

    async def _take(self, rng: random.Random) -> None:
        max_groups = rng.randint(1, 4)
        for stage in rng.sample(list(WITH_A_GREEDY_ONE), len(WITH_A_GREEDY_ONE)):
            holder = "coordinator" if stage == "train" else rng.choice(HOLDERS)
            request = f"{holder}/{rng.randrange(4)}" if rng.random() < 0.3 else ""
            groups = await take(
                self.shard, stage, max_groups=max_groups, holder=holder, request=request
            )
            for group in groups:
                work = (group.uid, stage, holder)
                assert self.tokens.setdefault(group.lease.token, work) == work
                self.leased[group.lease.token] = group
            if groups:
                return

    async def _put(self, rng: random.Random) -> None:
        work = [group for group in self.leased.values() if group.lease.stage != "train"]
        chosen = rng.sample(work, min(rng.randint(1, 3), len(work)))
        entries = [(group.lease, make_columns(group.lease, rng)) for group in chosen]
        refused = await put(self.shard, *entries)
        for lease, columns in entries:
            if lease.uid not in refused:
                self.accepted[lease.uid, lease.stage] = columns
            self.leased.pop(lease.token, None)

    async def _train(self, rng: random.Random) -> None:
        """Remove ready or ended groups, like the coordinator."""
        done = [group.uid for group in self.leased.values() if group.lease.stage == "train"]
        chosen = rng.sample(done, min(rng.randint(1, 3), len(done)))
        self.version += 1
        await self._remove(chosen)

    async def _leave(self, rng: random.Random) -> None:
        """Remove a group unknown to a restarted coordinator."""
        await self._remove(rng.sample(self.uids, min(1, len(self.uids))))

    async def _remove(self, uids: Sequence[str]) -> None:
        self.removed.update(uids)
        await self.shard.remove_groups(uids, self.version)

    async def _wait(self, rng: random.Random) -> None:
        await asyncio.sleep(rng.choice([0.001, 0.1, 3.0, 6.0, 11.0]))

    async def _settle_lease(self, move: str, rng: random.Random) -> None:
        lease = rng.choice(list(self.leased.values())).lease
        if move == "fail":
            await self.shard.fail_groups([(lease, DeadlineError("no verdict"))])
        elif move == "filter":
            await self.shard.filter_groups([(lease, FilteredGroup("all rewards are equal"))])
        elif move == "renew":
            await self.shard.renew_leases([group.lease for group in self.leased.values()])
        elif move == "release":
            await self.shard.release_holder(rng.choice(HOLDERS))
        else:
            assert move == "stall"
            await self.shard.requeue_overdue(await self.shard.find_overdue(rng.choice([2.0, 8.0])))


def make_columns(lease: GroupLease, rng: random.Random) -> Columns:
    """Return columns for a commit; random values make commits differ."""
    if lease.stage == "generate":
        columns = rollouts()
        columns["generator_logprobs"] = np.full(10, -rng.random(), np.float32)
        return columns
    if lease.stage == "greedy":
        return {"greedy_ids": np.full(2, rng.randrange(9), np.int32)}
    names = {"reward": "scores", "baseline": "baseline_scores", "reference": "ref_logprobs"}
    size = 10 if lease.stage == "reference" else 2
    return {names[lease.stage]: np.full(size, rng.random(), np.float32)}


def in_memory(stage_columns: StageColumns) -> bytes:
    return join_pieces(stage_columns.data)


def on_disk(stage_columns: StageColumns) -> bytes:
    return join_pieces(read_blob(stage_columns))


def facts(
    state: ShardState, blob_of: Callable[[Any], bytes], *, leases: bool = True
) -> dict[str, Any]:
    """Return the durable fields of a shard state; `blob_of` returns the bytes of columns."""
    groups = sorted(state.groups.values(), key=lambda group: group.admission_order)
    return {
        "version": state.version,
        "groups": [_facts(group, blob_of, leases) for group in groups],
    }


def _facts(group: GroupState, blob_of: Callable[[Any], bytes], leases: bool) -> tuple[Any, ...]:
    active = sorted(
        (a.lease.token, stage, a.lease.holder, a.lease.attempt, a.request_id)
        for stage, a in group.leases.items()
    )
    basics = (group.uid, group.prompt, group.admitted_version, group.outcome)
    common = (*basics, Counter(group.failures), active if leases else [])
    if group.outcome is not None:
        return common
    columns = {stage: (c.column_names, blob_of(c)) for stage, c in group.stage_columns.items()}
    return (*common, group.info, group.ready_version, columns)
