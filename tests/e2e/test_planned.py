"""A plan for two GPUs on a Ray cluster that declares two GPUs which its machine lacks."""

import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from streamrl.cli.main import main
from streamrl.config.run_config import load_config
from tests.e2e.shared_runs import CONFIGS
from tests.toy import write_toy


@pytest.mark.slow
def test_a_plan_is_placed_on_declared_gpus_and_ends_where_torch_finds_none(tmp_path: Path):
    toy, plan = write_toy(tmp_path / "toy"), tmp_path / "plan.yaml"
    words = [str(CONFIGS / "grpo_arithmetic.yaml"), f"model.path={toy}/model", "data.eval="]
    words += [f"data.train={toy}/rows.jsonl", f"run.dir={tmp_path}", "run.name=pretended"]
    words += ["generator.max_new_tokens=100", "generator.max_concurrent_rollouts=16", "run.steps=2"]
    words += ["pipeline.groups_per_step=8", "telemetry.wandb.mode=disabled"]
    options = ["--cluster", "2xH100", "--model", "qwen2.5-1.5b", "--proposals", "0"]
    assert main(["plan", *words, *options, "-o", str(plan)]) == 0
    planned = load_config(plan)
    assert planned.placement.mode == "colocated" and planned.generator.kv_cache_mb
    node = {"num_gpus": 2, "num_cpus": 8, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        command = [sys.executable, "-m", "streamrl.cli", "train", str(plan)]
        command.append(f"placement.address={cluster.address}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=300.0)
    finally:
        cluster.shutdown()
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, output
    assert "slots: 0 for generator, reward, policy; 1 for generator, policy" in output
    assert "streamrl: the run computes on GPUs, but torch" in output and "Traceback" not in output
    assert not (tmp_path / "pretended" / "metrics.jsonl").exists()
