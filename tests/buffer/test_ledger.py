"""The conservation law."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer import Ledger
from streamrl.errors import LedgerError


def test_every_prompt_is_in_one_state() -> None:
    ledger = Ledger()
    for uid in "abcd":
        ledger.admit(uid)
    ledger.train("a")
    ledger.filter("b")
    ledger.drop("c", "reward_error")
    counts = ledger.check(held=["d"])
    assert str(counts) == "admitted 4 = trained 1 + filtered 1 + dropped 1 + in flight 1"
    assert counts.drops == (("reward_error", 1),)


def test_training_a_group_twice_is_an_error() -> None:
    ledger = Ledger()
    ledger.admit("a")
    ledger.train("a")
    with pytest.raises(LedgerError, match="prompt a is trained, but it is not in flight"):
        ledger.train("a")


def test_admitting_a_prompt_twice_is_an_error() -> None:
    ledger = Ledger()
    ledger.admit("a")
    with pytest.raises(LedgerError, match="in flight already"):
        ledger.admit("a")


def test_a_group_the_queue_lost_is_named() -> None:
    ledger = Ledger()
    ledger.admit("a")
    ledger.admit("b")
    with pytest.raises(LedgerError, match=r"lost from the queue: \['b'\]"):
        ledger.check(held=["a"])


def test_a_group_the_queue_kept_too_long_is_named() -> None:
    ledger = Ledger()
    ledger.admit("a")
    ledger.train("a")
    with pytest.raises(LedgerError, match=r"ended but in it: \['a'\]"):
        ledger.check(held=["a"])


def test_a_prompt_on_its_way_into_a_shard_is_not_missed() -> None:
    ledger = Ledger()
    ledger.admit("a")
    ledger.admit("b")
    ledger.check(held=["a"], booked=["a"])


@given(st.lists(st.sampled_from(["admit", "train", "filter", "drop"]), max_size=60), st.randoms())
def test_any_history_balances_and_survives_a_checkpoint(moves: list[str], random: object) -> None:
    ledger, serial = Ledger(), 0
    for move in moves:
        if move == "admit":
            ledger.admit(f"p{serial}")
            serial += 1
        elif ledger.in_flight:
            uid = random.choice(sorted(ledger.in_flight))  # type: ignore[attr-defined]
            {"train": ledger.train, "filter": ledger.filter, "drop": lambda u: ledger.drop(u, "x")}[
                move
            ](uid)
    counts = ledger.check(held=list(ledger.in_flight))
    restored = Ledger.from_state(json.loads(json.dumps(ledger.state_dict())))
    assert restored.counts == counts
    assert list(restored.in_flight) == list(ledger.in_flight)
