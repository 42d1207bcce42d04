import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.weights.broadcast_tree import BroadcastTree


def rounds_until_all_have_it(spread: BroadcastTree, num_nodes: int, *, broken: set[str]) -> int:
    """Rounds of 10 s in which every node asks; those that may pull are done at the end of it."""
    missing = [f"n{i}" for i in range(num_nodes)]
    for number in range(10 * num_nodes + 10):
        if set(missing) <= broken:
            return number
        pulling = [node for node in missing if spread.try_start_pull(node, 1, 10.0 * number)]
        for node in pulling:
            if node not in broken:
                spread.mark_pulled(node, 1)
                missing.remove(node)
    raise AssertionError(f"{missing} never got it")


def test_two_others_pull_from_the_first_node_and_six_from_three() -> None:
    spread = BroadcastTree("a", fanout=2)
    assert spread.try_start_pull("a", 1, 0.0)
    assert [spread.try_start_pull(node, 1, 0.0) for node in "bcde"] == [True, True, False, False]
    spread.mark_pulled("b", 1)
    assert [spread.try_start_pull(node, 1, 1.0) for node in "defg"] == [True, True, True, False]
    spread.mark_pulled("c", 1)
    assert [spread.try_start_pull(node, 1, 1.0) for node in "ghijk"] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_readers_of_one_node_share_its_pull() -> None:
    spread = BroadcastTree("a", fanout=1)
    assert spread.try_start_pull("b", 1, 0.0)
    assert not spread.try_start_pull("c", 1, 0.0)
    assert spread.try_start_pull("b", 1, 0.5)
    spread.mark_pulled("b", 1)
    assert spread.try_start_pull("b", 1, 1.0)


def test_a_newer_version_begins_at_the_publisher_again() -> None:
    spread = BroadcastTree("a", fanout=1)
    spread.try_start_pull("b", 1, 0.0)
    spread.mark_pulled("b", 1)
    assert spread.try_start_pull("c", 2, 1.0)
    assert not spread.try_start_pull("b", 2, 1.0)
    assert spread.try_start_pull("d", 1, 1.0)
    spread.mark_pulled("d", 1)
    assert not spread.try_start_pull("d", 2, 1.0)


def test_a_node_that_is_not_done_in_time_is_not_waited_for() -> None:
    spread = BroadcastTree("a", fanout=1, deadline_s=5)
    assert spread.try_start_pull("b", 1, 0.0)
    assert not spread.try_start_pull("c", 1, 4.9)
    assert spread.try_start_pull("c", 1, 5.0)


def test_a_node_that_is_gone_is_not_waited_for_and_serves_nobody() -> None:
    spread = BroadcastTree("a", fanout=1)
    spread.try_start_pull("b", 1, 0.0)
    spread.remove_node("b")
    assert spread.try_start_pull("c", 1, 0.0)
    spread.mark_pulled("c", 1)
    spread.remove_node("c")
    assert spread.try_start_pull("d", 1, 0.0)
    assert not spread.try_start_pull("e", 1, 0.0)
    spread.remove_node("a")
    assert spread.try_start_pull("a", 1, 0.0)


@given(st.integers(1, 300), st.integers(1, 5))
def test_as_many_rounds_as_the_logarithm_of_the_nodes(num_nodes: int, fanout: int) -> None:
    rounds = rounds_until_all_have_it(
        BroadcastTree("origin", fanout=fanout), num_nodes, broken=set()
    )
    assert rounds == math.ceil(round(math.log(num_nodes + 1, fanout + 1), 9))


@given(st.integers(2, 40), st.integers(1, 3), st.data())
def test_broken_nodes_keep_nobody_from_a_version(
    num_nodes: int, fanout: int, data: st.DataObject
) -> None:
    broken = data.draw(st.sets(st.sampled_from([f"n{i}" for i in range(num_nodes)])))
    spread = BroadcastTree("origin", fanout=fanout, deadline_s=15)
    rounds_until_all_have_it(spread, num_nodes, broken=broken)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.booleans()), max_size=60),
    st.integers(1, 3),
)
def test_no_more_pull_at_a_time_than_can_be_served(
    events: list[tuple[str, int, bool]], fanout: int
) -> None:
    spread = BroadcastTree("a", fanout=fanout)
    newest = -1
    have, pulling = {"a"}, set[str]()
    for node, version, finishes in events:
        if version > newest and spread.try_start_pull(node, version, 0.0):
            newest, have, pulling = version, {"a"}, {node} - {"a"}
        elif version == newest and finishes and node in pulling:
            spread.mark_pulled(node, version)
            pulling.remove(node)
            have.add(node)
        elif version == newest and spread.try_start_pull(node, version, 0.0):
            pulling |= {node} - have
        assert len(pulling) <= fanout * len(have)


def test_a_node_serves_at_least_one_other() -> None:
    with pytest.raises(ValueError, match="fanout=0: must be at least 1"):
        BroadcastTree("a", fanout=0)
