"""Corrupted weights are refused and never sample a token, and the run continues."""

from pathlib import Path

import pytest

from streamrl.pipeline import PULL_ATTEMPTS
from streamrl.weights.transports.shared_memory import remove_stale_segments
from tests.e2e.launched import Launched, events, rows
from tests.e2e.sabotage import DAMAGED
from tests.toy import write_toy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sabotage")
    recipe, marks, path = write_toy(folder) / "recipe.yaml", folder / "marks", folder / "runs/bad"
    marks.mkdir()
    words = [str(recipe), str(marks), f"run.dir={folder}/runs", "run.name=bad", "run.steps=100000"]
    words += ["generator.replicas=2", "weights.transport=shared_memory", "weights.probe_every=1"]
    run = Launched([*words, "pipeline.max_staleness=0"], folder, module="tests.e2e.sabotage")
    run.until(lambda: (marks / "3").exists())
    steps = len(rows(path))
    run.until(lambda: len(rows(path)) > steps + 3)
    run.interrupt()
    run.wait()
    assert "Traceback" not in run.output
    assert run.orphans() == []
    return path


def test_every_fault_is_an_event_and_no_step_is_missing(run_dir: Path):
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == list(range(1, len(metrics) + 1))
    refused = [event["reason"] for event in events(run_dir, "weights_refused")]
    assert any("checksum is" in reason for reason in refused)
    assert any("received 0 buckets, expected 1" in reason for reason in refused)
    last = metrics[-1]
    assert last["weights/faults"] >= 3
    assert last["ledger/admitted"] == last["ledger/trained"] + last["ledger/in_flight"]


def test_a_version_damaged_in_shared_memory_is_published_again(run_dir: Path):
    refused = [event for event in events(run_dir, "weights_refused") if event["version"] == DAMAGED]
    # A generator that pulls late may find it already published again.
    assert {event["actor"] for event in refused} <= {"generator-0", "generator-1"}
    assert all("checksum is" in event["reason"] for event in refused)
    assert 1 <= len(refused) < 2 * PULL_ATTEMPTS, "no generator was replaced for it"


def test_a_generator_that_dies_in_a_pull_or_never_gets_weights_is_replaced(run_dir: Path):
    deaths = [event for event in events(run_dir, "died") if event["actor"] == "generator-0"]
    assert len(deaths) == 2
    assert "checksum is" in deaths[1]["reason"]


def test_no_token_is_sampled_by_corrupted_weights(run_dir: Path):
    for row in rows(run_dir):
        assert abs(row["policy/ratio_mean"] - 1) < 1e-5
        assert row["weights/probe_diff"] is None or row["weights/probe_diff"] < 1e-4


@pytest.mark.usefixtures("run_dir")
def test_an_interrupted_run_leaves_no_segment_in_shared_memory():
    assert remove_stale_segments() == []
