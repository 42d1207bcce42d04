from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ConfigError
from streamrl.weights import WeightsConfig
from streamrl.weights.config import TRANSPORTS
from streamrl.weights.transport_choice import (
    PublishedModel,
    TransportFacts,
    choose_transport,
    divide_shared_memory,
)

POLICY = PublishedModel("policy", num_bytes=1_900_000, num_readers=3)
ONE_NODE = TransportFacts(1, (POLICY,), max_staleness=0, shm_free_bytes=11_200_000_000)
TWO_NODES = TransportFacts(2, (POLICY,), max_staleness=0, shm_free_bytes=11_200_000_000)
LITTLE_MEMORY = TransportFacts(
    1,
    (PublishedModel("policy", num_bytes=20_000_000, num_readers=1),),
    max_staleness=1,
    shm_free_bytes=576_000_000,
    object_store_bytes=512_000_000,
)


def test_auto_chooses_shared_memory_on_a_single_node():
    assert choose_transport(WeightsConfig(), ONE_NODE) == (
        "shared_memory",
        "weights: shared memory (publisher and 3 readers are on one node; needs 7.6 MB ="
        " (2 kept + 1 being written + 1 being read) x 1.9 MB of policy;"
        " /dev/shm has 11.2 GB)",
    )


def test_auto_chooses_the_object_store_on_two_nodes():
    assert choose_transport(WeightsConfig(), TWO_NODES) == (
        "store",
        "weights: object store (shared memory needs one node; publisher and readers are on 2)",
    )


def test_auto_broadcasts_between_the_gpus_of_several_nodes():
    facts = replace(TWO_NODES, num_gpus=2)
    assert choose_transport(WeightsConfig(), facts) == (
        "collective",
        "weights: collective (publisher and readers have a GPU each, on 2 nodes); publisher and"
        " readers keep in pinned host memory: 1.9 MB of policy",
    )
    assert choose_transport(WeightsConfig(), replace(facts, shares_gpus=True))[0] == "store"
    assert choose_transport(WeightsConfig(), replace(ONE_NODE, num_gpus=2))[0] == "shared_memory"


def test_the_collective_transport_refuses_processes_that_share_a_gpu():
    config = WeightsConfig(transport="collective")
    shared = replace(ONE_NODE, num_gpus=2, shares_gpus=True)
    with pytest.raises(ConfigError, match=r"weights\.transport=collective: NCCL needs a GPU for"):
        choose_transport(config, shared)
    assert choose_transport(config, replace(shared, num_gpus=0))[0] == "collective"


ONE_GPU = replace(ONE_NODE, num_gpus=1, shares_gpus=True)
OWN_GPUS = replace(ONE_NODE, num_gpus=4)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_auto_on_a_device_broadcasts_between_gpus(num_nodes: int):
    assert choose_transport(
        WeightsConfig(on_device=True), replace(OWN_GPUS, num_nodes=num_nodes)
    ) == (
        "collective",
        "weights: collective between GPUs; each holds one more copy of the weights",
    )


@pytest.mark.parametrize(
    ("transport", "facts", "error"),
    [
        ("auto", ONE_GPU, r"share GPUs \(1 nodes, 1 GPUs\)"),
        ("collective", replace(ONE_GPU, num_nodes=2), r"share GPUs \(2 nodes, 1 GPUs\)"),
        ("auto", replace(ONE_NODE, models=()), "on_device=true has no effect: this placement"),
    ],
)
def test_placements_without_a_way_between_devices_are_refused(
    transport: str, facts: TransportFacts, error: str
):
    with pytest.raises(ConfigError, match=error):
        choose_transport(WeightsConfig(transport=transport, on_device=True), facts)


@pytest.mark.parametrize("transport", ["store", "disk", "shared_memory"])
def test_transports_through_the_host_refuse_buckets_on_a_device(transport: str):
    with pytest.raises(ConfigError, match=r"on_device=True: has no effect: weights\.transport="):
        WeightsConfig(transport=transport, on_device=True)


def test_the_share_of_rays_object_store_is_not_available_to_weights():
    assert choose_transport(WeightsConfig(), LITTLE_MEMORY) == (
        "store",
        "weights: object store (shared memory needs 80.0 MB = (2 kept + 1 being"
        " written + 1 being read) x 20.0 MB of policy; /dev/shm has 64.0 MB = 576.0 MB free -"
        " 512.0 MB for Ray's object store)",
    )


MODEL_32B = PublishedModel("policy", num_bytes=61 * 10**9, num_readers=4)
CRITIC = PublishedModel("critic", num_bytes=10**9, num_readers=1)
LARGE = TransportFacts(
    2,
    (MODEL_32B, CRITIC),
    max_staleness=1,
    shm_free_bytes=0,
    num_gpus=8,
    copied_roles=frozenset({"policy"}),
    node_store_bytes=190 * 10**9,
    queue_bytes=95 * 10**9,
)


