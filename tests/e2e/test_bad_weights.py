"""Weights that are tampered with never serve a token, and the run goes on."""

from pathlib import Path

import pytest

from streamrl.cli.train import train
from streamrl.config import load_config
from tests.e2e.launched import events, rows
from tests.e2e.sabotage import Sabotage
from tests.toy import write_toy

pytestmark = pytest.mark.slow

STEPS = 60


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sabotage")
    write_toy(folder)
    (folder / "marks").mkdir()
    settings = [
        f"run.dir={folder}/runs",
        "run.name=bad",
        f"run.steps={STEPS}",
        "generator.replicas=2",
        "weights.transport=shared_memory",
        "weights.probe_every=1",
        "pipeline.max_staleness=0",
    ]
    config = load_config(folder / "recipe.yaml", settings)
    train(config, None, Sabotage(folder / "marks"))
    return config.run_dir


def test_every_fault_is_told_and_the_run_ends_with_all_its_steps(run_dir: Path) -> None:
    assert [row["step"] for row in rows(run_dir)] == list(range(1, STEPS + 1))
    refused = [event["reason"] for event in events(run_dir, "weights_refused")]
    assert any("checksum is" in reason for reason in refused)
    assert any("buckets came, wanted" in reason for reason in refused)
    assert rows(run_dir)[-1]["weights/faults"] >= 3
    last = rows(run_dir)[-1]
    assert last["ledger/admitted"] == last["ledger/trained"] + last["ledger/in_flight"]


def test_who_dies_over_a_version_comes_back_and_who_never_gets_one_is_replaced(
    run_dir: Path,
) -> None:
    deaths = [event for event in events(run_dir, "died") if event["actor"] == "generator-0"]
    assert len(deaths) >= 2
    assert "checksum is" in deaths[1]["reason"]
    assert len(list((run_dir.parent.parent / "marks").iterdir())) >= 3


def test_no_token_is_sampled_by_weights_that_are_not_the_trainers(run_dir: Path) -> None:
    for row in rows(run_dir):
        assert abs(row["policy/ratio_mean"] - 1) < 1e-5
        assert row["weights/probe_diff"] is None or row["weights/probe_diff"] < 1e-4
