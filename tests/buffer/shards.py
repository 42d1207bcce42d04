"""Shards under test: stages, their columns, and calls as the queue client makes them."""

import functools
import inspect
import pickle
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.buffer import QueueConfig, QueueShard, ShardCapacity, StageSchema
from streamrl.buffer.encoding import ColumnCommit, decode_columns, encode_columns
from streamrl.buffer.group import ShardState
from streamrl.buffer.journal import RecordLog
from streamrl.buffer.shard import LeaseRequest
from streamrl.messages import (
    ROLLOUT_COLUMNS,
    Columns,
    Experience,
    GroupInfo,
    GroupLease,
    Prompt,
    measure_columns,
    rollouts_to_columns,
)
from tests.rollouts import make_rollout
from tests.virtual_time import in_virtual_time

STAGES = {
    "generate": StageSchema((), ROLLOUT_COLUMNS),
    "reward": StageSchema(ROLLOUT_COLUMNS, ("scores",)),
    "reference": StageSchema(("token_ids", "lengths"), ("ref_logprobs",)),
    "train": StageSchema((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"), ()),
}
WITH_A_GREEDY_ONE = {
    **STAGES,
    "greedy": StageSchema((), ("greedy_ids",)),
    "baseline": StageSchema(("greedy_ids", "lengths"), ("baseline_scores",)),
}
SCORES: Columns = {"scores": np.ones(2, np.float32)}
REFERENCE: Columns = {"ref_logprobs": np.zeros(10, np.float32)}
ROOM = ShardCapacity(8)
MAX_ATTEMPTS = 2
QUICK: dict[str, Any] = {"lease_s": 10.0, "max_attempts": MAX_ATTEMPTS}


def prompt(uid: str) -> Prompt:
    return Prompt(uid, np.array([1, 2], np.int32))


def rollouts(version: int = 0) -> dict[str, Any]:
    """Return two rollouts of two prompt and three sampled tokens: 10 tokens, 6 in the loss."""
    return rollouts_to_columns([make_rollout([1, 2], [5, 6, 7], version=version)] * 2)


WORK: Mapping[str, Columns] = {"generate": rollouts(), "reward": SCORES, "reference": REFERENCE}
"""Columns that each producing stage commits."""


def make_shard(
    *,
    bounds: ShardCapacity = ROOM,
    book: ShardState | None = None,
    log: RecordLog | None = None,
    session: str = "",
    **settings: Any,
) -> QueueShard:
    """Make a shard on the running loop; `settings` are fields of QueueConfig."""
    config = QueueConfig(**{**QUICK, **settings})
    book = ShardState(STAGES) if book is None else book
    return QueueShard(book, config, capacity=bounds, session=session, log=log)


def on_shard(
    **settings: Any,
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run an async test on a virtual clock, with a new shard as its first argument."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def run_on_shard(*args: Any, **kwargs: Any) -> None:
            await test(make_shard(**settings), *args, **kwargs)

        run = functools.wraps(test)(in_virtual_time(run_on_shard))
        signature = inspect.signature(test)
        # pytest takes parameters for fixtures.
        _, *fixtures = signature.parameters.values()
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def entry(uid: str, version: int = 0) -> tuple[str, bytes, int]:
    """Return the entry of an `admit_entries` call."""
    return uid, pickle.dumps(prompt(uid)), version


async def admit(shard: QueueShard, *uids: str, version: int = 0, wait_s: float = 1.0) -> None:
    """Admit prompts, retrying until all are admitted, like the client."""
    waiting = [entry(uid, version) for uid in uids]
    while waiting:
        entered = await shard.admit_entries(waiting, wait_s=wait_s)
        waiting = [item for item in waiting if item[0] not in entered]


async def take(
    shard: QueueShard,
    stage: str,
    columns: Sequence[str] = (),
    *,
    max_groups: int = 10,
    wait_s: float = 0.0,
    holder: str = "me",
    request: str = "",
) -> list[Experience]:
    """Lease groups and decode them, like the client."""
    lease_request = LeaseRequest(stage, holder, max_groups, tuple(columns), request)
    experiences = []
    for grant in await shard.lease_groups(lease_request, wait_s=wait_s):
        columns_of = {n: c for blob in grant.blobs for n, c in decode_columns(blob).items()}
        experiences.append(
            Experience(
                lease=grant.lease,
                admitted_version=grant.admitted_version,
                info=grant.info,
                ready_version=grant.ready_version,
                outcome=grant.outcome,
                prompt=None if grant.prompt is None else pickle.loads(grant.prompt),
                columns={name: columns_of[name] for name in columns if name in columns_of},
            )
        )
    return experiences


def commit(lease: GroupLease, columns: Columns) -> ColumnCommit:
    info = GroupInfo.from_columns(columns) if "policy_version" in columns else None
    return ColumnCommit(lease, encode_columns(columns), measure_columns(columns), info)


async def put(shard: QueueShard, *entries: tuple[GroupLease, Columns]) -> list[str]:
    return await shard.commit_columns([commit(lease, columns) for lease, columns in entries])


async def do(shard: QueueShard, *stages: str, max_groups: int = 10) -> None:
    """Lease and commit the ready groups of each stage in turn."""
    for stage in stages:
        groups = await take(shard, stage, max_groups=max_groups)
        assert await put(shard, *((group.lease, WORK[stage]) for group in groups)) == []


async def finish(shard: QueueShard, *, max_groups: int = 10) -> None:
    """Run all producing stages."""
    await do(shard, *WORK, max_groups=max_groups)
