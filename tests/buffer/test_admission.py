"""Credits: how far generation may run ahead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import Admission, Ledger
from streamrl.buffer.admission import check_capacity, credit_limit
from streamrl.errors import ConfigError
from tests.virtual_clock import run_virtual


def make(ledger: Ledger, *, staleness: int = 1, steps: int = 10, capacity: int = 8) -> Admission:
    return Admission(
        ledger,
        max_staleness=staleness,
        groups_per_step=4,
        capacity_groups=capacity,
        total_groups=4 * steps,
    )


def test_on_policy_admits_exactly_one_step_of_groups() -> None:
    ledger = Ledger()
    admission = make(ledger, staleness=0, capacity=4)
    assert admission.credit == 4
    for i in range(4):
        ledger.admit(str(i))
    assert admission.credit == 0


def test_one_step_of_staleness_admits_one_step_more() -> None:
    assert make(Ledger(), staleness=1).credit == 8


def test_a_new_version_brings_credits_for_one_step() -> None:
    ledger = Ledger()
    admission = make(ledger)
    for i in range(8):
        ledger.admit(str(i))
    for i in range(4):
        ledger.train(str(i))
    assert admission.credit == 0, "trained groups do not come back as credits by themselves"
    admission.advance(1)
    assert admission.credit == 4


def test_a_dropped_group_returns_its_credit() -> None:
    ledger = Ledger()
    admission = make(ledger)
    for i in range(8):
        ledger.admit(str(i))
    ledger.drop("3", "reward_error")
    assert admission.credit == 1


def test_no_prompt_is_admitted_that_no_step_will_train() -> None:
    ledger = Ledger()
    admission = make(ledger, steps=1)
    assert admission.credit == 4


def test_waiting_for_credit_ends_when_a_version_is_published() -> None:
    async def main() -> int:
        import asyncio

        ledger = Ledger()
        admission = make(ledger)
        for i in range(8):
            ledger.admit(str(i))
        waiting = asyncio.create_task(admission.wait_credit(100.0))
        await asyncio.sleep(5.0)
        assert not waiting.done()
        for i in range(4):
            ledger.train(str(i))
        admission.advance(1)
        return await waiting

    assert run_virtual(main()) == 4


def test_waiting_for_credit_gives_up_at_its_deadline() -> None:
    async def main() -> int:
        ledger = Ledger()
        admission = make(ledger)
        for i in range(8):
            ledger.admit(str(i))
        return await admission.wait_credit(3.0)

    assert run_virtual(main()) == 0


def test_a_queue_that_would_deadlock_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"capacity_groups=7: must be at least 8 = .*1 \+ 1.*4"):
        check_capacity(7, max_staleness=1, groups_per_step=4)
    check_capacity(8, max_staleness=1, groups_per_step=4)


@given(st.integers(0, 8), st.integers(1, 64), st.integers(0, 100))
def test_the_last_credit_of_a_version_is_trained_within_the_bound(
    staleness: int, groups: int, version: int
) -> None:
    last = credit_limit(version, max_staleness=staleness, groups_per_step=groups) - 1
    assert last // groups - version == staleness