def test_versions_and_a_queue_that_exceed_rays_object_store_are_named_with_the_sum():
    assert choose_transport(WeightsConfig(), LARGE) == (
        "collective",
        "weights: collective (publisher and readers have a GPU each, on 2 nodes); publisher and"
        " readers keep in pinned host memory: 61.0 GB of policy, 1.0 GB of critic; Ray may spill"
        " to disk: needs 279.0 GB = (2 kept + 1 being written) x 61.0 GB of policy"
        " + 1 for new readers x 1.0 GB of critic + 95.0 GB of the queue; a node's object store has"
        " 190.0 GB: raise placement.object_store_mb, or `ray start --object-store-memory` of a"
        " cluster",
    )


@pytest.mark.parametrize(
    ("transport", "copied_roles", "needed_gb"),
    [
        ("collective", {"policy", "critic"}, 3 * 61 + 3 + 95),
        ("collective", {"policy"}, 3 * 61 + 1 + 95),
        ("collective", {"reference"}, 61 + 1 + 95),
        ("store", {"policy"}, 3 * 61 + 3 + 95),
    ],
)
def test_a_large_enough_object_store_does_not_spill(
    transport: str, copied_roles: set[str], needed_gb: int
):
    facts = replace(LARGE, copied_roles=frozenset(copied_roles))
    config = WeightsConfig(transport=transport)
    enough = replace(facts, node_store_bytes=needed_gb * 10**9)
    assert "spill" not in choose_transport(config, enough)[1]
    short = replace(facts, node_store_bytes=needed_gb * 10**9 - 1)
    assert f": needs {needed_gb}.0 GB = " in choose_transport(config, short)[1]


def test_shared_memory_and_files_take_no_space_of_rays_object_store():
    little = replace(LARGE, num_nodes=1, shm_free_bytes=10**12, node_store_bytes=10**6)
    for transport in ("shared_memory", "disk"):
        assert "spill" not in choose_transport(WeightsConfig(transport=transport), little)[1]


@pytest.mark.parametrize(
    ("readers", "max_staleness", "read"), [(1, 5, 1), (4, 0, 1), (4, 1, 2), (4, 9, 4), (0, 3, 0)]
)
def test_lagging_versions_are_bounded_by_readers_and_max_staleness(
    readers: int, max_staleness: int, read: int
):
    model = PublishedModel("policy", 100, readers)
    facts = TransportFacts(1, (model,), max_staleness, shm_free_bytes=100 * (3 + read))
    assert choose_transport(WeightsConfig(), facts)[0] == "shared_memory"
    facts = TransportFacts(1, (model,), max_staleness, shm_free_bytes=100 * (3 + read) - 1)
    assert choose_transport(WeightsConfig(), facts)[0] == "store"


def test_published_models_share_the_memory_by_need():
    models = (
        PublishedModel("policy", 100, num_readers=2),
        PublishedModel("critic", 50, num_readers=1),
    )
    facts = TransportFacts(1, models, max_staleness=1, shm_free_bytes=1750, object_store_bytes=350)
    _, reason = choose_transport(WeightsConfig(), facts)
    assert reason.endswith(
        "needs 700 bytes ="
        " (2 kept + 1 being written + 2 being read) x 100 bytes of policy"
        " + (2 kept + 1 being written + 1 being read) x 50 bytes of critic;"
        " /dev/shm has 1.4 kB = 1.8 kB free - 350 bytes for Ray's object store)"
    )
    assert divide_shared_memory(WeightsConfig(), facts) == {"policy": 1000, "critic": 400}


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        (
            TWO_NODES,
            "weights.transport=shared_memory: needs one node; publisher and readers are on 2",
        ),
        (
            LITTLE_MEMORY,
            "weights.transport=shared_memory: needs 80.0 MB = .*; /dev/shm has 64.0 MB = 576.0",
        ),
    ],
)
def test_impossible_shared_memory_is_refused_with_the_arithmetic(facts: TransportFacts, rule: str):
    with pytest.raises(ConfigError, match=rule):
        choose_transport(WeightsConfig(transport="shared_memory"), facts)


@given(
    st.sampled_from(TRANSPORTS),
    st.builds(
        TransportFacts,
        num_nodes=st.integers(1, 3),
        models=st.tuples(
            st.builds(
                PublishedModel,
                role=st.just("policy"),
                num_bytes=st.integers(1, 10**10),
                num_readers=st.integers(1, 3),
            )
        ),
        max_staleness=st.integers(0, 5),
        shm_free_bytes=st.integers(0, 10**11),
        object_store_bytes=st.integers(0, 10**11),
    ),
)
def test_the_configured_transport_is_chosen_or_refused(transport: str, facts: TransportFacts):
    try:
        chosen, reason = choose_transport(WeightsConfig(transport=transport), facts)
    except ConfigError:
        assert transport == "shared_memory"
        return
    assert chosen in TRANSPORTS[1:]
    assert transport in ("auto", chosen)
    assert reason.startswith("weights: ")
    if chosen == "shared_memory":
        (num_bytes,) = divide_shared_memory(WeightsConfig(), facts).values()
        assert 4 * facts.models[0].num_bytes <= num_bytes == facts.capacity_bytes
