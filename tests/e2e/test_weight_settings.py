"""Runs whose weights travel, and come, in other ways than by default: on the real engines."""

from pathlib import Path

import pytest

from tests.e2e.launched import Launched, events, rows
from tests.toy import write_toy

pytestmark = pytest.mark.slow

COMMON = ["run.steps=6", "evaluation.at_start=false", "weights.probe_every=1"]
BROADCAST = [
    "generator.replicas=2",
    "algorithm.kl_coef=0.01",
    "pipeline.max_staleness=3",
    "weights.transport=collective",
    "weights.publish_every=2",
    "weights.kv=keep",
    "reference.every=2",
    "reference.decay=0.5",
    "evaluation.at_end=false",
]


def run_to_its_end(toy: Path, name: str, *settings: str) -> tuple[Path, str]:
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", f"run.name={name}"]
    run = Launched([*words, *COMMON, *settings], toy)
    assert run.wait() == 0, run.output
    assert run.orphans() == []
    run_dir = toy / "runs" / name
    for trouble in ("weights_refused", "publish_failed", "died"):
        assert not events(run_dir, trouble)
    probed = [row["weights/probe_diff"] for row in rows(run_dir)]
    found = [difference for difference in probed if difference is not None]
    assert found and max(found) < 1e-4, "generators say what the trainer says"
    return run_dir, run.output


def test_every_other_version_is_broadcast_and_the_reference_moves_along(tmp_path: Path) -> None:
    run_dir, output = run_to_its_end(write_toy(tmp_path), "broadcast", *BROADCAST)
    assert "weights: collective, as weights.transport says" in output
    assert not events(run_dir, "weights_detour"), "a newcomer's first version is none"
    found = rows(run_dir)
    for version, row in enumerate(found):
        by_staleness = row["staleness/histogram"]["counts"]
        sampled_by = {version - stale for stale, count in enumerate(by_staleness) if count}
        assert all(0 <= by <= version and by % 2 == 0 for by in sampled_by)
    assert found[0]["policy/kl_ref"] == pytest.approx(0.0, abs=1e-4)
    assert found[-1]["policy/kl_ref"] > 1e-4


def test_versions_of_adapters_on_disk_are_models_others_can_load(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    toy = write_toy(tmp_path)
    run_dir, _ = run_to_its_end(
        toy, "adapters", "trainer.lora_rank=4", "weights.transport=disk", "weights.on_update=drain"
    )
    assert not any(row["weights/interrupted"] for row in rows(run_dir))
    version, saved, base = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (
            run_dir / "weights" / "policy" / "latest",
            run_dir / "checkpoints" / "step_000006" / "model",
            toy / "model",
        )
    )
    assert version.keys() == saved.keys() == base.keys()
    assert all(torch.equal(version[name], saved[name]) for name in saved)
    assert not all(torch.equal(version[name], base[name]) for name in base)
