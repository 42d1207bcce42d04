"""One run with each model whole and over ranks: the same rollouts, losses and final weights.

On a CPU `scorer.offload` changes nothing (`keep_layers_on_host`): here it shows that a run accepts
it. Its equal bits are those of the simulated GPU, in tests/engines/test_simulated_gpu.py.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.dataflow import CRITIC, POLICY
from streamrl.run_dir.checkpoint import get_role_dirs
from tests.e2e.recorded import Played, play
from tests.e2e.test_placements import check_same, check_tokens
from tests.toy import write_toy

STEPS = 3
SHARED = [
    f"run.steps={STEPS}",
    "pipeline.max_staleness=0",
    # A micro-batch an update: which rollouts share one does not depend on timing.
    "pipeline.micro_batch_tokens=4096",
    "generator.max_new_tokens=12",
    "rewards=[{kind: length, unit: characters, least: 12, tolerance: 12}]",
    "algorithm.kl_coef=0.01",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "trainer.lr=1.0e-4",
    # AdamW's first update is lr * g / (|g| + 1e-8): of a gradient that sums to nearly zero, the
    # rounding of another order would be an update of up to lr. Clipped to this norm, such gradients
    # are far below 1e-8 and their updates small.
    "trainer.grad_clip=1.0e-3",
]
ROUNDING = 1e-6
"""Largest difference of a weight that ranks may make; half of the updates are above 5e-5."""
PPO = ["algorithm={name: ppo, kl_coef: 0.01, group_size: 2, epochs: 2, mini_batches: 2}"]
LORA = ["algorithm.name=grpo", "trainer.lora_rank=4"]
APART, COLOCATED = "placement.mode=disaggregated", "placement.mode=colocated"
ZERO_3 = "{world_size: 2, backend: deepspeed, zero_stage: 3, lr: 1.0e-4}"
WHOLE_CRITIC = "critic.trainer={world_size: 1, zero_stage: 1, lr: 1.0e-4}"
POLICY_ZERO_3 = ["trainer.world_size=2", "trainer.zero_stage=3"]
POLICY_FSDP = [*POLICY_ZERO_3, "trainer.backend=torch"]
TENSOR_PARALLEL = "{world_size: 2, backend: torch, tensor_parallel: 2, lr: 1.0e-4}"
REFERENCE = "reference.world_size=2"
SHADOW = ["critic.replicas=1", "critic.shadow={world_size: 2, tensor_parallel: 2}"]
WHOLE = "ppo"
RUNS: Mapping[str, list[str]] = {
    WHOLE: [*PPO, APART, "critic.trainer={lr: 1.0e-4}"],
    "ppo over ranks": [*PPO, APART, f"critic.trainer={ZERO_3}", REFERENCE],
    "ppo colocated": [*PPO, COLOCATED, "critic.trainer={lr: 1.0e-4}"],
    "ppo with a shadow critic": [*PPO, APART, "critic.trainer={lr: 1.0e-4}", "critic.replicas=1"],
    "ppo with all over ranks": [
        *[*PPO, APART, f"critic.trainer={ZERO_3}", REFERENCE, *SHADOW],
        "scorer.offload=true",
    ],
    "ppo colocated over ranks": [
        *[*PPO, COLOCATED, f"critic.trainer={ZERO_3}", REFERENCE, "trainer.world_size=2"],
        "scorer.offload=true",
    ],
    "ppo with the policy over ranks": [*PPO, APART, *POLICY_ZERO_3, WHOLE_CRITIC],
    "ppo colocated over ranks of tensor parallelism": [
        *[*PPO, COLOCATED, "trainer.world_size=2", "trainer.backend=torch"],
        *["trainer.tensor_parallel=2", f"critic.trainer={TENSOR_PARALLEL}"],
    ],
    "lora": [*LORA, APART],
    "lora colocated": [*LORA, COLOCATED],
    "lora over ranks": [*LORA, APART, *POLICY_FSDP],
    "lora colocated over ranks": [*LORA, COLOCATED, *POLICY_FSDP],
    "lora with a reference": [*LORA, APART, "reference.replicas=1"],
    "lora with a reference over ranks": [*LORA, APART, "reference={replicas: 1, world_size: 2}"],
}
"""Settings of runs by name; the first word says with which run each is compared."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def played(folder: Path) -> Mapping[str, Played]:
    return play(folder, {name: [*SHARED, *settings] for name, settings in RUNS.items()})


def read_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the final parameters of all trained models of a run."""
    saved = folder / "runs" / name / "checkpoints" / f"step_{STEPS:06d}"
    paths = {role: get_role_dirs(saved, role)[0] / "model.safetensors" for role in (POLICY, CRITIC)}
    return {
        f"{role}: {parameter}": value
        for role, path in paths.items()
        if path.exists()
        for parameter, value in load_file(path).items()
    }


def check_layout(runs: Mapping[str, Played], folder: Path, name: str) -> None:
    """Assert the rollouts, losses and final weights of the run with whole models.

    Only models over ranks add up in another order.
    """
    base = name.split()[0]
    check_same(runs[name].rows, runs[base].rows)
    check_tokens([runs[base].trained, runs[name].trained], STEPS)
    weights, expected = read_weights(folder, name), read_weights(folder, base)
    assert weights.keys() == expected.keys()
    differences = {key: float((weights[key] - expected[key]).abs().max()) for key in weights}
    assert max(differences.values()) <= (ROUNDING if "over ranks" in name else 0.0), differences


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if " " in name])
def test_every_layout_of_the_models_trains_as_whole_models(
    played: Mapping[str, Played], folder: Path, name: str
):
    check_layout(played, folder, name)
