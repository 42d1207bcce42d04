"""A shard: readiness, commits, who gets what, and what it reports."""

import asyncio
import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.buffer import QueueConfig, Shard
from streamrl.buffer.blob import encode
from streamrl.buffer.exchange import Commit
from streamrl.buffer.leases import Request
from streamrl.errors import ConfigError, JournalError, RewardError, StreamError
from streamrl.messages import Columns, Ended, Filtered, Lease, column_sizes
from tests.buffer.shards import (
    REFERENCE,
    SCORES,
    WORK,
    admit,
    commit,
    do,
    entry,
    finish,
    make_shard,
    on_shard,
    put,
    rollouts,
    take,
)
from tests.fake_shards import MemoryLog
from tests.virtual_clock import run_virtual

# Readiness.


def test_a_stage_sees_a_group_once_its_columns_are_there() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a", version=3)
        assert not await take(shard, "reward")
        (generating,) = await take(shard, "generate")
        assert generating.prompt is not None and generating.admitted_version == 3
        assert generating.prompt.uid == "a"
        assert await put(shard, (generating.lease, rollouts())) == []
        (scoring,) = await take(shard, "reward", ("token_ids",))
        assert scoring.columns["token_ids"].tolist() == [1, 2, 5, 6, 7] * 2
        assert not await take(shard, "train")

    on_shard(test)


def test_scorers_work_on_the_same_group_side_by_side() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        await do(shard, "generate")
        (reward,) = await take(shard, "reward")
        (reference,) = await take(shard, "reference")
        await put(shard, (reference.lease, REFERENCE))
        assert not await take(shard, "train")
        await put(shard, (reward.lease, SCORES))
        (training,) = await take(shard, "train")
        assert training.prompt is None, "the coordinator has no use for prompts"
        assert training.info is not None
        assert training.info.lengths == (5, 5)
        assert training.info.num_loss_tokens == 6
        await shard.leave(["a"], 1)
        assert shard.stats().uids == ()

    on_shard(test)


def test_a_stage_is_given_the_blobs_of_the_columns_it_asks_for_and_no_others() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        await finish(shard)
        (training,) = await take(shard, "train", ("scores", "ref_logprobs"))
        assert training.columns.keys() == {"scores", "ref_logprobs"}

    on_shard(test)


def test_a_leased_group_is_not_handed_out_twice() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        assert len(await take(shard, "generate")) == 1
        assert not await take(shard, "generate")

    on_shard(test)


def test_the_earliest_admitted_goes_first() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "c", "a", "b")
        assert [g.uid for g in await take(shard, "generate", max_groups=2)] == ["c", "a"]

    on_shard(test)


def test_a_group_remembers_the_version_being_trained_when_it_became_ready() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a", "b", version=4)
        await finish(shard, max_groups=1)
        await shard.leave([], 5)
        await finish(shard, max_groups=1)
        await shard.leave([], 6)
        assert [g.ready_version for g in await take(shard, "train")] == [4, 5]

    on_shard(test)


# Who gets what.


def test_those_who_wait_share_what_comes() -> None:
    async def test(shard: Shard) -> None:
        waiting = [
            asyncio.create_task(take(shard, "generate", wait_s=60.0, holder=f"generator-{i}"))
            for i in range(3)
        ]
        await asyncio.sleep(1.0)
        await admit(shard, *"abcdefg")
        taken = await asyncio.gather(*waiting)
        assert [len(groups) for groups in taken] == [3, 2, 2]
        assert [g.lease.holder for groups in taken for g in groups][2:4] == [
            "generator-0",
            "generator-1",
        ]

    on_shard(test)


def test_whoever_does_not_wait_any_more_has_no_share() -> None:
    async def test(shard: Shard) -> None:
        gone = asyncio.create_task(take(shard, "generate", wait_s=60.0, holder="generator-0"))
        late = asyncio.create_task(take(shard, "generate", wait_s=60.0, holder="generator-1"))
        await asyncio.sleep(1.0)
        gone.cancel()
        await asyncio.sleep(1.0)
        await admit(shard, *"abcd")
        assert len(await late) == 4

    on_shard(test)


@pytest.mark.parametrize(
    ("max_tokens", "taken"), [(None, 4), (40, 4), (39, 3), (20, 2), (19, 1), (1, 1)]
)
def test_groups_handed_out_together_hold_so_many_tokens_or_are_one(
    max_tokens: int | None, taken: int
) -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, *"abcd")
        await do(shard, "generate")
        # Each group has 10 tokens.
        assert len(await take(shard, "reward", max_tokens=max_tokens)) == taken

    on_shard(test)


