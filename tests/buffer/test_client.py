"""The queue over several shards."""

import asyncio
import gc
import math
import weakref
import zlib

import numpy as np
import pytest

from streamrl.buffer import Bounds, ExperienceQueue, QueueConfig
from streamrl.buffer.blob import LARGE_BYTES
from streamrl.buffer.leases import Overdue
from streamrl.errors import ContractError, DeadlineError, RewardError, StreamError
from streamrl.messages import Columns, Ended, Experience, Filtered
from tests.buffer.shards import REFERENCE, SCORES, STAGES, prompt, rollouts
from tests.fake_shards import CALL_S, LocalShard, MemoryLog
from tests.virtual_clock import run_virtual

UIDS = [f"0:{i}:0" for i in range(20)]


def local_shards(
    count: int, *, capacity: int = 100, hedge_s: float | None = None
) -> list[LocalShard]:
    config = QueueConfig(shards=count, lease_s=10.0, max_attempts=2, hedge_s=hedge_s)
    return [LocalShard(STAGES, config, Bounds(capacity), log=MemoryLog()) for _ in range(count)]


def queue_of(count: int) -> ExperienceQueue:
    return ExperienceQueue(local_shards(count), "me")


async def take_all(
    queue: ExperienceQueue, stage: str, columns: tuple[str, ...] = (), *, max_groups: int = 3
) -> list[Experience]:
    taken: list[Experience] = []
    while found := await queue.take(stage, max_groups=max_groups, columns=columns, wait_s=1.0):
        assert len(found) <= max_groups
        taken += found
    return taken


async def do(queue: ExperienceQueue, stage: str, columns: Columns) -> None:
    taken = await take_all(queue, stage)
    assert await queue.put([(one.lease, columns) for one in taken]) == []


async def finish(queue: ExperienceQueue) -> None:
    await do(queue, "generate", rollouts(version=3))
    await do(queue, "reward", SCORES)
    await do(queue, "reference", REFERENCE)


def large(value: int) -> Columns:
    """Rollouts of one long completion, whose blob is not in one piece."""
    tokens = LARGE_BYTES // 4
    return {
        "token_ids": np.full(tokens, value, np.int32),
        "loss_mask": np.ones(tokens, np.bool_),
        "generator_logprobs": np.zeros(tokens, np.float32),
        "policy_version": np.zeros(tokens, np.int32),
        "lengths": np.array([tokens], np.int32),
        "finish_reason": np.zeros(1, np.int8),
    }


def test_large_columns_outlive_the_shard_that_took_them() -> None:
    async def main() -> None:
        (shard,) = shards = local_shards(1)
        queue = ExperienceQueue(shards, "me")
        await queue.admit([prompt("0:0:0")], 0)
        await do(queue, "generate", large(7))
        shard.kill()
        shard.revive()
        (scoring,) = await take_all(queue, "reward", ("token_ids", "lengths"))
        assert (scoring.columns["token_ids"] == 7).all()
        assert scoring.columns["lengths"] == scoring.columns["token_ids"].size

    run_virtual(main())


def test_a_put_that_one_shard_refuses_ends_when_it_has_ended_at_the_others() -> None:
    async def main() -> None:
        shards = local_shards(2)
        queue = ExperienceQueue(shards, "me")
        await queue.admit([prompt(uid) for uid in UIDS[:8]], 0)
        leases = {queue.shard_of(one.uid): one.lease for one in await take_all(queue, "generate")}
        shards[1].log.write_s = 5.0
        columns = large(7)
        bad = {**large(7), "lengths": np.array([3], np.int32)}
        with pytest.raises(ContractError, match="token_ids"):
            await queue.put([(leases[0], bad), (leases[1], columns)])
        # From here on they are the caller's again.
        columns["token_ids"][:] = 99
        shards[1].log.write_s = 0.0
        shards[1].kill()
        shards[1].revive()
        (scoring,) = await take_all(queue, "reward", ("token_ids",))
        assert (scoring.columns["token_ids"] == 7).all()

    run_virtual(main())


def test_room_may_be_waited_for_longer_than_one_call_takes() -> None:
    async def main() -> None:
        queue = ExperienceQueue(local_shards(1, capacity=1), "me")
        await queue.admit([prompt("a")], 0)
        with pytest.raises(DeadlineError, match="waited for room in a full shard"):
            await queue.admit([prompt("b")], 0, wait_s=50.0)
        assert asyncio.get_running_loop().time() == pytest.approx(50.0, abs=1.0)
        waiting = asyncio.create_task(queue.admit([prompt("b")], 0, wait_s=math.inf))
        await asyncio.sleep(10_000.0)
        assert not waiting.done()
        await queue.leave(["a"], 1)
        await waiting

    run_virtual(main())


