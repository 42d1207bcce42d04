"""Staleness credits: bounds on how far generation runs ahead of training."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import AdmissionController, Ledger
from streamrl.buffer.staleness_credits import (
    check_shard_bytes,
    compute_credit_limit,
)
from streamrl.errors import ConfigError
from tests.virtual_time import in_virtual_time


def make(
    ledger: Ledger, *, depth: int = 1, steps: int = 10, capacity: int = 8
) -> AdmissionController:
    return AdmissionController(
        ledger, depth=depth, groups_per_step=4, capacity_groups=capacity, total_groups=4 * steps
    )


def admit(ledger: Ledger, *groups: int, version: int = 0) -> None:
    for group in groups:
        ledger.mark_admitted(str(group), version)


def train(ledger: Ledger, *groups: int) -> None:
    for group in groups:
        ledger.mark_trained(str(group))


@in_virtual_time
async def test_announced_version_and_ended_group_bring_credits_and_wake_the_admission_loop():
    ledger, admission = make_full()
    assert await admission.wait_for_credit(3.0) == 0
    waiting = asyncio.create_task(admission.wait_for_credit(100.0))
    await asyncio.sleep(5.0)
    train(ledger, *range(4))
    assert admission.num_credits == 0, "training alone refunds no credits"
    admission.advance_version(1)
    assert await waiting == 4
    admit(ledger, *range(8, 12))
    waiting = asyncio.create_task(admission.wait_for_credit(100.0))
    await asyncio.sleep(5.0)
    ledger.mark_filtered("9")
    admission.refund_credit()
    assert await waiting == 1
    assert asyncio.get_running_loop().time() == 13.0


def test_version_that_is_not_announced_brings_no_credits():
    """Credits of unpublished versions would let version 0 sample for step 2, beyond the bound."""
    ledger, admission = make_full()
    train(ledger, *range(4))
    admission.advance_version(1, announced=False)
    assert admission.num_credits == 0
    train(ledger, *range(4, 8))
    admission.advance_version(2)
    assert admission.num_credits == 8, "version 2 brings the credits of two steps"


def test_admission_stops_at_total_groups():
    assert make(Ledger(), steps=1).num_credits == 4


def make_full() -> tuple[Ledger, AdmissionController]:
    """Return an admission controller that has spent all its credits."""
    ledger = Ledger()
    admission = make(ledger)
    admit(ledger, *range(8))
    return ledger, admission


def test_shard_too_small_for_a_step_raises_with_the_calculation():
    message = (
        r"^queue.store_share=0.5: 8.00 MB for a shard, must be at least 10.00 MB"
        r" = 4 \* 2.50 MB, the largest group \(pipeline.groups_per_step 4\):"
        r" raise placement.object_store_mb 1.3 times$"
    )
    facts: dict[str, Any] = {
        "group_bytes": 5 << 19,
        "groups": {"pipeline.groups_per_step": 4, "twice data.replay.size": 0},
        "location": "queue.store_share=0.5",
        "remedy": "placement.object_store_mb",
    }
    with pytest.raises(ConfigError, match=message):
        check_shard_bytes(8 << 20, **facts)
    check_shard_bytes(10 << 20, **facts)
    with pytest.raises(ConfigError, match=r"30.00 MB = 12 \* .* 4 \+ twice data.replay.size 8\)"):
        groups = {**facts["groups"], "twice data.replay.size": 8}
        check_shard_bytes(10 << 20, **{**facts, "groups": groups})


@given(st.integers(0, 8), st.integers(1, 64), st.integers(0, 100))
def test_last_credit_of_a_version_is_trained_depth_steps_later(
    depth: int, groups: int, version: int
):
    last_credit = compute_credit_limit(version, depth=depth, groups_per_step=groups) - 1
    assert last_credit // groups - version == depth
