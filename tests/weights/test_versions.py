"""Versions: statistics, faults and the order of pulls; waits for the served version."""

import asyncio
import gc
import math
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

from streamrl.errors import LogprobCheckError, WeightsError
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.weights import ServedVersion, WeightManifest
from streamrl.weights.versions import (
    FALLBACK_USED,
    NOT_LOADED,
    FollowerState,
    LogprobCheck,
    PullStats,
    SyncStats,
    WeightBucket,
    WeightFault,
    WeightRegistry,
    compute_weight_metrics,
    make_check_sequences,
)


def make_manifest(version: int) -> WeightManifest:
    return WeightManifest(version, (), ())


def test_the_slowest_publish_is_reported_once():
    registry = WeightRegistry(keep_versions=2)
    assert math.isnan(registry.drain_stats().publish_s)
    registry.add_manifest(make_manifest(0), publish_s=9.0)
    registry.add_manifest(make_manifest(1), publish_s=0.5)
    assert registry.drain_stats().publish_s == 9.0, "the longest since the last call"
    registry.add_manifest(make_manifest(2), publish_s=0.25)
    assert registry.drain_stats().publish_s == 0.25
    assert math.isnan(registry.drain_stats().publish_s)


class Handle:
    """Bucket of a version, which lives as long as somebody refers to it, as an object of Ray."""


def test_the_last_versions_stay_for_followers_in_the_middle_of_a_pull():
    registry = WeightRegistry(keep_versions=2)
    buckets: list[weakref.ref[Handle]] = []

    def publish(version: int) -> None:
        handle = Handle()
        buckets.append(weakref.ref(handle))
        registry.add_manifest(WeightManifest(version, (WeightBucket((), 0, ""),), (handle,)))

    def list_kept() -> list[int]:
        gc.collect()
        return [number for number, bucket in enumerate(buckets) if bucket() is not None]

    publish(0)
    publish(1)
    assert list_kept() == [0, 1]
    publish(2)
    assert list_kept() == [1, 2]
    publish(2)
    assert list_kept() == [1, 3], "a version published again replaces itself, not the one before"
    with pytest.raises(WeightsError, match="version 1 was published after 2"):
        publish(1)


def test_fallbacks_and_engine_warnings_are_reported_without_being_faults():
    reported: list[tuple[str, str, WeightFault]] = []

    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, on_fault=lambda *args: reported.append(args))
        warnings = ("FusedMoE: Failed to load weights",)
        pull = PullStats(fallback_reason="the broadcast came too late", warnings=warnings)
        await registry.wait_for_newer("generator-0", FollowerState(4, pull), wait_s=0.0)
        assert registry.drain_stats().num_faults == 0

    run_virtual(scenario())
    assert reported == [
        (FALLBACK_USED, "generator-0", WeightFault(4, "the broadcast came too late")),
        (NOT_LOADED, "generator-0", WeightFault(4, "FusedMoE: Failed to load weights")),
    ]


def test_skew_counts_only_followers_with_a_version():
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        registry.add_manifest(make_manifest(6))
        for follower, version in {"generator-0": 4, "generator-1": -1}.items():
            await registry.wait_for_newer(follower, FollowerState(version), wait_s=0.0)
        assert registry.drain_stats().max_version_lag == 2

    run_virtual(scenario())


def test_critics_count_for_bytes_but_not_for_pauses():
    policy = SyncStats([PullStats(1.0, 0.25, 100, 7, logprob_diff=0.5, copied_bytes=40)], 0.5, 1, 2)
    critic = SyncStats([PullStats(4.0, 3.0, 900, 9)], 2.0, 3, 1)
    metrics = compute_weight_metrics(policy, [critic, SyncStats([], math.nan, 0, 0)])
    assert metrics == {
        "weights/skew_max": 3,
        "weights/publish_s": 2.0,
        "weights/pull_s": 4.0,
        "weights/pause_s": 0.25,
        "weights/bytes": 1000,
        "weights/copied_bytes": 40,
        "weights/bytes_per_s": 200.0,
        "weights/interrupted": 7,
        "weights/probe_diff": 0.5,
        "weights/faults": 3,
    }


