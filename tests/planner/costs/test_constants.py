"""Reading, writing and validation of cost constants."""

from pathlib import Path

import pytest
import yaml

from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.planner.costs.constants import CPU_CONSTANTS, CostConstants


def test_constants_round_trip_through_yaml(tmp_path: Path):
    path, constants = tmp_path / "c.yaml", CostConstants(decode_rollout_s=3e-5, recompute=False)
    path.write_text(yaml.safe_dump(constants.to_dict()))
    assert CostConstants.from_yaml(path) == constants


def test_yaml_file_overrides_only_named_constants_and_may_have_those_of_earlier_versions(
    tmp_path: Path,
):
    path = tmp_path / "c.yaml"
    path.write_text("max_running: 8\nexpert_rows: 64\nhost_fraction: 0.7\n")
    assert CostConstants.from_yaml(path, CPU_CONSTANTS).max_running == 8
    assert CostConstants.from_yaml(path, CPU_CONSTANTS).weight_bytes == CPU_CONSTANTS.weight_bytes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"decode_rolout_s: 1\n", "decode_rollout_s"),
        (b"link_fraction: 0\n", "link_fraction=0.0: must be from 1e-06 to 1"),
        (b"pause_fraction: 2\n", "pause_fraction=2.0: must be from 0 to 1"),
        (b"hop_s: -1\n", "hop_s=-1.0: must be from 0 to 3600"),
        (b"hop_s: .nan\n", "hop_s=nan: must be"),
        (b"max_running: 0\n", "max_running=0: must be from 1 to"),
        (b"max_running: 1" + 400 * b"0" + b"\n", "max_running=1000.*: must be from 1"),
        (b"[1, 2]\n", "must be a mapping"),
        (b"hop_s: \xff\n", "utf-8"),
        (None, "no such file$"),
    ],
)
def test_invalid_file_is_refused_in_one_line(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        CostConstants.from_yaml(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_cpu_clusters_use_cpu_constants():
    assert CostConstants.from_cluster(Cluster.from_text("16xCPU")) == CPU_CONSTANTS
    assert CostConstants.from_cluster(Cluster.from_text("8xA100")) == CostConstants()
