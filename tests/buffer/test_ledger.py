"""Ledger: admitted = trained + filtered + dropped + in flight."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import Ledger
from streamrl.errors import LedgerError


def make_ledger(*uids: str) -> Ledger:
    ledger = Ledger()
    for uid in uids:
        ledger.mark_admitted(uid, 0)
    return ledger


def test_ledger_counts_every_prompt_in_one_state():
    ledger = make_ledger(*"abcd")
    ledger.mark_trained("a")
    ledger.mark_filtered("b")
    ledger.mark_dropped("c", "deadline")
    counts = ledger.check_balance(["d"])
    assert str(counts) == "admitted 4 = trained 1 + filtered 1 + dropped 1 + in flight 1"
    assert counts.drops == (("deadline", 1),)


def test_training_a_group_twice_raises():
    ledger = make_ledger("a")
    ledger.mark_trained("a")
    with pytest.raises(LedgerError, match="prompt a is trained, but it is not in flight"):
        ledger.mark_trained("a")


def test_admitting_a_prompt_twice_raises():
    ledger = make_ledger("a")
    with pytest.raises(LedgerError, match="in flight already"):
        ledger.mark_admitted("a", 1)


def test_group_lost_by_the_queue_is_named():
    with pytest.raises(LedgerError, match=r"lost from the queue: \['b'\]"):
        make_ledger("a", "b").check_balance(["a"])


def test_group_left_in_the_queue_is_named():
    ledger = make_ledger("a")
    ledger.mark_trained("a")
    with pytest.raises(LedgerError, match=r"ended but in it: \['a'\]"):
        ledger.check_balance(["a"])


def test_pending_insert_is_not_missing():
    make_ledger("a", "b").check_balance(["a"], inserted=["a"])


def test_ended_groups_refund_their_credit_unless_trained():
    ledger = make_ledger(*"abcd")
    ledger.mark_trained("a")
    ledger.mark_filtered("b")
    ledger.mark_dropped("c", "stale")
    assert ledger.num_credits_spent == 2


@given(
    st.lists(st.sampled_from(["admit", "train", "filter", "drop"]), max_size=60),
    st.randoms(),
)
def test_any_history_balances_and_round_trips(moves: list[str], random: object):
    ledger, serial = Ledger(), 0
    for move in moves:
        if move == "admit":
            ledger.mark_admitted(f"p{serial}", serial // 3)
            serial += 1
        elif ledger.in_flight:
            uid = random.choice(sorted(ledger.in_flight))  # type: ignore[attr-defined]
            {
                "train": ledger.mark_trained,
                "filter": ledger.mark_filtered,
                "drop": lambda u: ledger.mark_dropped(u, "x"),
            }[move](uid)
    counts = ledger.check_balance(list(ledger.in_flight))
    restored = Ledger.from_state(json.loads(json.dumps(ledger.state_dict())))
    assert restored.counts == counts
    assert list(restored.in_flight.items()) == list(ledger.in_flight.items())
    assert restored.state_dict() == ledger.state_dict()