async def test_waiters_resume_when_their_version_is_served():
    served = ServedVersion("generator 2")
    waiting = [asyncio.create_task(served.wait_for_version(v)) for v in (0, 1, 3)]
    await asyncio.sleep(0)
    served.advance_to(0)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False, False]
    served.advance_to(2)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, True, False]
    served.advance_to(3)
    assert await asyncio.gather(*waiting) == [0, 2, 3]


async def test_a_model_that_skips_versions_waits_only_for_the_due_version():
    served = ServedVersion(
        "reference-0", version=3, resolve_due_version=lambda version: version - version % 4
    )
    assert await served.wait_for_version(3) == 3
    waiting = asyncio.create_task(served.wait_for_version(6))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    served.advance_to(4)
    assert await waiting == 4


@pytest.mark.parametrize("version", [3, 2, -1])
async def test_a_version_never_goes_backwards(version: int):
    served = ServedVersion("generator 2", version=3)
    with pytest.raises(WeightsError, match=f"generator 2 serves version 3: .* {version}"):
        served.advance_to(version)
    assert served.version == 3


def test_a_follower_that_was_removed_gets_no_version():
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        dead = asyncio.create_task(registry.wait_for_newer("dead", FollowerState(-1), wait_s=20.0))
        await asyncio.sleep(1.0)
        registry.remove_follower("dead")
        registry.add_manifest(make_manifest(0))
        assert await dead is None
        assert await registry.wait_for_newer("alive", FollowerState(-1), wait_s=1.0)

    run_virtual(scenario())


def test_the_first_token_is_ignored_and_nan_fails():
    logprobs = [np.array([0, -1, -2], np.float32)]
    check = LogprobCheck([np.array([3, 1, 4], np.int32)], logprobs, limit=0.1)
    assert check.compare_logprobs([np.array([9, -1, -2.0625], np.float32)], "generator-0") == 0.0625
    with pytest.raises(LogprobCheckError, match="by nan nats"):
        check.compare_logprobs([np.array([0, math.nan, -2], np.float32)], "generator-0")


def repeat(*parts: tuple[int, float]) -> np.ndarray:
    """Return logprobs of so many tokens each, after the first token."""
    return np.concatenate([np.zeros(1), *(np.full(count, nats) for count, nats in parts)])


SPREAD = np.array([0.0, *[-5.0, -25.0] * 50])
"""A standard deviation of 10 nats: rounding of large logits may be three times the limit."""


@pytest.mark.parametrize(
    ("ours", "theirs", "limit"),
    [
        (repeat((1000, 0.09)), 0.0, ""),
        (repeat((1000, 0.11)), 0.0, "0.1"),  # the mean
        (repeat((985, 0.01), (15, 5.0)), 0.0, ""),  # flipped experts
        (repeat((960, 0.01), (40, 5.0)), 0.0, r"0\.\d+"),
        (repeat((850, 0.0), (150, 0.3)), 0.0, "0.1"),  # the quantile
        (repeat((500, 20.0), (500, 40.0)), 0.0, "0.3"),
        (SPREAD, SPREAD + 0.29, ""),
        (SPREAD, SPREAD + 0.31, "0.3"),
    ],
)
def test_limits_hold_for_mean_and_quantile_and_grow_with_the_spread(
    ours: np.ndarray, theirs: np.ndarray | float, limit: str
):
    check = LogprobCheck([np.zeros(len(ours), np.int32)], [ours], limit=0.1)
    fault = rf"probe_limit=0\.1 these may be {limit} and"
    with pytest.raises(LogprobCheckError, match=fault) if limit else nullcontext():
        check.compare_logprobs([np.zeros_like(ours) + theirs], "generator-0")


@pytest.mark.parametrize(("max_length", "num_tokens"), [(20, 19), (2, 1)])
def test_check_sequences_are_reproducible_and_fit_the_model(max_length: int, num_tokens: int):
    sequences = make_check_sequences(vocab_size=50, max_length=max_length)
    repeated = make_check_sequences(vocab_size=50, max_length=max_length)
    assert all(np.array_equal(a, b) for a, b in zip(sequences, repeated, strict=True))
    assert {len(ids) for ids in sequences} == {num_tokens}
    assert all(ids.min() >= 0 and ids.max() < 50 for ids in sequences)
    logprobs = [np.zeros(num_tokens, np.float32)] * len(sequences)
    check = LogprobCheck(sequences, logprobs, limit=0.1)
    assert check.compare_logprobs(logprobs, "generator-0") == 0.0
