"""One run in every placement: the same rollouts, token for token, and the same losses."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launched import Launched, rows
from tests.e2e.recorded import Played, TrainedRollouts, play
from tests.toy import write_toy

STEPS, HALF = 6, 3
PAIR = ("disaggregated", "colocated")
"""Modes of GRPO that are not slow tests."""
MODES = {
    "grpo": (*PAIR, "sequential", "interleaving"),
    # The pools of `split` equal those of `mixed` here.
    "ppo": (*PAIR, "sequential", "shadow", "mixed"),
}
MIXED = "placement.pools=[{policy: 1, generator: 1, reward: 1}, {critic: 1, value: 1}]"
ON_POLICY = [
    f"run.steps={STEPS}",
    "pipeline.max_staleness=0",
    # Several micro-batches a step: which rollouts share one depends on timing.
    "pipeline.micro_batch_tokens=128",
    "generator.max_new_tokens=12",
    "rewards=[{kind: length, unit: characters, least: 12, tolerance: 12}]",
    "algorithm.kl_coef=0.01",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "checkpoint.at_end=false",
    f"checkpoint.every={HALF}",
]
PPO = [
    "algorithm.name=ppo",
    "algorithm.group_size=2",
    "algorithm.epochs=2",
    "algorithm.mini_batches=2",
    "critic.trainer={world_size: 1}",
    # In a colocated run each of the two has a generator.
    "trainer.world_size=2",
    "generator.replicas=2",
]
SHADOWED = ("shadow", "mixed")
"""Modes of PPO with a shadow critic; in the others the critic's ranks compute the values."""
ALGORITHMS = {"grpo": ["algorithm.name=grpo"], "ppo": PPO}
ROUNDING = {
    # Terms as large as advantages, whose standard deviation is 1, may add up to 0.
    "loss/policy": 1e-5,
    "loss/value": 0.0,
    # In the first step the policy is its reference, and what is left of them is rounding.
    "loss/kl": 1e-7,
    "policy/kl_ref": 1e-7,
    "policy/grad_norm": 0.0,
    "critic/grad_norm": 0.0,
}
"""Absolute tolerance per loss, besides a relative one of 1e-4.

Which rollouts share a micro-batch depends on timing, and the order of sums on that: after three
updates of Adam losses may differ by one part in 1e5.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("placements"))


Runs = Mapping[str, Played]  # by algorithm and mode


@pytest.fixture(scope="module")
def pair(folder: Path) -> Runs:
    return play_modes(folder, [("grpo", mode) for mode in PAIR])


@pytest.fixture(scope="module")
def played(folder: Path, pair: Runs) -> Runs:
    keys = [(name, mode) for name, modes in MODES.items() for mode in modes]
    return {**pair, **play_modes(folder, [key for key in keys if "-".join(key) not in pair])}


def play_modes(folder: Path, keys: Sequence[tuple[str, str]]) -> Runs:
    """Run each algorithm in its mode."""
    runs = {}
    for name, mode in keys:
        settings = [*ON_POLICY, *ALGORITHMS[name], f"placement.mode={mode}"]
        settings += ["critic.replicas=1"] * (mode in SHADOWED)
        runs[f"{name}-{mode}"] = [*settings, *[MIXED] * (mode == "mixed")]
    return play(folder, runs)


def test_colocated_and_disaggregated_runs_have_the_same_tokens_and_losses(pair: Runs):
    disaggregated, colocated = (pair[f"grpo-{mode}"] for mode in PAIR)
    check_tokens([disaggregated.trained, colocated.trained])
    check_same(disaggregated.rows, colocated.rows)
    assert _sent_bytes(disaggregated) > 0 == _sent_bytes(colocated)


def check_tokens(runs: Sequence[TrainedRollouts], steps: int = STEPS) -> None:
    """Assert the same rollouts in every step, token for token."""
    assert {version for version, _, _ in runs[0]} == set(range(steps))
    assert all(run == runs[0] for run in runs)
    assert len({len(tokens) for tokens in runs[0].values()}) > 3, "lengths differ"


def _sent_bytes(run: Played) -> int:
    return sum(row["weights/bytes"] for row in run.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_placement_samples_the_same_tokens(played: Runs, name: str):
    check_tokens([played[f"{name}-{mode}"].trained for mode in MODES[name]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_placement_has_the_same_losses(played: Runs, name: str):
    for first, second in pairwise(played[f"{name}-{mode}"].rows for mode in MODES[name]):
        check_same(first, second)


@pytest.mark.slow
def test_a_resume_as_colocated_repeats_the_disaggregated_steps(pair: Runs, folder: Path):
    run_dir = folder / "runs" / "grpo-disaggregated"
    saved = str(run_dir / "checkpoints" / f"step_{HALF:06d}")
    run = Launched(["train", "--resume", saved, "placement.mode=colocated"], folder)
    assert run.wait() == 0, run.output
    metrics = rows(run_dir)
    assert not any(row["weights/bytes"] for row in metrics[HALF:]), "repeated as colocated"
    check_same(metrics, pair["grpo-disaggregated"].rows)


def check_same(rows: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> None:
    """Assert the same steps with the same losses; a term that an algorithm lacks is None."""
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row["reward/mean"] == other["reward/mean"]
        for loss, rounding in ROUNDING.items():
            if row[loss] is None or other[loss] is None:
                assert row[loss] is other[loss]
            else:
                assert row[loss] == pytest.approx(other[loss], rel=1e-4, abs=rounding), loss


@pytest.mark.slow
def test_colocated_generators_receive_no_weights(played: Runs):
    assert _sent_bytes(played["grpo-colocated"]) == 0
    assert _sent_bytes(played["grpo-sequential"]) > 0
    assert _sent_bytes(played["ppo-colocated"]) == 0
    # The critic's are sent to its shadow.
    assert 0 < _sent_bytes(played["ppo-mixed"]) < _sent_bytes(played["ppo-disaggregated"])
