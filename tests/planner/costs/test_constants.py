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


def test_a_file_of_an_earlier_version_is_read_without_constants_that_are_fixed_now(tmp_path: Path):
    path = tmp_path / "constants.yaml"
    path.write_text("max_running: 8\nexpert_rows: 64\nhost_fraction: 0.7\n")
    assert CostConstants.from_yaml(path).max_running == 8


def test_yaml_file_overrides_only_named_constants(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("max_running: 8\n")
    assert CostConstants.from_yaml(path, CPU_CONSTANTS).max_running == 8
    assert CostConstants.from_yaml(path, CPU_CONSTANTS).weight_bytes == CPU_CONSTANTS.weight_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode_rolout_s: 1\n", "decode_rollout_s"),
        ("link_fraction: 0\n", "link_fraction=0.0: must be from 1e-06 to 1"),
        ("link_fraction: 1.5\n", "link_fraction=1.5: must be from 1e-06 to 1"),
        ("pause_fraction: 2\n", "pause_fraction=2.0: must be from 0 to 1"),
        ("hop_s: -1\n", "hop_s=-1.0: must be from 0 to 3600"),
        ("hop_s: soon\n", "hop_s"),
        ("hop_s: .nan\n", "hop_s=nan: must be"),
        ("publish_s: 3601\n", "publish_s=3601.0: must be from 0 to 3600"),
        ("max_running: .inf\n", "max_running"),
        ("max_running: 0\n", "max_running=0: must be from 1 to"),
        (f"max_running: {10**400}\n", "max_running=1000.*: must be from 1"),
        ("[1, 2]\n", "must be a mapping"),
        ("a: [\n", "constants"),
    ],
)
def test_invalid_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        CostConstants.from_yaml(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file_is_refused_in_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file$"):
        CostConstants.from_yaml(tmp_path / "none.yaml")


def test_binary_file_is_refused_in_one_line(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"hop_s: \xff\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: .*utf-8"):
        CostConstants.from_yaml(path)


def test_cpu_clusters_use_cpu_constants():
    assert CostConstants.from_cluster(Cluster.from_text("16xCPU")) == CPU_CONSTANTS
    assert CostConstants.from_cluster(Cluster.from_text("8xA100")) == CostConstants()
