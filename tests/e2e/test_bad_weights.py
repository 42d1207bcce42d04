"""Weights that are tampered with never serve a token, and the run goes on."""

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
    recipe, marks, found = write_toy(folder) / "recipe.yaml", folder / "marks", folder / "runs/bad"
    marks.mkdir()
    settings = [
        f"run.dir={folder}/runs",
        "run.name=bad",
        "run.steps=100000",
        "generator.replicas=2",
        "weights.transport=shared_memory",
        "weights.probe_every=1",
        "pipeline.max_staleness=0",
    ]
    words = [str(recipe), str(marks), *settings]
    run = Launched(words, folder, module="tests.e2e.sabotage")
    run.until(lambda: (marks / "3").exists())
    came_back = len(rows(found))
    run.until(lambda: len(rows(found)) > came_back + 3)
    run.interrupt()
    run.wait()
    assert "Traceback" not in run.output
    assert run.orphans() == []
    return found


def test_every_fault_is_told_and_no_step_is_missing(run_dir: Path) -> None:
    found = rows(run_dir)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    refused = [event["reason"] for event in events(run_dir, "weights_refused")]
    assert any("checksum is" in reason for reason in refused)
    assert any("received 0 buckets, expected 1" in reason for reason in refused)
    last = found[-1]
    assert last["weights/faults"] >= 3
    assert last["ledger/admitted"] == last["ledger/trained"] + last["ledger/in_flight"]


def test_what_is_damaged_where_it_lies_is_sent_again(run_dir: Path) -> None:
    refused = [event for event in events(run_dir, "weights_refused") if event["version"] == DAMAGED]
    # One that comes late finds it as it was sent again.
    assert {event["actor"] for event in refused} <= {"generator-0", "generator-1"}
    assert all("checksum is" in event["reason"] for event in refused)
    assert 1 <= len(refused) < 2 * PULL_ATTEMPTS, "nobody had to be replaced for it"


def test_who_dies_over_a_version_comes_back_and_who_never_gets_one_is_replaced(
    run_dir: Path,
) -> None:
    deaths = [event for event in events(run_dir, "died") if event["actor"] == "generator-0"]
    assert len(deaths) == 2
    assert "checksum is" in deaths[1]["reason"]


def test_no_token_is_sampled_by_weights_that_are_not_the_trainers(run_dir: Path) -> None:
    for row in rows(run_dir):
        assert abs(row["policy/ratio_mean"] - 1) < 1e-5
        assert row["weights/probe_diff"] is None or row["weights/probe_diff"] < 1e-4


def test_a_run_leaves_nothing_in_shared_memory(run_dir: Path) -> None:
    assert remove_stale_segments() == [], "of a run that was interrupted"