# Where groups are.


def test_a_group_lives_in_the_shard_its_uid_hashes_to_in_every_process() -> None:
    async def main() -> None:
        shards = local_shards(3)
        one, other = ExperienceQueue(shards, "me"), ExperienceQueue(shards, "you")
        await one.admit([prompt(uid) for uid in UIDS], 0)
        places = [one.shard_of(uid) for uid in UIDS]
        assert places == [other.shard_of(uid) for uid in UIDS]
        assert places == [zlib.crc32(uid.encode()) % 3 for uid in UIDS]
        for i, shard in enumerate(shards):
            mine = {uid for uid, place in zip(UIDS, places, strict=True) if place == i}
            assert set((await shard.stats()).uids) == mine != set()

    run_virtual(main())


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_group_is_taken_once_wherever_it_lives(shards: int) -> None:
    async def main() -> None:
        queue = queue_of(shards)
        await queue.admit([prompt(uid) for uid in UIDS], 0)
        taken = [experience.uid for experience in await take_all(queue, "generate")]
        assert sorted(taken) == sorted(UIDS)

    run_virtual(main())


def test_a_full_shard_blocks_the_others_only_until_its_deadline() -> None:
    async def main() -> None:
        queue = ExperienceQueue(local_shards(2, capacity=1), "me")
        with pytest.raises(DeadlineError, match="waited for room in a full shard"):
            await queue.admit([prompt(uid) for uid in UIDS], 0)
        assert len((await queue.stats()).uids) == 2

    run_virtual(main())


def test_columns_are_read_back_by_uid() -> None:
    async def main() -> None:
        queue, uids = queue_of(2), UIDS[:6]
        await queue.admit([prompt(uid) for uid in uids], 0)
        await do(queue, "generate", rollouts(version=3))
        found = await queue.read(uids, ("policy_version", "lengths"))
        assert set(found) == set(uids)
        assert all(columns["lengths"].tolist() == [5, 5] for columns in found.values())
        assert all(columns.keys() == {"policy_version", "lengths"} for columns in found.values())
        stats = await queue.end_step([], 1)
        assert set(stats.uids) == set(uids)
        assert stats.depth["reward"] >= 0

    run_virtual(main())


def test_columns_of_several_stages_are_read_as_one() -> None:
    async def main() -> None:
        queue = queue_of(2)
        await queue.admit([prompt("0:0:0")], 0)
        await finish(queue)
        found = await queue.read(["0:0:0"], ("scores", "lengths", "ref_logprobs"))
        assert [len(column) for column in found["0:0:0"].values()] == [2, 2, 10]

    run_virtual(main())


def test_the_figures_of_all_shards_are_added_up() -> None:
    async def main() -> None:
        queue = queue_of(3)
        await queue.admit([prompt(uid) for uid in UIDS], 0)
        await asyncio.sleep(5.0)
        stats = await queue.end_step(UIDS[:5], 1)
        assert sorted(stats.uids) == sorted(UIDS[5:])
        assert stats.depth["generate"] == pytest.approx(20.0, rel=0.01)
        assert stats.oldest_age_s == pytest.approx(5.0, abs=0.1)
        assert stats.counts == {"redelivered": 0, "hedged": 0, "refused": 0}

    run_virtual(main())


def test_groups_come_in_with_what_was_made_of_them_elsewhere() -> None:
    async def main() -> None:
        queue = queue_of(2)
        made = [(prompt(uid), rollouts(version=2)) for uid in UIDS]
        await queue.add(made, 2, stage="generate")
        assert not await take_all(queue, "generate")
        taken = await take_all(queue, "reward", ("policy_version",))
        assert sorted(one.uid for one in taken) == sorted(UIDS)
        assert all(one.columns["policy_version"].max() == 2 for one in taken)
        assert all(one.prompt is not None and one.prompt.uid == one.uid for one in taken)

    run_virtual(main())


# Requests.


