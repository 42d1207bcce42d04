import math

from hypothesis import given
from hypothesis import strategies as st

from streamrl.weights.broadcast_tree import BroadcastTree
from streamrl.weights.transport import MIN_BYTES_PER_S


def count_rounds(tree: BroadcastTree, num_nodes: int, *, broken: set[str]) -> int:
    """Simulate rounds of 10 s: every node asks, and admitted pulls end with the round."""
    missing = [f"n{i}" for i in range(num_nodes)]
    for number in range(10 * num_nodes + 10):
        if set(missing) <= broken:
            return number
        pulling = [node for node in missing if tree.try_start_pull(node, 1, 10.0 * number)]
        for node in pulling:
            if node not in broken:
                tree.mark_pulled(node, 1)
                missing.remove(node)
    raise AssertionError(f"{missing} did not get the version")


def test_the_publisher_serves_two_pulls_and_three_nodes_serve_six():
    tree = BroadcastTree("a", fanout=2)
    assert tree.try_start_pull("a", 1, 0.0)
    assert [tree.try_start_pull(node, 1, 0.0) for node in "bcde"] == [True, True, False, False]
    tree.mark_pulled("b", 1)
    assert [tree.try_start_pull(node, 1, 1.0) for node in "defg"] == [True, True, True, False]
    tree.mark_pulled("c", 1)
    assert [tree.try_start_pull(node, 1, 1.0) for node in "ghijk"] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_readers_of_a_node_share_its_pull():
    tree = BroadcastTree("a", fanout=1)
    assert tree.try_start_pull("b", 1, 0.0)
    assert not tree.try_start_pull("c", 1, 0.0)
    assert tree.try_start_pull("b", 1, 0.5)
    tree.mark_pulled("b", 1)
    assert tree.try_start_pull("b", 1, 1.0)


def test_a_newer_version_starts_at_the_publisher():
    tree = BroadcastTree("a", fanout=1)
    tree.try_start_pull("b", 1, 0.0)
    tree.mark_pulled("b", 1)
    assert tree.try_start_pull("c", 2, 1.0)
    assert not tree.try_start_pull("b", 2, 1.0)
    assert tree.try_start_pull("d", 1, 1.0)
    tree.mark_pulled("d", 1)
    assert not tree.try_start_pull("d", 2, 1.0)


def test_a_pull_past_its_deadline_does_not_count():
    tree = BroadcastTree("a", fanout=1, deadline_s=5)
    assert tree.try_start_pull("b", 1, 0.0)
    assert not tree.try_start_pull("c", 1, 4.9)
    assert tree.try_start_pull("c", 1, 5.0)


def test_a_removed_node_neither_counts_nor_serves():
    tree = BroadcastTree("a", fanout=1)
    tree.try_start_pull("b", 1, 0.0)
    tree.remove_node("b")
    assert tree.try_start_pull("c", 1, 0.0)
    tree.mark_pulled("c", 1)
    tree.remove_node("c")
    assert tree.try_start_pull("d", 1, 0.0)
    assert not tree.try_start_pull("e", 1, 0.0)
    tree.remove_node("a")
    assert tree.try_start_pull("a", 1, 0.0)


@given(st.integers(1, 300), st.integers(1, 5))
def test_rounds_grow_with_the_logarithm_of_the_nodes(num_nodes: int, fanout: int):
    rounds = count_rounds(BroadcastTree("origin", fanout=fanout), num_nodes, broken=set())
    assert rounds == math.ceil(round(math.log(num_nodes + 1, fanout + 1), 9))


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.booleans()), max_size=60),
    st.integers(1, 3),
)
def test_concurrent_pulls_are_at_most_fanout_times_ready_nodes(
    events: list[tuple[str, int, bool]], fanout: int
):
    tree = BroadcastTree("a", fanout=fanout)
    newest = -1
    ready, pulling = {"a"}, set[str]()
    for node, version, finishes in events:
        if version > newest and tree.try_start_pull(node, version, 0.0):
            newest, ready, pulling = version, {"a"}, {node} - {"a"}
        elif version == newest and finishes and node in pulling:
            tree.mark_pulled(node, version)
            pulling.remove(node)
            ready.add(node)
        elif version == newest and tree.try_start_pull(node, version, 0.0):
            pulling |= {node} - ready
        assert len(pulling) <= fanout * len(ready)


def test_a_pull_has_the_transfer_time_of_its_version():
    tree = BroadcastTree("a", fanout=1, deadline_s=5)
    tree.num_bytes = 10 * int(MIN_BYTES_PER_S)
    assert tree.try_start_pull("b", 0, now_s=0)
    assert not tree.try_start_pull("c", 0, now_s=14.9)
    assert tree.try_start_pull("c", 0, now_s=15.1)
