"""Sets, ratios and meshes as notations of one placement."""

from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import Placement, PlacementMode
from tests.planner.notations import placement_from_meshes

GRPO = build_dataflow(("generator_logprobs", "scores"))


@pytest.mark.parametrize(
    ("train", "staleness", "mode"),
    [
        (("0-7", "1-1-8"), 0, PlacementMode.COLOCATED),
        (("0-3", "1-1-4"), 0, PlacementMode.SPLIT),
        (("8-15", "1-1-8"), 0, PlacementMode.DISAGGREGATED),
        (("8-15", "1-1-8"), 2, PlacementMode.ASYNCHRONOUS),
    ],
)
def test_the_mode_follows_from_the_devices(
    train: tuple[str, str], staleness: int, mode: PlacementMode
):
    meshes = {"generate": ("0-7", "1-1-8"), "train": train}
    placement = placement_from_meshes(meshes, max_staleness=staleness)
    assert placement.classify_mode(GRPO) is mode


def make_placement(devices: str, grid: str) -> Placement:
    return placement_from_meshes({"generate": ("0-3", "1-1-4"), "train": (devices, grid)})


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            make_placement("12-16", "1-1-5"),
            "trainer: needs devices 12-16; the cluster has 16",
        ),
        (
            make_placement("4-15", "1-6-2"),
            "tensor_parallel=6: must divide a node's devices; 4-9 are on two",
        ),
        (make_placement("0-15", "1-16-1"), "trainer.tensor_parallel=16: must be at most 8"),
        (replace(make_placement("4-7", "1-1-4"), max_staleness=-1), "max_staleness=-1"),
    ],
)
def test_a_cluster_that_cannot_run_a_placement_is_refused(placement: Placement, message: str):
    with pytest.raises(ConfigError) as refused:
        placement.check_on_cluster(Cluster.from_text("2x8xA100"), {"train": "trainer"})
    assert message in str(refused.value)
    make_placement("4-11", "1-4-2").check_on_cluster(Cluster.from_text("2x8xA100"))