def test_a_waiting_take_is_answered_when_a_prompt_arrives_anywhere() -> None:
    async def main() -> None:
        queue = queue_of(3)
        waiting = asyncio.create_task(queue.take("generate", max_groups=4, columns=(), wait_s=60.0))
        await asyncio.sleep(5.0)
        await queue.admit([prompt("0:7:0")], 0)
        (found,) = await waiting
        assert found.uid == "0:7:0"
        assert found.prompt is not None and found.prompt.token_ids.tolist() == [1, 2]
        assert asyncio.get_running_loop().time() < 6.0

    run_virtual(main())


def test_a_request_outlives_the_call_so_that_nobody_asks_twice() -> None:
    async def main() -> None:
        shards = local_shards(1)
        queue = ExperienceQueue(shards, "me")
        for _ in range(5):
            assert not await queue.take("generate", max_groups=2, columns=(), wait_s=1.0)
        cancelled = asyncio.create_task(queue.take("generate", max_groups=2, columns=(), wait_s=9))
        await asyncio.sleep(1.0)
        cancelled.cancel()
        await queue.admit([prompt("0:0:0")], 0)
        await asyncio.sleep(1.0)
        # The request of the first call was answered while nobody waited for it.
        started = asyncio.get_running_loop().time()
        (found,) = await queue.take("generate", max_groups=2, columns=(), wait_s=1.0)
        assert asyncio.get_running_loop().time() == started
        assert found.uid == "0:0:0"

    run_virtual(main())


def test_what_was_given_beyond_what_was_asked_for_is_kept_for_the_next_call() -> None:
    async def main() -> None:
        queue = queue_of(3)
        await queue.admit([prompt(uid) for uid in UIDS], 0)
        counts = []
        for _ in range(6):
            counts.append(len(await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)))
        assert counts == [1] * 6
        assert await queue.renew() == []

    run_virtual(main())


def test_together_the_groups_of_a_call_hold_so_many_tokens_or_are_one() -> None:
    async def main() -> None:
        queue = queue_of(3)
        await queue.admit([prompt(uid) for uid in UIDS[:7]], 0)
        await do(queue, "generate", rollouts())
        counts = []
        while found := await queue.take(
            "reward", max_groups=9, columns=(), wait_s=1.0, max_tokens=20
        ):
            counts.append(len(found))
        assert max(counts) <= 2 and sum(counts) == 7, "10 tokens each"

    run_virtual(main())


def test_a_group_of_more_tokens_than_may_be_is_taken_by_itself() -> None:
    async def main() -> None:
        queue = queue_of(2)
        await queue.admit([prompt(uid) for uid in UIDS[:3]], 0)
        await do(queue, "generate", rollouts())
        for _ in range(3):
            assert (
                len(await queue.take("reward", max_groups=9, columns=(), wait_s=1.0, max_tokens=1))
                == 1
            )

    run_virtual(main())


def test_who_takes_few_holds_no_more_of_every_shard_than_its_share() -> None:
    async def main() -> None:
        shards = local_shards(2)
        mine, yours = ExperienceQueue(shards, "me"), ExperienceQueue(shards, "you")
        await mine.admit([prompt(uid) for uid in UIDS], 0)
        assert 0 < len(await mine.take("generate", max_groups=4, columns=(), wait_s=1.0)) <= 4
        await asyncio.sleep(1.0)
        assert len(await take_all(yours, "generate")) == len(UIDS) - 4

    run_virtual(main())


def test_groups_of_a_shard_that_is_started_again_count_their_age_from_then() -> None:
    async def main() -> None:
        (shard,) = shards = local_shards(1)
        queue = ExperienceQueue(shards, "me")
        await queue.admit([prompt("0:0:0")], 0)
        await asyncio.sleep(50.0)
        shard.kill()
        shard.revive()
        await asyncio.sleep(2.0)
        assert (await queue.stats()).oldest_age_s == pytest.approx(2.0, abs=0.1)

    run_virtual(main())


def test_a_shard_that_is_started_again_is_asked_again_and_gives_the_same_leases() -> None:
    async def main() -> None:
        shards = local_shards(1)
        queue = ExperienceQueue(shards, "me")
        await queue.admit([prompt(uid) for uid in UIDS], 0)
        asking = asyncio.create_task(queue.take("generate", max_groups=3, columns=(), wait_s=60.0))
        # Granted and in the log, but the answer is still on its way.
        await asyncio.sleep(1.5 * CALL_S + 0.002)
        await shards[0].log.append([])
        shards[0].kill()
        shards[0].revive()
        first = await asking
        assert len(first) == 3
        second = await queue.take("generate", max_groups=20, columns=(), wait_s=1.0)
        assert len(second) == 17
        assert await queue.put([(one.lease, rollouts()) for one in first]) == []

    run_virtual(main())


