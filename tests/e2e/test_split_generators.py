"""Runs whose generator is split over two processes: each version is verified on both ranks."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.launched import audit, events, rows, train
from tests.e2e.recorded import Played, play
from tests.e2e.test_placements import ON_POLICY
from tests.toy import write_toy

pytestmark = pytest.mark.slow

STEPS = 4
SPLIT = [
    *ON_POLICY,
    "algorithm.name=grpo",
    f"run.steps={STEPS}",
    "generator.tensor_parallel=2",
    "weights.probe_every=1",
]
COLOCATED = ["placement.mode=colocated", "trainer.backend=torch", "trainer.world_size=2"]


def write_mixture(folder: Path) -> str:
    """Write a mixture of experts with the toy's tokenizer into the folder; return its path."""
    config = AutoConfig.from_pretrained(folder / "model")
    mixture = AutoConfig.for_model(
        "qwen3_moe",
        **{name: getattr(config, name) for name in ("vocab_size", "hidden_size")},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        **{"head_dim": 32, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2},
        pad_token_id=0,
    )
    shutil.copytree(folder / "model", folder / "mixture")
    AutoModelForCausalLM.from_config(mixture).save_pretrained(folder / "mixture")
    return f"model.path={folder}/mixture"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def played(folder: Path) -> dict[str, Played]:
    mixture = write_mixture(folder)
    runs = {
        "dense": [*SPLIT, "weights.transport=store"],
        "mixture": [*SPLIT, mixture, "weights.transport=collective"],
        "mixture colocated": [*SPLIT, mixture, *COLOCATED],
    }
    return play(folder, runs)


@pytest.mark.parametrize("name", ["dense", "mixture", "mixture colocated"])
def test_a_split_generator_serves_every_version_of_a_run(
    played: dict[str, Played], folder: Path, name: str
):
    run = played[name]
    assert {version for version, _, _ in run.trained} == {*range(STEPS)}
    # A pull that ends after its step was logged is in the next row, or in none.
    checked = [
        row["weights/probe_diff"] for row in run.rows if row["weights/probe_diff"] is not None
    ]
    assert len(checked) >= STEPS - 1 and max(checked) < 1e-4
    assert not any(row["weights/faults"] for row in run.rows)
    assert not events(folder / "runs" / name, "weights_not_loaded")
    # A broadcast of slices takes norms and routers to both ranks.
    takes_slices = run.rows[-1]["weights/bytes"] > run.rows[0]["weights/bytes"]
    assert takes_slices == (name == "mixture")


def test_a_killed_split_generator_takes_slices_again(toy: Path):
    words = [*SPLIT[3:], "generator.replicas=2", "weights.transport=collective"]
    run, run_dir = train(toy, "split-killed", *words, "run.steps=100000")
    run.until(lambda: len(rows(run_dir)) >= 4)
    both_take_slices = max(row["weights/bytes"] for row in rows(run_dir)[2:])
    os.kill(run.actor("GeneratorActor").pid, signal.SIGKILL)
    run.until(lambda: len(events(run_dir, "restarted")) == 1)
    steps = len(rows(run_dir))
    run.until(lambda: both_take_slices in [r["weights/bytes"] for r in rows(run_dir)[steps + 2 :]])
    run.stop()
    metrics = rows(run_dir)
    assert metrics[-1]["ledger/dropped"] == 0
    assert len(audit(run_dir).trained) == 4 * len(metrics)
    for event in events(run_dir, "weights_refused"):
        assert event["reason"].startswith(f"weights version {event['version']} went to its readers")
