"""Rules of device meshes."""

from itertools import combinations, pairwise

import pytest

from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh, iter_meshes, list_node_edges


def test_iter_meshes_lists_all_meshes_of_two_nodes():
    meshes = list(iter_meshes(Cluster.from_text("2x4xA100")))
    assert meshes == [
        *(Mesh(first, 1) for first in range(8)),
        *(Mesh(first, 2) for first in (0, 2, 4, 6)),
        *(Mesh(0, 4), Mesh(4, 4), Mesh(0, 8)),
    ]


def test_listed_meshes_exclude_mixed_device_types():
    cluster = Cluster.from_text("4xA100,4xV100")
    assert Mesh(0, 8) not in set(iter_meshes(cluster))
    assert {Mesh(0, 4), Mesh(4, 4)} <= set(iter_meshes(cluster))
    assert Mesh(0, 8).find_slowest_device(cluster).name == "V100"


def test_uneven_parts_of_a_node_are_listed_on_request():
    node = Cluster.from_text("8xA100")
    uneven = set(iter_meshes(node, has_uneven=True)) - set(iter_meshes(node))
    assert {Mesh(0, 5), Mesh(5, 3), Mesh(0, 6), Mesh(1, 2)} <= uneven
    assert len(uneven) + len(list(iter_meshes(node))) == 8 * 9 // 2
    large = Cluster.from_text("1x64xCPU")
    assert {Mesh(0, 63), Mesh(0, 20)} <= set(iter_meshes(large, has_uneven=True))


@pytest.mark.parametrize("text", ["4xA100", "2x4xA100", "2x6xA100", "2x8xA100,4xV100,3x2xH100"])
def test_the_listed_meshes_are_parts_of_a_node_and_whole_nodes_of_any_type(text: str):
    cluster = Cluster.from_text(text)
    edges = list_node_edges(cluster)
    runs = [*combinations(edges, 2)]
    for first, end in pairwise(edges):
        runs += combinations(range(first, end + 1), 2)
    listed = {Mesh(first, end - first) for first, end in runs}
    assert {*iter_meshes(cluster, has_uneven=True)} <= listed
    with pytest.raises(ConfigError, match="here: needs devices"):
        Mesh(1, cluster.num_devices).check_on_cluster(cluster, "here")


def test_a_mesh_of_parts_of_nodes_has_its_largest_part():
    cluster = Cluster.from_text("4x8xA100")
    meshes = (Mesh(0, 28), Mesh(28, 4), Mesh(6, 4), Mesh(5, 4), Mesh(0, 5), Mesh(8, 24))
    assert [mesh.count_devices_per_node(cluster) for mesh in meshes] == [8, 4, 2, 3, 5, 8]
    assert [mesh.count_nodes(cluster) for mesh in meshes] == [4, 1, 2, 2, 1, 3]


def test_overlap_means_a_common_device():
    for mesh in iter_meshes(Cluster.from_text("2x4xA100")):
        for other in iter_meshes(Cluster.from_text("2x4xA100")):
            assert mesh.overlaps(other) == bool(set(mesh.devices) & set(other.devices))