def test_waiting_for_work_ends_at_its_deadline() -> None:
    async def test(shard: Shard) -> None:
        assert await take(shard, "train", wait_s=7.0) == []
        assert asyncio.get_running_loop().time() == pytest.approx(7.0, abs=0.1)

    on_shard(test)


def test_the_same_request_again_is_given_the_same_leases() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, *"abc")
        first = await take(shard, "generate", max_groups=2, request="me/0")
        again = await take(shard, "generate", max_groups=2, request="me/0")
        assert [g.lease for g in again] == [g.lease for g in first]
        assert again[0].prompt is not None and again[0].prompt.uid == "a"
        (other,) = await take(shard, "generate", max_groups=2, request="me/1")
        assert other.uid == "c"
        assert not await take(shard, "generate", holder="you", request="me/0")
        await put(shard, (first[0].lease, rollouts()))
        left = await take(shard, "generate", max_groups=2, request="me/0")
        assert [g.lease for g in left] == [first[1].lease]

    on_shard(test)


# Commits.


def test_late_and_duplicate_commits_are_refused_by_their_token() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        (slow,) = await take(shard, "generate")
        await asyncio.sleep(11.0)
        (again,) = await take(shard, "generate")
        assert again.lease.attempt == 2
        assert await put(shard, (slow.lease, rollouts())) == ["a"]
        assert await put(shard, (again.lease, rollouts())) == []
        assert await put(shard, (again.lease, rollouts())) == ["a"], "a duplicate commit is refused"
        assert shard.stats().counts == {"redelivered": 1, "hedged": 0, "refused": 2}

    on_shard(test)


def test_of_a_commit_that_comes_twice_at_once_one_is_taken() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        (one,) = await take(shard, "generate")
        generated = (one.lease, rollouts())
        assert await put(shard, generated, generated) == ["a"]
        (scoring,) = await take(shard, "reward")
        scored = (scoring.lease, SCORES)
        refused = await asyncio.gather(*(put(shard, scored) for _ in range(3)))
        assert refused == [[], ["a"], ["a"]]

    on_shard(test)


def test_while_a_commit_is_being_written_its_work_is_nobody_elses() -> None:
    async def main() -> None:
        shard = make_shard(log=MemoryLog(write_s=30.0), hedge_s=1.0)
        await admit(shard, "a", wait_s=100.0)
        (one,) = await take(shard, "generate")
        writing = asyncio.create_task(put(shard, (one.lease, rollouts())))
        await asyncio.sleep(1.0)
        assert not await take(shard, "generate", holder="you", wait_s=15.0)
        assert shard.renew([one.lease]) == [one.lease]
        assert not await take(shard, "reward"), "what is not yet safe is not handed on"
        assert await writing == []
        scoring, reference = await take(shard, "reward"), await take(shard, "reference")
        writing = asyncio.create_task(put(shard, (scoring[0].lease, SCORES)))
        await asyncio.sleep(1.0)
        shard.fail([(reference[0].lease, RewardError("no"))])
        assert not await take(shard, "reward", holder="you"), "though the group has changed"
        assert await writing == []

    run_virtual(main())


def test_a_commit_is_for_nothing_if_its_group_ends_or_leaves_while_it_is_written() -> None:
    async def main() -> None:
        shard = make_shard(log=MemoryLog(write_s=3.0), max_attempts=1)
        await admit(shard, *"ab", wait_s=10.0)
        await do(shard, "generate")
        references = await take(shard, "reference")
        ending, leaving = await take(shard, "reward")
        left = asyncio.create_task(shard.leave(["b"], 1))
        writing = asyncio.create_task(put(shard, *((one.lease, REFERENCE) for one in references)))
        await asyncio.sleep(1.0)
        shard.fail([(ending.lease, RewardError("no verdict"))])
        await left
        await writing
        assert leaving.uid == "b" and shard.stats().uids == ("a",)
        (ended,) = await take(shard, "train")
        assert ended.ended == Ended("reward_error", "no verdict")
        assert shard.stats().num_bytes == 0

    run_virtual(main())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "stage reward put no \\['scores'\\] for a"),
        ({"scores": np.ones(3, np.float32)}, r"scores: float32\[3\], wanted float32\[2\]"),
        ({"scores": np.ones(2, np.int64)}, r"scores: int64\[2\], wanted float32\[2\]"),
    ],
)
def test_columns_that_are_not_as_declared_are_refused(
    columns: Mapping[str, Any], message: str
) -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        await do(shard, "generate")
        (scoring,) = await take(shard, "reward")
        with pytest.raises(ValueError, match=message):
            await put(shard, (scoring.lease, columns))

    on_shard(test)


