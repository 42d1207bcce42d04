"""Calls of a model's ranks: how they share leased groups, and what their leader records."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st

from streamrl.actors.rank_calls import (
    RankCalls,
    get_publish_timeout_s,
    lead_scoring,
    share_leases,
)
from streamrl.algorithms import AlgorithmConfig
from streamrl.buffer import ExperienceQueue
from streamrl.engines.trainer_config import CriticConfig, TrainerConfig
from streamrl.messages import Experience, GroupInfo, GroupLease
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import StageContext
from streamrl.telemetry.spans import SpanRecorder
from tests.actors.fakes import FakeActor, make_config
from tests.buffer.shards import prompt
from tests.stream.test_stage_worker import UIDS, open_shard
from tests.virtual_time import in_virtual_time


def make_experience(token: int, size: int) -> Experience:
    lease = GroupLease(token, f"0:{token}:0", "value", 1, 10.0)
    return Experience(lease, 0, info=GroupInfo((size,), size, ((0, size),)))


@given(st.lists(st.integers(1, 4096), max_size=40), st.integers(1, 8))
def test_ranks_share_all_leases_whole_and_about_equally(sizes: list[int], dp_size: int):
    experiences = [make_experience(token, size) for token, size in enumerate(sizes)]
    shares, added = share_leases(experiences, [0] * dp_size)
    leases = [lease for share in shares for lease in share]
    assert len(shares) == dp_size
    assert sorted(lease.token for lease in leases) == list(range(len(sizes)))
    loads = [sum(sizes[lease.token] for lease in share) for share in shares]
    assert loads == added
    assert max(loads) - min(loads) <= max(sizes, default=0)


async def test_groups_that_finish_one_by_one_are_scored_by_all_ranks():
    scored: list[list[int]] = [[], []]
    released = asyncio.Event()

    class Rank:
        def __init__(self, tokens: list[int]) -> None:
            self._tokens = tokens

        async def score_groups(self, stage: str, leases: Sequence[GroupLease]) -> None:
            self._tokens.extend(lease.token for lease in leases)
            await released.wait()

    actors = [FakeActor(Rank(tokens)) for tokens in scored]
    names, config = ["critic-0", "critic-1"], TrainerConfig(world_size=2)
    ranks = RankCalls(names, actors, config, model_bytes=0, is_collective=False)
    calls = []
    for token, size in enumerate((300, 100, 100, 100)):
        calls.append(
            asyncio.create_task(ranks.score_groups("value", [make_experience(token, size)]))
        )
        await asyncio.sleep(0)
    released.set()
    await asyncio.gather(*calls)
    assert scored == [[0], [1, 2, 3]]
    # Nothing is left to score.
    await ranks.score_groups("value", [make_experience(4, 1)])
    assert scored == [[0, 4], [1, 2, 3]]


class CountingLease(DedicatedDeviceLease):
    """Lease that counts its holders."""

    num_holders = 0

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        self.num_holders += 1
        yield
        self.num_holders -= 1


@in_virtual_time
async def test_a_leader_holds_the_devices_and_leaves_the_spans_to_its_ranks():
    shard, _ = await open_shard(UIDS[:3])
    lease, spans, held = CountingLease(), SpanRecorder("critic"), dict[str, int]()
    stage = StageContext("generate", ExperienceQueue([shard], "critic"), lease, spans)

    async def score(name: str, experiences: Sequence[Experience]) -> None:
        held.update((experience.uid, lease.num_holders) for experience in experiences)

    leading = asyncio.create_task(lead_scoring(stage, score, 1))
    await asyncio.sleep(5.0)
    leading.cancel()
    assert held == dict.fromkeys(UIDS[:3], 1)
    assert not spans.drain_spans()


@in_virtual_time
async def test_groups_that_become_ready_while_ranks_score_share_the_next_call():
    shard, queue = await open_shard(UIDS[:1])
    stage = StageContext(
        "generate", ExperienceQueue([shard], "critic"), DedicatedDeviceLease(), SpanRecorder("c")
    )
    calls: list[list[str]] = []

    async def score(name: str, experiences: Sequence[Experience]) -> None:
        calls.append([experience.uid for experience in experiences])
        await asyncio.sleep(10.0)

    leading = asyncio.create_task(lead_scoring(stage, score, 1))
    for uid in UIDS[1:5]:
        await asyncio.sleep(1.0)
        await queue.insert_prompts([prompt(uid)], 0)
    await asyncio.sleep(10.0)
    leading.cancel()
    assert calls == [[UIDS[0]], [UIDS[1]], list(UIDS[2:5])]


def test_the_slowest_model_bounds_a_publish_of_all():
    slow = {"lr": 1e-5, "collective_timeout_s": 1000.0}
    config = make_config(algorithm=AlgorithmConfig("ppo"), critic=CriticConfig(trainer=slow))
    assert get_publish_timeout_s(config, {"policy": 10**9, "critic": 0}) == 1120.0
    assert get_publish_timeout_s(config, {"policy": 10**11, "critic": 0}) == 420.0 + 2000.0


@in_virtual_time
async def test_a_cancelled_call_ends_on_the_ranks_before_the_next_begins():
    log: list[str] = []

    class Rank:
        async def score_groups(self, stage: str, leases: Sequence[GroupLease]) -> None:
            log.append("begins")
            await asyncio.sleep(10.0)
            log.append("ends")

    config = TrainerConfig(world_size=1)
    actors = [FakeActor(Rank())]
    ranks = RankCalls(["critic-0"], actors, config, model_bytes=0, is_collective=True)
    scoring = asyncio.create_task(ranks.score_groups("value", [make_experience(0, 1)]))
    await asyncio.sleep(1.0)
    scoring.cancel()
    async with ranks.exclude_others():
        log.append("next")
    assert log == ["begins", "ends", "next"]
    assert scoring.cancelled()
