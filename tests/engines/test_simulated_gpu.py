"""Training, weights and resharding on a simulated GPU: no operation mixes devices.

Planted faults show that mixing would be found. All tests look at one process.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.placements import list_placements

KINDS = ("lora", "two heads")


SEVERAL_RANKS = "several ranks: steps `updates` and `loading` of gpu-check"
WITH_VLLM = "vLLM: steps `generator` and `colocated` of gpu-check"
WITHOUT_RUN = {
    "distributed/devices.py": "clears an error of CUDA",
    "engines/generation/generation_engine.py": WITH_VLLM,
    "engines/models/lora.py": "a model on the meta device: step `loading` of gpu-check",
    "engines/training/optimizer_offload.py": "FSDP2's storages; " + SEVERAL_RANKS,
    "engines/vllm/load_check.py": WITH_VLLM,
    "engines/vllm/local_pieces.py": WITH_VLLM,
    "engines/vllm/peer_rank.py": WITH_VLLM,
    "engines/vllm/weight_loader.py": WITH_VLLM,
    "resharding/executors.py": "four ranks: step `resharding` of gpu-check",
    "weights/shared_files.py": WITH_VLLM,
    "weights/transports/collective.py": "NCCL: step `broadcasts` of gpu-check",
    "algorithms/math/losses.py": "draws that tests pass are drawn here",
    "engines/models/forward.py": "buffers of a model on the meta device: step `loading`",
    "engines/models/packed_rows.py": "padding of shared tokens, attention without a kernel",
    "engines/training/model_rank.py": SEVERAL_RANKS,
    "engines/training/model_trainer.py": "buffers of experts' routers, saved with the model",
    "engines/training/tasks.py": "episodes of several samples",
    "engines/training/training_backend.py": SEVERAL_RANKS,
}
"""Why placements of a file are not reached on the simulated GPU."""


PLANTED = ("batch on the CPU", "column on the CPU", "served on the CPU")
QUICK_AREAS = ("scores", "offload", "weights", "resharding", *PLANTED)


def run_areas(*names: str) -> dict[str, Any]:
    """Run areas of `tests.engines.simulated_gpu_run`, by default all, in a process of their own."""
    command = [sys.executable, "-m", "tests.engines.simulated_gpu_lines", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Results of the areas of the quick tests."""
    quick = [*QUICK_AREAS, *KINDS, "deepspeed"]
    return run_areas(*quick)["results"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    return run_areas()


def list_reached(run: dict[str, Any]) -> dict[str, str]:
    """Return an area that reaches it, without planted faults, by place."""
    areas = {area: places for area, places in run["reached"].items() if "CPU" not in area}
    return {place: area for area, places in areas.items() for place in places}


@pytest.mark.slow
def test_lines_that_place_tensors_are_reached_or_have_a_reason(run: dict[str, Any]):
    places, reached = list_placements(), list_reached(run)
    assert set(reached) <= set(places)
    missing = {place for place in places if place not in reached}
    print(f"\nreached {len(reached)} of {len(places)} placements")
    for place in sorted(missing):
        print(f"{place}: {places[place]}: {WITHOUT_RUN.get(place.partition(':')[0], '')}")
    assert {place.partition(":")[0] for place in missing} == set(WITHOUT_RUN)
    assert len(reached) >= 0.5 * len(places)


@pytest.mark.slow
def test_all_losses_and_gradients_are_those_of_the_cpu(run: dict[str, Any]):
    losses = run["results"]["losses"]
    assert losses["ok"] and losses["variants"] > 20


@pytest.mark.slow
def test_a_checkpoint_of_the_gpu_repeats_a_step_and_holds_what_that_of_the_cpu_holds(
    run: dict[str, Any],
):
    checkpoint = dict(run["results"]["checkpoint"])
    assert checkpoint.pop("repeats")
    assert max(checkpoint.values()) < 1e-4


@pytest.mark.slow
def test_the_pretraining_loss_is_that_of_the_cpu(run: dict[str, Any]):
    assert max(run["results"]["pretraining"].values()) < 1e-3


@pytest.mark.slow
def test_adapters_are_merged_on_the_gpu(run: dict[str, Any]):
    adapters = run["results"]["adapters"]
    assert adapters["difference"] < 1e-5 and adapters["devices"] == ["simgpu"]


def test_scorers_compute_on_the_gpu_what_they_compute_on_the_cpu(results: dict[str, Any]):
    scores = results["scores"]
    assert scores["difference"] < 1e-4
    assert (scores["layers"], scores["others"]) == (["cpu"], ["simgpu"]), "layers in host memory"


def test_layers_in_host_memory_change_no_bit(results: dict[str, Any]):
    """Nor once another version is loaded. A layer that computed before its copy would give NaN."""
    assert results["offload"]["equal"] == [True, True] and results["offload"]["is_updated"]


def test_each_layer_is_copied_while_the_layer_before_computes(results: dict[str, Any]):
    offload = results["offload"]
    computed = offload["queued"].count("l")
    assert computed >= 2 * offload["layers"], "several passes"
    assert offload["queued"] == "cc" + "lc" * (computed - 1) + "l", "one ahead"
    assert offload["compute stream"] == ["wait", "compute", "record"] * computed


def test_two_layers_at_most_are_on_the_gpu_and_memory_is_taken_once_it_is_free(
    results: dict[str, Any],
):
    offload = results["offload"]
    assert offload["resident"] == 2
    copies = range(offload["queued"].count("c"))
    assert offload["released"] == [max(0, number - 1) for number in copies]


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_train_on_the_gpu_as_on_the_cpu(kind: str, results: dict[str, Any]):
    training = results[kind]
    assert training["numbers"] < 1e-4 and training["parameters"] < 1e-4


def test_deepspeed_trains_in_bfloat16_on_the_gpu(results: dict[str, Any]):
    training = results["deepspeed"]
    assert len(training["norms"]) == 2 and min(training["norms"]) > 0
    assert training["devices"] == ["simgpu"]


@pytest.mark.parametrize("kind", [*KINDS, "deepspeed"])
def test_the_sums_of_a_micro_batch_reach_the_cpu_in_one_copy(kind: str, results: dict[str, Any]):
    """The other copy is that of the rows' lengths, by which they are packed."""
    assert results[kind]["host_copies"] == [2, 2]


def test_published_weights_are_copied_once_and_loaded_on_the_gpu(results: dict[str, Any]):
    weights = results["weights"]
    assert weights["difference"] == 0 and weights["devices"] == ["simgpu"]
    assert weights["pull_copies"] == 0
    assert weights["publish_copies"] == weights["tensors"]
    assert weights["host_bytes"] == weights["tensor_bytes"]
    assert weights["publish_waits"] == 0, "no other stream of the GPU is waited for"


def test_resharding_on_a_gpu_copies_nothing_to_the_cpu(results: dict[str, Any]):
    assert results["resharding"] == {"is_planned": True, "host_copies": 0, "difference": 0.0}


def test_a_tensor_left_on_the_cpu_is_found(results: dict[str, Any]):
    assert results["batch on the CPU"].startswith("aten::embedding")
    assert results["column on the CPU"].startswith("aten::where")
    assert not results["served on the CPU"]["is_planned"]
