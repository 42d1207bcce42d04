"""Training, weights and resharding on a simulated GPU: no operation mixes devices.

Planted faults show that mixing would be found. All tests look at one process.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

KINDS = ("lora", "two heads")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engines.simulated_gpu_run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def areas(results: dict[str, Any]) -> dict[str, Any]:
    return dict[str, Any](results["areas"])


@pytest.fixture(scope="module")
def faults(results: dict[str, Any]) -> dict[str, Any]:
    return dict[str, Any](results["faults"])


def test_scorers_compute_on_the_gpu_what_they_compute_on_the_cpu(areas: dict[str, Any]):
    scores = areas["scores"]
    assert scores["difference"] < 1e-4
    assert (scores["layers"], scores["others"]) == (["cpu"], ["simgpu"]), "layers in host memory"


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_train_on_the_gpu_as_on_the_cpu(kind: str, areas: dict[str, Any]):
    training = areas[f"training/{kind}"]
    assert training["names_equal"]
    assert training["numbers"] < 1e-4 and training["parameters"] < 1e-4


def test_deepspeed_trains_in_bfloat16_on_the_gpu(areas: dict[str, Any]):
    training = areas["training/deepspeed"]
    assert len(training["norms"]) == 2 and min(training["norms"]) > 0
    assert training["devices"] == ["simgpu"]


@pytest.mark.parametrize("kind", [*KINDS, "deepspeed"])
def test_the_sums_of_a_micro_batch_reach_the_cpu_in_one_copy(kind: str, areas: dict[str, Any]):
    """The other copy is that of the rows' lengths, by which they are packed."""
    assert areas[f"training/{kind}"]["host_copies"] == [2, 2]


def test_published_weights_are_copied_once_and_loaded_on_the_gpu(areas: dict[str, Any]):
    weights = areas["weights/policy"]
    assert weights["difference"] == 0 and weights["devices"] == ["simgpu"]
    assert weights["pull_copies"] == 0
    assert weights["publish_copies"] == weights["tensors"]
    assert weights["host_bytes"] == weights["tensor_bytes"]
    assert weights["publish_waits"] == 0, "no other stream of the GPU is waited for"


def test_resharding_on_a_gpu_copies_nothing_to_the_cpu(areas: dict[str, Any]):
    assert areas["resharding"] == {"is_planned": True, "host_copies": 0, "difference": 0.0}


def test_a_tensor_left_on_the_cpu_is_found(faults: dict[str, Any]):
    assert faults["batch"]["error"].startswith("MixedDevicesError: aten::embedding")
    assert faults["column"]["error"].startswith("MixedDevicesError: aten::where")
    assert not faults["served tensors"]["is_planned"]
