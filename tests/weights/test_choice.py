import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ConfigError
from streamrl.weights import WeightsConfig
from streamrl.weights.choice import Choice, Facts, choose
from streamrl.weights.config import TRANSPORTS

ONE_NODE = Facts(num_nodes=1, readers=3, model_bytes=1_900_000, shm_free_bytes=11_200_000_000)
TWO_NODES = Facts(num_nodes=2, readers=3, model_bytes=1_900_000, shm_free_bytes=11_200_000_000)
LITTLE_ROOM = Facts(num_nodes=1, readers=1, model_bytes=20_000_000, shm_free_bytes=64_000_000)


def test_one_node_with_room_takes_shared_memory() -> None:
    assert choose(WeightsConfig(), ONE_NODE) == Choice(
        "shared_memory",
        "weights: shared memory, as publisher and 3 readers are on one node "
        "(1.9 MB a version, 11.2 GB free)",
    )


def test_two_nodes_take_the_store() -> None:
    assert choose(WeightsConfig(), TWO_NODES) == Choice(
        "store",
        "weights: the object store, as for shared memory publisher and readers are on 2 nodes, "
        "and must be on one",
    )


def test_a_container_with_little_shared_memory_takes_the_store() -> None:
    assert choose(WeightsConfig(), LITTLE_ROOM) == Choice(
        "store",
        "weights: the object store, as for shared memory /dev/shm has 64.0 MB free and 80.0 MB are "
        "needed: 4 versions (weights.keep_versions=2 and 2 on their way) of 20.0 MB",
    )
    assert choose(WeightsConfig(keep_versions=1), LITTLE_ROOM).transport == "shared_memory"


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        (TWO_NODES, "weights.transport=shared_memory: publisher and readers are on 2 nodes"),
        (LITTLE_ROOM, "weights.transport=shared_memory: /dev/shm has 64.0 MB free and 80.0 MB"),
    ],
)
def test_shared_memory_that_cannot_be_is_refused(facts: Facts, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        choose(WeightsConfig(transport="shared_memory"), facts)


@given(
    st.sampled_from(TRANSPORTS),
    st.builds(
        Facts,
        num_nodes=st.integers(1, 3),
        readers=st.integers(1, 3),
        model_bytes=st.integers(1, 10**10),
        shm_free_bytes=st.integers(0, 10**11),
    ),
)
def test_what_is_asked_for_is_taken_or_refused(transport: str, facts: Facts) -> None:
    try:
        choice = choose(WeightsConfig(transport=transport), facts)
    except ConfigError:
        assert transport == "shared_memory"
        return
    assert choice.transport in TRANSPORTS[1:]
    assert transport in ("auto", choice.transport)
    assert choice.reason.startswith("weights: ")
