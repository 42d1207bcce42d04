"""Toy runs with other settings than the defaults: weights transports, filters, memory."""

from pathlib import Path

import pytest

from streamrl.engines.models.forward import load_skeleton
from streamrl.telemetry.chrome_trace import read_spans
from tests.e2e.launched import events
from tests.e2e.shared_runs import Ended, RunsInTurn

pytestmark = pytest.mark.slow

PROBED = ["run.steps=6", "evaluation.at_start=false", "weights.probe_every=1"]
COLOCATED = ["placement.mode=colocated", "pipeline.max_staleness=0"]
SETTINGS = {
    "broadcast": [
        *(*PROBED, "generator.replicas=2", "algorithm.kl_coef=0.01", "pipeline.max_staleness=3"),
        *("weights.transport=collective", "weights.publish_every=2", "weights.kv=keep"),
        *("reference.every=2", "reference.decay=0.5", "evaluation.at_end=false"),
    ],
    "adapters": [*PROBED, "trainer.lora_rank=4", "weights.transport=store"],
    "cast": [*COLOCATED, "run.steps=2", "generator.dtype=bfloat16"],
    "filtered": [
        *("run.steps=4", "evaluation.at_start=false", "evaluation.at_end=false"),
        *("algorithm.name=ppo", "algorithm.kl_coef=0.01", "pipeline.max_staleness=0"),
        "filter={kind: function, function: keep, max_filter_rounds: 100, oversample: auto}",
        f"filter.path={Path(__file__).with_name('keep_tenth.py')}",
    ],
    "sharded": [
        *COLOCATED,
        *("run.steps=3", "weights.probe_every=1"),
        *("trainer.world_size=2", "trainer.zero_stage=3"),
        *("generator.kv_cache_mb=256", "placement.memory_mb=257"),
    ],
}


@pytest.fixture(scope="module")
def runs(toy: Path) -> RunsInTurn:
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}"]
    commands = {name: [*words, f"run.name={name}", *more] for name, more in SETTINGS.items()}
    return RunsInTurn(commands, toy)


def check_probes(run: Ended) -> None:
    """Assert that the run succeeded and that generators and trainer agree in logprobs."""
    assert run.code == 0, run.output
    for trouble in ("weights_refused", "publish_failed", "died"):
        assert not events(run.run_dir, trouble)
    differences = [d for row in run.rows if (d := row["weights/probe_diff"]) is not None]
    assert differences and max(differences) < 1e-4


def test_every_other_version_is_broadcast_and_the_reference_follows(runs: RunsInTurn):
    run = runs.wait("broadcast")
    check_probes(run)
    assert "weights: collective (set by weights.transport)" in run.output
    assert not events(run.run_dir, "weights_detour"), "a first version is no fallback"
    metrics = run.rows
    for version, row in enumerate(metrics):
        by_staleness = row["staleness/histogram"]["counts"]
        sampled_by = {version - stale for stale, count in enumerate(by_staleness) if count}
        assert all(0 <= by <= version and by % 2 == 0 for by in sampled_by)
    assert metrics[0]["policy/kl_ref"] == pytest.approx(0.0, abs=1e-4)
    assert metrics[-1]["policy/kl_ref"] > 1e-4


def test_adapters_are_merged_in_the_generator_and_in_the_saved_model(runs: RunsInTurn, toy: Path):
    from transformers import AutoModelForCausalLM

    run = runs.wait("adapters")
    check_probes(run)
    assert not any(row["weights/interrupted"] for row in run.rows)
    saved, base = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (run.run_dir / "checkpoints" / "step_000006" / "model", toy / "model")
    )
    assert saved.keys() == base.keys()
    assert not all(saved[name].equal(base[name]) for name in base)


def test_a_generator_of_another_dtype_copies_each_version_whole(runs: RunsInTurn, toy: Path):
    run = runs.wait("cast")
    assert run.code == 0, run.output
    copied = [row["weights/copied_bytes"] or 0 for row in run.rows]
    parameters = load_skeleton(str(toy / "model")).parameters()
    model_bytes = sum(2 * parameter.numel() for parameter in parameters)
    assert sum(copied) and {num_bytes % model_bytes for num_bytes in copied} == {0}
    assert [row["weights/bytes"] for row in run.rows] == [0, 0]


def test_sharded_colocated_ranks_exchange_weights_and_offload_kv_cache_and_optimizer(
    runs: RunsInTurn, toy: Path
):
    # Each rank receives half of a version from the other and copies its own half: together a
    # model's bytes received, and as many copied.
    parameters = load_skeleton(str(toy / "model")).parameters()
    model_bytes = sum(parameter.numel() * 4 for parameter in parameters)
    run = runs.wait("sharded")
    assert run.code == 0, run.output
    text = " ".join(run.output.split())
    assert "the KV cache is released while it trains" in text
    assert "the optimizer's state is offloaded while it generates" in text
    assert [row["weights/bytes"] % (model_bytes // 2) for row in run.rows] == [0] * 3
    assert sum(row["weights/bytes"] for row in run.rows) >= 2 * model_bytes
    pulls = [row for row in run.rows if row["weights/bytes"]]
    assert all(row["weights/copied_bytes"] == row["weights/bytes"] for row in pulls)
    assert all(row["weights/probe_diff"] < 1e-4 for row in run.rows)
    # Steps that are reported together have one peak.
    peaks = [row for row in run.rows if "memory/train_mb" in row]
    assert peaks, "training and generation do not hold their memory at the same time"
    assert all(row["memory/generate_mb"] - row["memory/train_mb"] > 128 for row in peaks)


def test_reference_and_value_are_not_computed_for_filtered_groups(runs: RunsInTurn):
    run = runs.wait("filtered")
    assert run.code == 0, run.output
    *_, last = run.rows
    filtered, trained = last["ledger/filtered"], last["ledger/trained"]
    assert trained == 16 and filtered > 3 * trained
    spans = read_spans(run.run_dir / "trace.json")
    scored = {
        stage: sum(int(span.args["groups"]) for span in spans if span.name == stage)
        for stage in ("reward", "reference", "value")
    }
    assert scored["reward"] >= filtered + trained
    kept = trained + last["ledger/in_flight"] + last.get("drops/surplus", 0)
    for stage in ("reference", "value"):
        assert trained <= scored[stage] <= kept, "and of what was in flight when a step was full"
    for row in run.rows:
        assert row["queue/refused"] == 0 and row["staleness/max"] == 0
        assert 0.5 < row["filter/share"] < 1 and row["filter/oversample"] >= 1
        assert 0 < row["filter/generate_s"] < row["time/generate_s"]
        assert 0 < row["filter/score_s"] < row["time/score_s"]
    assert last["filter/oversample"] > 2
    text = " ".join(run.output.split())
    assert f"{filtered} groups ({filtered / (filtered + trained):.0%})" in text


def test_none_of_the_runs_leaves_a_process(runs: RunsInTurn):
    assert runs.run.wait() == 0
    assert runs.run.orphans() == []
