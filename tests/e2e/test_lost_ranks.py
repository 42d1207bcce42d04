"""A rank of a split model that only scores is killed or stopped: its replica comes back whole."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.launched import audit, events, rows, train
from tests.rewards.tiny_classifier import write_classifier

pytestmark = pytest.mark.slow
REFERENCE = ["algorithm.kl_coef=0.01", "reference.world_size=2"]
REWARD = "rewards=[{{kind: model, path: {}, world_size: 2}}]"


@pytest.mark.parametrize(
    ("role", "sent"),
    [
        ("reference", signal.SIGKILL),
        ("reference", signal.SIGSTOP),
        ("reward", signal.SIGKILL),
    ],
    ids=["reference killed", "reference stopped", "reward model killed"],
)
def test_a_replica_that_loses_a_rank_comes_back_and_every_group_is_trained_once(
    toy: Path, tmp_path: Path, role: str, sent: signal.Signals
):
    settings: Sequence[str] = REFERENCE
    if role == "reward":
        settings = [REWARD.format(write_classifier(tmp_path / "judge"))]
    words = ["run.steps=100000", "evaluation.at_start=false", "trainer.collective_timeout_s=10"]
    run, run_dir = train(toy, f"{role}-{sent.name}", *words, *settings)
    run.until(lambda: len(rows(run_dir)) >= 2)
    lost = run.actor("ScoringRankActor").pid
    os.kill(lost, sent)
    run.until(lambda: len(events(run_dir, "restarted")) == 1)
    steps = len(rows(run_dir))
    run.until(lambda: len(rows(run_dir)) >= steps + 5)
    assert not psutil.pid_exists(lost)
    run.stop()
    for event in ("died", "restarted"):
        assert [e["actor"] for e in events(run_dir, event)] == [f"{role}-0"]
    metrics = rows(run_dir)
    assert metrics[-1]["ledger/dropped"] == 0
    assert len(audit(run_dir).trained) == 4 * len(metrics)
    (crashed,) = events(run_dir, "crashed")
    # It may stop in a collective, or after its last one and before its answer.
    stopped = r"rank 0 waited 10 s for the other ranks in|reference-0/1\.score_groups: no answer"
    reason = stopped if sent == signal.SIGSTOP else ""
    assert crashed["actor"] == f"{role}-0"
    assert re.match(f"its ranks are lost: ({reason})", crashed["reason"])