def test_a_bad_commit_leaves_the_good_ones_beside_it_to_be_made_again() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, *"ab")
        await do(shard, "generate")
        good, bad = await take(shard, "reward")
        with pytest.raises(ValueError, match="for b"):
            await put(shard, (good.lease, SCORES), (bad.lease, {}))
        assert await put(shard, (good.lease, SCORES), (bad.lease, SCORES)) == []

    on_shard(test)


def test_columns_beyond_those_declared_are_kept() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        await do(shard, "generate")
        (scoring,) = await take(shard, "reward")
        more = {**SCORES, "reward/exact": np.zeros(2, np.float32)}
        await put(shard, (scoring.lease, more))
        (blobs,) = shard.read(["a"], ["reward/exact"])
        assert len(blobs) == 1

    on_shard(test)


def test_an_error_of_the_journal_reaches_whoever_commits() -> None:
    class FullDisk(MemoryLog):
        async def append(self, records: Any) -> None:
            if any(record.meta["kind"] == "put" for record in records):
                raise JournalError("no space left")
            await super().append(records)

    async def main() -> None:
        shard = make_shard(log=FullDisk())
        await admit(shard, "a")
        (one,) = await take(shard, "generate")
        with pytest.raises(JournalError, match="no space left"):
            await put(shard, (one.lease, rollouts()))
        assert not await take(shard, "reward")

    run_virtual(main())


# Groups that end.


def test_a_group_that_fails_too_often_goes_to_the_coordinator_as_dropped() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        await do(shard, "generate")
        for _ in range(2):
            assert not await take(shard, "train")
            (scoring,) = await take(shard, "reward")
            shard.fail([(scoring.lease, RewardError("no verdict"))])
        (dropped,) = await take(shard, "train", ("scores",))
        assert dropped.ended == Ended("reward_error", "no verdict")
        assert not await take(shard, "reference"), "nobody works on what is given up"
        assert shard.stats().num_bytes == 0
        await shard.leave(["a"], 0)
        assert shard.stats().uids == ()

    on_shard(test)


def test_failures_of_one_stage_are_not_those_of_another() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        await do(shard, "generate")
        for stage in ("reward", "reference"):
            (one,) = await take(shard, stage)
            shard.fail([(one.lease, RewardError("no verdict"))])
        await do(shard, "reward", "reference")
        (training,) = await take(shard, "train")
        assert training.ended is None

    on_shard(test)


def test_a_filtered_group_goes_to_the_coordinator_with_the_reason() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        await do(shard, "generate")
        (reference,) = await take(shard, "reference")
        (scoring,) = await take(shard, "reward")
        shard.filter([(scoring.lease, Filtered("all 2 rewards are 1"))])
        shard.filter([(scoring.lease, Filtered("again"))])
        (out,) = await take(shard, "train")
        assert out.ended == Ended("filtered", "all 2 rewards are 1", filtered=True)
        assert await put(shard, (reference.lease, REFERENCE)) == ["a"], "its work is in vain"

    on_shard(test)


def test_whose_lease_is_void_can_neither_fail_nor_filter_a_group() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        (slow,) = await take(shard, "generate")
        await asyncio.sleep(11.0)
        (again,) = await take(shard, "generate")
        shard.fail([(slow.lease, RewardError("late"))])
        shard.filter([(slow.lease, Filtered("late"))])
        assert shard.renew([again.lease]) == []
        assert not await take(shard, "train")

    on_shard(test)


# What it reports and gives away.


def test_depth_is_the_mean_over_time_not_the_moment() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, *"ab")
        await asyncio.sleep(3.0)
        await take(shard, "generate")
        await asyncio.sleep(1.0)
        figures = await shard.leave([], 1)
        assert figures.depth["generate"] == pytest.approx(1.5)
        await asyncio.sleep(1.0)
        assert (await shard.leave([], 2)).depth["generate"] == 0.0

    on_shard(test)


def test_figures_are_those_since_the_last_step_whatever_leaves_within_it() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, *"ab")
        (late, _) = await take(shard, "generate")
        await asyncio.sleep(11.0)
        await put(shard, (late.lease, rollouts()))
        await take(shard, "generate")
        for _ in range(2):
            # A group that ended leaves in the middle of the step.
            figures = await shard.leave(["b"], 0)
            assert figures.counts == {"redelivered": 2, "hedged": 0, "refused": 1}
        figures = await shard.leave([], 1)
        assert figures.counts == {"redelivered": 2, "hedged": 0, "refused": 1}
        assert (await shard.leave([], 1)).counts == dict.fromkeys(figures.counts, 0)

    on_shard(test)


