"""Parsing of clusters, and the location of their devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ConfigError
from streamrl.placement.clusters import DEVICES, Cluster, NodeGroup


def test_cluster_fills_nodes_of_the_usual_size():
    cluster = Cluster.from_text("64xH100")
    assert (cluster.num_devices, cluster.num_nodes) == (64, 8)
    assert [cluster.find_node(device) for device in (0, 7, 8, 63)] == [0, 0, 1, 7]
    assert Cluster.from_text("4xH100").num_nodes == 1


@given(
    st.lists(
        st.builds(
            NodeGroup,
            st.sampled_from(list(DEVICES.values())),
            st.integers(1, 16),
            st.integers(1, 5),
            st.sampled_from([0.0, 25e9, 12.5e9, 1.25e14]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_cluster_text_round_trips_and_every_device_has_a_node(groups: list[NodeGroup]):
    cluster = Cluster(tuple(groups))
    devices = [device for group in groups for device in [group.device] * group.num_devices]
    assert [cluster.find_node_group(i).device for i in range(cluster.num_devices)] == devices
    nodes = [cluster.find_node(i) for i in range(cluster.num_devices)]
    assert nodes == sorted(nodes)
    assert set(nodes) == set(range(cluster.num_nodes))
    # Without a number of nodes, devices fill nodes of the usual size.
    has_default_nodes = all(
        group.num_nodes > 1 or group.devices_per_node <= group.device.devices_per_node
        for group in groups
    )
    if has_default_nodes:
        assert Cluster.from_text(str(cluster)) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH1000", "device H1000: not in the table; the nearest device is H100"),
        ("H100", "'H100' is not written like 8xH100"),
        ("0xH100", "cluster 0xH100: nodes=1, devices of a node=0: must be at least 1"),
        ("12xH100", "do not fill nodes of 8; give the number of nodes, as in 2x6xH100"),
        ("8xH100@fastGb", "is not written like"),
        ("9999999x8xH100", "must be at most"),
        ("65536xH100", "cluster 65536xH100: 65536 devices: must be at most 16384"),
        (f"8xH100@{'9' * 400}Gb", "network of inf Gb: must be from 0.001 to 1000000"),
    ],
)
def test_from_text_refuses_bad_text_in_one_line(text: str, message: str):
    with pytest.raises(ConfigError, match=r".*") as refused:
        Cluster.from_text(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