# What is held.


def test_what_is_held_is_kept_by_renewing_even_before_it_is_handed_out() -> None:
    async def main() -> None:
        shards = local_shards(2)
        queue, other = ExperienceQueue(shards, "me"), ExperienceQueue(shards, "you")
        await queue.admit([prompt(uid) for uid in UIDS[:4]], 0)
        assert queue.renew_every_s == float("inf"), "nothing is held"
        (first,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        assert queue.renew_every_s == pytest.approx(10.0 / 3)
        taken = {one.uid for one in await take_all(other, "generate")}
        for _ in range(5):
            await asyncio.sleep(queue.renew_every_s)
            assert await queue.renew() == []
            await other.renew()
        assert not await take_all(other, "generate")
        assert first.uid not in taken

    run_virtual(main())


def test_lost_leases_are_told_once_and_not_handed_out_any_more() -> None:
    async def main() -> None:
        shards = local_shards(2)
        queue, other = ExperienceQueue(shards, "me"), ExperienceQueue(shards, "you")
        asking = asyncio.create_task(queue.take("generate", max_groups=2, columns=(), wait_s=5.0))
        await asyncio.sleep(1.0)
        # One in each shard: the second answer comes when nobody waits for it any more.
        await queue.admit([prompt("0:0:0")], 0)
        (held,) = await asking
        await queue.admit([prompt(uid) for uid in UIDS[1:4]], 0)
        await asyncio.sleep(11.0)
        taken = [one.uid for one in await take_all(other, "generate")]
        assert held.uid in taken
        lost = {lease.uid for lease in await queue.renew()}
        assert held.uid in lost and lost <= set(taken) and len(lost) > 1
        assert await queue.renew() == []
        assert not await queue.take("generate", max_groups=2, columns=(), wait_s=1.0)

    run_virtual(main())


def test_what_waits_for_the_next_call_is_not_handed_out_once_it_is_lost() -> None:
    async def main() -> None:
        shards = local_shards(2)
        queue, other = ExperienceQueue(shards, "me"), ExperienceQueue(shards, "you")
        await queue.admit([prompt(uid) for uid in UIDS[:2]], 0)
        assert {queue.shard_of(uid) for uid in UIDS[:2]} == {0, 1}
        # Both shards answer at once, and one group is enough.
        (held,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        await asyncio.sleep(11.0)
        taken = {one.uid for one in await take_all(other, "generate")}
        assert taken == {lease.uid for lease in await queue.renew()} == set(UIDS[:2])
        assert held.uid in taken
        assert not await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)

    run_virtual(main())


def test_settled_work_is_not_held_any_more() -> None:
    async def main() -> None:
        queue = queue_of(2)
        await queue.admit([prompt(uid) for uid in UIDS[:3]], 0)
        done, failed, filtered = await take_all(queue, "generate")
        await queue.put([(done.lease, rollouts())])
        await queue.filter([(filtered.lease, Filtered("not worth it"))])
        await queue.fail([(failed.lease, RewardError("no"))])
        (again,) = await take_all(queue, "generate")
        await queue.fail([(again.lease, RewardError("no"))])
        assert queue.renew_every_s == float("inf")
        assert await queue.renew() == []

    run_virtual(main())


def test_the_coordinator_has_nothing_to_renew_and_forgets_what_leaves() -> None:
    async def main() -> None:
        queue = queue_of(1)
        await queue.admit([prompt("0:0:0")], 0)
        await finish(queue)
        (ready,) = await take_all(queue, "train")
        assert queue.renew_every_s == float("inf")
        left = weakref.ref(ready.lease)
        del ready
        await queue.leave(["0:0:0"], 1)
        gc.collect()
        assert left() is None

    run_virtual(main())


# How groups end.


def test_ended_groups_reach_the_coordinator_with_their_reasons_and_no_columns() -> None:
    async def main() -> None:
        queue = queue_of(2)
        await queue.admit([prompt(uid) for uid in UIDS[:2]], 0)
        await do(queue, "generate", rollouts())
        filtered, failed = await take_all(queue, "reward")
        await queue.filter([(filtered.lease, Filtered("all 2 rewards are 1"))])
        await queue.fail([(failed.lease, RewardError("no verdict"))])
        (again,) = await take_all(queue, "reward")
        await queue.fail([(again.lease, RewardError("no verdict"))])
        ended = {one.uid: one for one in await take_all(queue, "train", ("scores",))}
        assert ended[filtered.uid].ended == Ended("filtered", "all 2 rewards are 1", filtered=True)
        assert ended[failed.uid].ended == Ended("reward_error", "no verdict")
        assert not ended[failed.uid].columns

    run_virtual(main())


def test_refused_commits_are_named() -> None:
    async def main() -> None:
        queue = queue_of(3)
        await queue.admit([prompt(uid) for uid in UIDS[:6]], 0)
        taken = await take_all(queue, "generate")
        entries = [(one.lease, rollouts()) for one in taken]
        assert await queue.put(entries[:4]) == []
        assert sorted(await queue.put(entries)) == sorted(one.uid for one in taken[:4])

    run_virtual(main())


# Death and stalls.


def test_the_work_of_a_dead_holder_is_free_in_every_shard() -> None:
    async def main() -> None:
        shards = local_shards(3)
        dead, alive = ExperienceQueue(shards, "worker-0"), ExperienceQueue(shards, "worker-1")
        await alive.admit([prompt(uid) for uid in UIDS], 0)
        mine = await take_all(dead, "generate")
        assert len(mine) == 20
        assert await alive.release("worker-0") == 20
        assert len(await take_all(alive, "generate")) == 20

    run_virtual(main())


def test_slow_work_is_named_and_where_groups_are_can_be_asked() -> None:
    async def main() -> None:
        shards = local_shards(3)
        slow, watcher = ExperienceQueue(shards, "worker-0"), ExperienceQueue(shards, "coordinator")
        await watcher.admit([prompt(uid) for uid in UIDS[:5]], 0)
        taken = await take_all(slow, "generate")
        await asyncio.sleep(5.0)
        found = await watcher.overdue(4.0)
        assert sorted(one.uid for one in found) == sorted(one.uid for one in taken)
        assert all(isinstance(one, Overdue) and one.holder == "worker-0" for one in found)
        places = await watcher.whereabouts([*UIDS[:2], "0:99:0"])
        assert places.keys() == set(UIDS[:2])
        assert all("held by worker-0 for 6." in place for place in places.values())
        await watcher.take_back(found)
        assert len(await slow.renew()) == 5

    run_virtual(main())


# What shards have handed out, and the user has not come to fetch.


def test_a_group_granted_for_other_columns_is_not_lost() -> None:
    async def main() -> None:
        queue = queue_of(1)
        assert not await queue.take("train", max_groups=1, columns=("scores",), wait_s=0.05)
        await queue.admit([prompt("0:0:0")], 0)
        await finish(queue)
        await asyncio.sleep(1.0)  # the first request is answered while nobody waits
        wanted = ("scores", "token_ids")
        (one,) = await queue.take("train", max_groups=1, columns=wanted, wait_s=1.0)
        assert one.columns.keys() == set(wanted)
        assert one.columns["token_ids"].tolist() == rollouts()["token_ids"].tolist()

    run_virtual(main())


def test_what_cannot_be_opened_is_still_there_for_the_next_call() -> None:
    async def main() -> None:
        queue = queue_of(2)
        await queue.admit([prompt(uid) for uid in UIDS], 0)
        await do(queue, "generate", rollouts())
        columns = ("token_ids",)
        (first,) = await queue.take("reward", max_groups=1, columns=columns, wait_s=1.0)
        await asyncio.sleep(1.0)  # the other shard has handed one out as well
        with pytest.raises(StreamError, match=r"no \['nope'\] are in the queue"):
            await queue.take("reward", max_groups=1, columns=("nope",), wait_s=1.0)
        (second,) = await queue.take("reward", max_groups=1, columns=columns, wait_s=1.0)
        held = await queue.whereabouts([first.uid, second.uid])
        assert all(phrase.startswith("held by me") for phrase in held.values())
        others = set(UIDS) - {first.uid, second.uid}
        phrases = (await queue.whereabouts(sorted(others))).values()
        assert not any(phrase.startswith("held") for phrase in phrases)

    run_virtual(main())


def test_groups_that_wait_in_the_client_do_not_expire_while_it_works_on_others() -> None:
    async def main() -> None:
        queue = queue_of(4)
        uids = {f"0:{i}:0" for i in range(12)}
        await queue.admit([prompt(uid) for uid in uids], 0)
        done = []
        for _ in range(12):
            (one,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
            await asyncio.sleep(6.0)  # each well within its lease
            assert await queue.put([(one.lease, rollouts())]) == []
            done.append((one.uid, one.lease.attempt))
        assert sorted(done) == sorted((uid, 1) for uid in uids)

    run_virtual(main())


def test_a_lease_that_a_take_finds_lost_is_told_by_the_next_renewal() -> None:
    async def main() -> None:
        queue = queue_of(1)
        await queue.admit([prompt("0:0:0")], 0)
        (one,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        await asyncio.sleep(30.0)
        (again,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        assert await queue.renew() == [one.lease]
        assert await queue.renew() == []
        assert await queue.put([(again.lease, rollouts())]) == []

    run_virtual(main())


def test_of_a_lost_lease_whose_work_was_refused_no_renewal_tells() -> None:
    async def main() -> None:
        queue = queue_of(1)
        await queue.admit([prompt("0:0:0")], 0)
        (one,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        await asyncio.sleep(30.0)
        (again,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        assert await queue.put([(one.lease, rollouts())]) == ["0:0:0"]
        assert await queue.renew() == []
        assert await queue.put([(again.lease, rollouts())]) == []

    run_virtual(main())


def test_what_a_shard_granted_is_not_handed_on_before_its_lease_is_known_to_be_good() -> None:
    async def main() -> None:
        shards = local_shards(2)
        queue = ExperienceQueue(shards, "me")
        uids = [next(uid for uid in UIDS if queue.shard_of(uid) == i) for i in range(2)]
        await queue.admit([prompt(uid) for uid in uids], 0)
        (one,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        await asyncio.sleep(6.0)  # the other shard has answered as well, and leases are due
        await queue.admit([prompt(uid) for uid in UIDS], 0)  # and they are in the logs
        for shard in shards:
            shard.kill()
        assert await queue.take("generate", max_groups=1, columns=(), wait_s=1.0) == []
        for shard in shards:
            shard.revive()
        (two,) = await queue.take("generate", max_groups=1, columns=(), wait_s=10.0)
        assert {one.uid, two.uid} == set(uids)

    run_virtual(main())


def test_a_take_ends_in_time_though_a_shard_is_away_when_leases_are_due() -> None:
    async def main() -> None:
        shards = local_shards(1)
        queue, clock = ExperienceQueue(shards, "me"), asyncio.get_running_loop().time
        await queue.admit([prompt("0:0:0")], 0)
        (one,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        await queue.admit([prompt("0:1:0")], 0)  # and the lease is in the log
        await asyncio.sleep(6.0)
        shards[0].kill()
        before = clock()
        assert await queue.take("generate", max_groups=1, columns=(), wait_s=1.0) == []
        assert clock() == before + 1.0
        shards[0].revive()
        (two,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        assert await queue.put([(one.lease, rollouts()), (two.lease, rollouts())]) == []

    run_virtual(main())


def test_a_lease_that_ended_over_a_long_silence_is_not_handed_out() -> None:
    async def main() -> None:
        queue = queue_of(2)
        await queue.admit([prompt(f"0:{i}:0") for i in range(8)], 0)
        assert await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        await asyncio.sleep(30.0)
        (one,) = await queue.take("generate", max_groups=1, columns=(), wait_s=1.0)
        assert await queue.put([(one.lease, rollouts())]) == []

    run_virtual(main())


@pytest.mark.parametrize("version", [None, "0", 1.5, True, -1, np.int64(1)])
def test_what_is_no_version_is_refused_and_leaves_no_trace(version: object) -> None:
    async def main() -> None:
        (shard,) = local_shards(1)
        queue = ExperienceQueue([shard], "me")
        await queue.admit([prompt("0:0:0")], 0)
        before = list(shard.log.records)
        with pytest.raises(ContractError, match="version"):
            await queue.admit([prompt("0:1:0")], version)  # type: ignore[arg-type]
        with pytest.raises(ContractError, match="version"):
            groups = [(prompt("0:1:0"), rollouts())]
            await queue.add(groups, version, stage="generate")  # type: ignore[arg-type]
        with pytest.raises(ContractError, match="version"):
            await queue.leave(["0:0:0"], version)  # type: ignore[arg-type]
        assert shard.log.records == before
        await queue.admit([prompt("0:1:0")], 1)

    run_virtual(main())
