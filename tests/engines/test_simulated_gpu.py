"""Training, weights and resharding on a simulated GPU: no operation mixes devices.

Planted faults show that mixing would be found. All tests look at one process.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.weights.simulated_transports import HEADER_BYTES

KINDS = ("policy", "lora", "critic", "two heads")
MIXED = "MixedDevicesError: aten::"


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
    assert areas["scores"]["difference"] < 1e-4


def test_offloaded_scorers_compute_on_the_gpu_with_layers_from_the_host(areas: dict[str, Any]):
    offloaded = areas["offloaded scores"]
    assert offloaded["difference"] < 1e-4
    assert (offloaded["layers"], offloaded["others"]) == (["cpu"], ["simgpu"])


def test_every_loss_has_the_bits_of_the_cpu(areas: dict[str, Any]):
    losses = areas["losses"]
    assert losses["different"] == []
    assert losses["variants"] > 60 and losses["devices"] == ["simgpu"]


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_train_on_the_gpu_as_on_the_cpu(kind: str, areas: dict[str, Any]):
    training = areas[f"training/{kind}"]
    assert training["names_equal"]
    assert training["numbers"] < 1e-4 and training["parameters"] < 1e-4


def test_deepspeed_trains_in_bfloat16_on_the_gpu(areas: dict[str, Any]):
    training = areas["training/deepspeed"]
    assert training["norms"] == pytest.approx(areas["training/policy"]["norms"], rel=0.1)
    assert training["devices"] == ["simgpu"]


@pytest.mark.parametrize("kind", [*KINDS, "deepspeed"])
def test_the_sums_of_a_micro_batch_reach_the_cpu_in_one_copy(kind: str, areas: dict[str, Any]):
    """The other copy is that of the rows' lengths, by which they are packed."""
    assert areas[f"training/{kind}"]["host_copies"] == [2, 2]


@pytest.mark.parametrize("kind", ["policy", "lora"])
def test_published_weights_are_copied_once_and_loaded_on_the_gpu(kind: str, areas: dict[str, Any]):
    weights = areas[f"weights/{kind}"]
    assert weights["difference"] == 0
    assert weights["devices"] == ["simgpu"]
    # The scale of LoRA adapters is made on the CPU.
    assert weights["publish_copies"] == weights["tensors"] - (kind == "lora")
    assert weights["pull_copies"] == 0


def test_weights_in_buckets_on_the_gpu_never_reach_the_cpu(areas: dict[str, Any]):
    on_host, on_device = areas["weights/policy"], areas["weights/collective"]
    assert on_host["host_bytes"] == on_host["tensor_bytes"] == on_device["tensor_bytes"]
    assert on_device["difference"] == 0 and on_device["devices"] == ["simgpu"]
    assert on_device["publish_copies"] == 0
    assert on_device["host_bytes"] == HEADER_BYTES


@pytest.mark.parametrize("area", ["policy", "lora", "collective"])
def test_publishing_waits_for_no_other_stream_of_the_gpu(areas: dict[str, Any], area: str):
    assert areas[f"weights/{area}"]["publish_waits"] == 0


def test_resharding_on_a_gpu_copies_nothing_to_the_cpu(areas: dict[str, Any]):
    assert areas["resharding"] == {"is_planned": True, "host_copies": 0, "difference": 0.0}
    for name in ("PointToPointExecutor", "GroupGatherExecutor"):
        moved = areas["executors"][name]
        assert moved["received_bytes"] > 0 and moved["own_part_is_there"]
        assert moved["host_copies"] == 0, name


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        ("batch", "embedding"),
        ("batch of a scorer", "embedding"),
        ("generator_logprobs", "where"),
        ("advantages", "where"),
        ("loss_mask", "where"),
        ("sum", "stack"),
        ("moment", "lerp_"),
    ],
)
def test_a_tensor_left_on_the_cpu_is_found(fault: str, operation: str, faults: dict[str, Any]):
    assert faults[fault]["error"].startswith(MIXED + operation)


def test_a_column_left_on_the_cpu_is_found_in_every_loss(
    areas: dict[str, Any], faults: dict[str, Any]
):
    errors = faults["column of a loss"]
    assert len(errors) == areas["losses"]["variants"]
    assert all(error.startswith("aten::") for error in errors.values())


def test_served_tensors_left_on_the_cpu_are_found(faults: dict[str, Any]):
    assert not faults["served tensors"]["is_planned"]
    assert faults["served tensor"]["host_copies"] == 1
    assert all(moved["host_copies"] > 0 for moved in faults["target"].values())