def test_the_size_is_that_of_the_columns_and_the_age_that_of_the_oldest() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        await asyncio.sleep(2.0)
        await admit(shard, "b")
        await do(shard, "generate", "reward", max_groups=1)
        stats = shard.stats()
        assert stats.num_bytes == sum(len(encode(WORK[s])) for s in ("generate", "reward"))
        assert stats.oldest_age_s == pytest.approx(2.0)
        assert stats.uids == ("a", "b")

    on_shard(test)


def test_where_a_group_is_can_be_asked() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, *"ab")
        await take(shard, "generate", max_groups=1, holder="generator-0")
        await asyncio.sleep(2.0)
        assert shard.whereabouts(["a", "b", "c"]) == {
            "a": "held by generator-0 for 2.0 s (generate, attempt 1), admitted 2.0 s ago",
            "b": "ready for generate, admitted 2.0 s ago",
        }

    on_shard(test)


def test_columns_are_read_without_a_lease() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, *"ab")
        await finish(shard)
        found = shard.read(["b", "a"], ["scores", "ref_logprobs"])
        assert [len(blobs) for blobs in found] == [2, 2]
        await shard.leave(["a"], 1)
        with pytest.raises(StreamError, match="group a is neither in the queue nor in its journal"):
            shard.read(["a"], ["scores"])

    on_shard(test)


def test_leaving_may_be_repeated_and_versions_only_grow() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a", version=3)
        await finish(shard)
        for version in (5, 4):
            await shard.leave(["a", "unknown"], version)
        assert shard.stats().uids == ()
        await admit(shard, "b", version=4)
        await finish(shard)
        (ready,) = await take(shard, "train")
        assert ready.ready_version == 5

    on_shard(test)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shards", 0),
        ("lease_s", 0.0),
        ("max_attempts", 0),
        ("store_share", 0.0),
        ("store_share", 1.5),
        ("on_failed_group", "hope"),
        ("hedge_s", 0.0),
    ],
)
def test_impossible_queue_settings_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"queue\.{key}={value}: must be"):
        QueueConfig(**{key: value})


def test_a_shard_forgets_the_groups_that_have_left() -> None:
    async def test(shard: Shard) -> None:
        left = []
        for uid in ("a", "b", "c"):
            await admit(shard, uid)
            await finish(shard)
            (one,) = await take(shard, "train")
            left.append(weakref.ref(one.lease))
            await shard.leave([uid], 1)
            del one
        await asyncio.sleep(11.0)
        assert not await take(shard, "train")
        gc.collect()
        assert [lease() for lease in left] == [None] * 3

    on_shard(test)


# Groups that are made elsewhere.


def made(uid: str, columns: Columns) -> Commit:
    return commit(Lease(0, uid, "generate", 0, 0.0), columns)


def test_a_group_comes_in_with_what_a_stage_has_made_of_it() -> None:
    async def test(shard: Shard) -> None:
        for _ in range(2):
            await shard.add([entry("a", 2)], [made("a", rollouts(version=2))], wait_s=1.0)
        assert not await take(shard, "generate")
        (scoring,) = await take(shard, "reward", ("policy_version",))
        assert scoring.columns["policy_version"].max() == 2
        await put(shard, (scoring.lease, SCORES))
        await do(shard, "reference")
        (training,) = await take(shard, "train")
        assert (training.admitted_version, training.ready_version) == (2, 2)

    on_shard(test)


def test_a_group_whose_prompt_alone_got_into_the_journal_is_completed() -> None:
    async def test(shard: Shard) -> None:
        await admit(shard, "a")
        await shard.add([entry("a")], [made("a", rollouts())], wait_s=1.0)
        assert not await take(shard, "generate")
        assert [one.uid for one in await take(shard, "reward")] == ["a"]

    on_shard(test)


def test_of_groups_with_bad_columns_none_comes_in() -> None:
    async def test(shard: Shard) -> None:
        columns = {**rollouts(), "loss_mask": np.ones(3, np.bool_)}
        bad = replace(made("b", rollouts()), sizes=column_sizes(columns))
        with pytest.raises(ValueError, match=r"loss_mask: bool\[3\], wanted bool\[10\]"):
            await shard.add([entry("a"), entry("b")], [made("a", rollouts()), bad], wait_s=1.0)
        assert shard.stats().uids == ()

    on_shard(test)


def test_prompts_are_opaque_to_the_shard() -> None:
    async def test(shard: Shard) -> None:
        await shard.admit([("a", b"not a pickle", 0)], wait_s=1.0)
        (grant,) = await shard.take(Request("generate", "me", 1), wait_s=0.0)
        assert grant.prompt == b"not a pickle"

    on_shard(test)
