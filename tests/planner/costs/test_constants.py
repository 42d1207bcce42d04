"""Reading, writing and validation of cost constants."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.planner.costs.constants import CPU_CONSTANTS, UPPER_BOUNDS, CostConstants


def test_constants_round_trip_through_yaml(tmp_path: Path):
    path, constants = tmp_path / "c.yaml", CostConstants(decode_rollout_s=3e-5, recompute=False)
    path.write_text(yaml.safe_dump(constants.to_dict()))
    assert CostConstants.from_yaml(path) == constants


def test_yaml_file_overrides_only_named_constants(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("max_running: 8\n")
    assert CostConstants.from_yaml(path, CPU_CONSTANTS).max_running == 8
    assert CostConstants.from_yaml(path, CPU_CONSTANTS).weight_bytes == CPU_CONSTANTS.weight_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode_rolout_s: 1\n", "decode_rollout_s"),
        ("link_fraction: 0\n", "link_fraction=0.0: must be above 0"),
        ("link_fraction: 1.5\n", "must be at most 1"),
        ("hop_s: -1\n", "must be 0 or more"),
        ("hop_s: soon\n", "hop_s"),
        ("hop_s: .nan\n", "hop_s=nan: must be finite"),
        ("decode_step_s: .nan\n", "decode_step_s=nan: must be finite"),
        ("decode_step_s: .inf\n", "decode_step_s=inf: must be finite"),
        ("link_fraction: .nan\n", "link_fraction=nan: must be finite"),
        ("max_running: .inf\n", "max_running"),
        ("max_running: .nan\n", "max_running"),
        ("max_running: 0\n", "must be at least 1"),
        ("hop_s: 1e12\n", "hop_s=1000000000000.0: must be at most 60"),
        ("collective_s: 2\n", "collective_s=2.0: must be at most 1"),
        ("decode_layer_s: 2.0e+9\n", "must be at most 1"),
        ("publish_s: 3601\n", "publish_s=3601.0: must be at most 3600"),
        ("half_width: 1.0e+12\n", "must be at most 1e\\+06"),
        ("weight_bytes: 65\n", "weight_bytes=65: must be at most 64"),
        (f"max_running: {10**400}\n", "max_running=1000.*: must be at most 1e\\+06"),
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


def test_every_constant_has_an_upper_bound():
    assert set(UPPER_BOUNDS) == set(vars(CostConstants()))
    for name, limit in UPPER_BOUNDS.items():
        bound: dict[str, Any] = {name: limit}
        too_large: dict[str, Any] = {name: limit * 2}
        assert vars(replace(CostConstants(), **bound))[name] == limit
        with pytest.raises(ConfigError, match=f"^{name}=.*: must be at most"):
            replace(CostConstants(), **too_large)


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
