"""Step assembler: the groups that enter a step, reserved slots, late groups."""

import pytest

from streamrl.buffer import StepAssembler
from streamrl.buffer.run_log import TrainedGroup
from streamrl.buffer.staleness_credits import OversamplingController
from streamrl.errors import StaleGroupError
from streamrl.messages import Experience, GroupInfo
from tests.rollouts import make_ready_group


def make_assembler(
    staleness: int,
    groups: int,
    *,
    drops_stale: bool = False,
    oversample: float = 1.0,
    **admitted: int,
) -> StepAssembler:
    step_assembler = StepAssembler(
        max_staleness=staleness,
        groups_per_step=groups,
        drops_stale=drops_stale,
        oversampling=OversamplingController(oversample, groups_per_step=groups),
    )
    for uid, version in admitted.items():
        step_assembler.admit_group(uid, version)
    return step_assembler


def uids(groups: list[Experience]) -> list[str]:
    return [g.uid for g in groups]


def test_groups_enter_out_of_order_while_slots_are_free():
    steps = make_assembler(1, 2, a=0, b=0, c=1, d=1)
    steps.offer_groups([make_ready_group("d", 1)])
    assert uids(steps.draw_groups(0)) == ["d"]
    steps.offer_groups([make_ready_group("a", 0)])
    assert uids(steps.draw_groups(0)) == ["a"]
    assert steps.is_complete


def test_group_due_in_this_step_keeps_its_slot():
    steps = make_assembler(1, 2, a=0, b=0, c=1, d=1)
    steps.offer_groups([make_ready_group("c", 1), make_ready_group("d", 1)])
    assert steps.pending_uids == ["a", "b"]
    assert uids(steps.draw_groups(1)) == [], "both slots are reserved for a and b"
    steps.offer_groups([make_ready_group("b", 0)])
    assert uids(steps.draw_groups(1)) == ["b"]
    steps.offer_groups([make_ready_group("a", 0)])
    assert uids(steps.draw_groups(1)) == ["a"]
    steps.finish_step()
    assert uids(steps.draw_groups(2)) == ["c", "d"]


def test_earliest_deadline_enters_first():
    steps = make_assembler(2, 1, a=1, b=0)
    steps.offer_groups([make_ready_group("a", 1), make_ready_group("b", 0)])
    assert uids(steps.draw_groups(1)) == ["b"]


def test_newer_groups_do_not_push_older_ones_beyond_their_deadline():
    steps = make_assembler(2, 1, b=0, c=0, d=1)
    # b and c need the only slots of steps 1 and 2, so that d cannot enter step 1.
    steps.offer_groups([make_ready_group("d", 1)])
    assert uids(steps.draw_groups(1)) == []
    steps.offer_groups([make_ready_group("b", 0)])
    assert uids(steps.draw_groups(1)) == ["b"]


def test_stale_token_raises_with_the_group():
    steps = make_assembler(1, 1, a=1)
    steps.offer_groups([make_ready_group("a", 1, sampled=0)])
    with pytest.raises(StaleGroupError, match="group a was sampled by version 0: 2 behind"):
        steps.draw_groups(2)


def test_group_offered_twice_is_ignored():
    steps = make_assembler(1, 2, a=0)
    for _ in range(2):
        steps.offer_groups([make_ready_group("a", 0)])
    assert uids(steps.draw_groups(0)) == ["a"]
    steps.offer_groups([make_ready_group("a", 0), make_ready_group("unknown", 0)])
    assert uids(steps.draw_groups(0)) == []
    steps.drop_group("unknown")


def test_finish_step_returns_its_groups_and_starts_an_empty_step():
    steps = make_assembler(1, 2, a=0, b=1)
    steps.offer_groups([make_ready_group("b", 1), make_ready_group("a", 0)])
    steps.draw_groups(1)
    assert steps.is_complete
    info = [GroupInfo((4,), 2, ((version, 2),)) for version in (0, 1)]
    assert steps.finish_step() == (TrainedGroup("a", info[0], 0), TrainedGroup("b", info[1], 1))
    assert not steps.is_complete


# on_stale: drop


def test_drop_stale_reserves_no_slots():
    steps = make_assembler(1, 2, drops_stale=True, a=0, b=0, c=1, d=1)
    steps.offer_groups([make_ready_group("c", 1), make_ready_group("d", 1)])
    assert uids(steps.draw_groups(1)) == ["c", "d"], "a and b are due but reserve nothing"
    assert steps.pending_uids == ["a", "b"]


def test_drop_stale_takes_oldest_tokens_first():
    steps = make_assembler(3, 1, drops_stale=True, a=0, b=1)
    steps.offer_groups([make_ready_group("a", 0, sampled=2), make_ready_group("b", 1, sampled=1)])
    assert uids(steps.draw_groups(2)) == ["b"]


def test_drop_stale_drops_only_groups_beyond_the_bound():
    steps = make_assembler(1, 2, drops_stale=True, a=0, b=0, c=1)
    steps.offer_groups(
        [make_ready_group("a", 0), make_ready_group("b", 0, sampled=1), make_ready_group("c", 1)]
    )
    assert steps.remove_late_groups(1) == []
    assert steps.remove_late_groups(2) == ["a"]
    assert steps.remove_late_groups(2) == []
    assert sorted(uids(steps.draw_groups(2))) == ["b", "c"]


# Oversampling: more groups are admitted than a step has slots.


def test_undecided_group_reserves_a_fraction_and_kept_group_a_whole_slot():
    # The estimated keep rate is 1/3.
    steps = make_assembler(1, 2, oversample=3.0, a=0, b=0, c=0, d=1, e=1)
    steps.offer_groups([make_ready_group("d", 1), make_ready_group("e", 1)])
    assert uids(steps.draw_groups(1)) == ["d"], "a, b and c reserve one slot"
    steps.drop_group("a")
    assert uids(steps.find_drawable(1)) == ["e"], "b and c reserve less than a slot"
    steps.keep_group("b")
    assert uids(steps.draw_groups(1)) == [], "kept group b reserves a slot"
    steps.offer_groups([make_ready_group("b", 0)])
    assert uids(steps.draw_groups(1)) == ["b"]


def test_full_step_makes_due_groups_late_except_those_that_fill_it():
    steps = make_assembler(0, 1, oversample=4.0, a=0, b=0, c=0, d=1)
    steps.offer_groups([make_ready_group("a", 0), make_ready_group("b", 0)])
    assert steps.remove_late_groups(0) == []
    assert steps.remove_late_groups(0, is_full=True, absent=["d"]) == ["b", "c"]
    assert uids(steps.draw_groups(0)) == ["a"]


def test_groups_past_their_deadline_are_late_whether_ready_or_pending():
    steps = make_assembler(1, 1, oversample=4.0, a=0, b=0, c=0, d=0, e=1)
    steps.offer_groups(
        [make_ready_group("a", 0), make_ready_group("b", 0), make_ready_group("c", 0, sampled=1)]
    )
    assert steps.remove_late_groups(1) == []
    assert uids(steps.draw_groups(1)) == ["a"]
    steps.finish_step()
    assert steps.remove_late_groups(2) == ["b", "d"], "c has newer tokens than its admission"
    for uid in ("b", "d"):
        steps.drop_group(uid)
    assert uids(steps.draw_groups(2)) == ["c"]
    assert steps.pending_uids == ["e"]
