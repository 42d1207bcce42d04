"""The same run in every placement: the same rollouts, token for token, and the same losses."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launched import Launched, rows
from tests.e2e.recorded import Trained, trained
from tests.toy import write_toy

STEPS, HALF = 6, 3
PAIR = ("disaggregated", "colocated")
"""Modes that every session plays GRPO in."""
MODES = {
    "grpo": (*PAIR, "sequential", "interleaving"),
    # Pools as those of `split` are those of `mixed` here.
    "ppo": (*PAIR, "sequential", "shadow", "mixed"),
}
MIXED = "placement.pools=[{policy: 1, generator: 1, reward: 1}, {critic: 1, value: 1}]"
ON_POLICY = [
    f"run.steps={STEPS}",
    "pipeline.max_staleness=0",
    # Several micro-batches a step: which rollouts share one is a matter of who was quick.
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
ALGORITHMS = {"grpo": ["algorithm.name=grpo"], "ppo": PPO}
ROUNDING = {
    # Its terms are of the size of advantages, whose standard deviation is 1, and may add up to 0.
    "loss/policy": 1e-5,
    "loss/value": 0.0,
    # In the first step the policy is its reference, and what is left of them is rounding.
    "loss/kl": 1e-7,
    "policy/kl_ref": 1e-7,
    "policy/grad_norm": 0.0,
}
"""How far a loss may be from another however small it is; beside 1e-4 of it.

Which rollouts share a micro-batch is a matter of who was quick, and in which order sums are made of
that: after three updates of Adam one part in 1e5 comes of it now and then.
"""


@dataclass(frozen=True)
class Played:
    """A run that has ended: the rows of its metrics, and what it trained."""

    rows: list[dict[str, Any]]
    trained: Trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("placements"))


Runs = Mapping[tuple[str, str], Played]
"""By algorithm and mode."""


@pytest.fixture(scope="module")
def pair(folder: Path) -> Runs:
    """GRPO apart and colocated."""
    return _play(folder, {"grpo": PAIR})


@pytest.fixture(scope="module")
def played(folder: Path, pair: Runs) -> Runs:
    """Each algorithm in each mode."""
    missing = {
        name: [mode for mode in modes if (name, mode) not in pair] for name, modes in MODES.items()
    }
    return {**pair, **_play(folder, missing)}


def _play(folder: Path, modes: Mapping[str, Sequence[str]]) -> Runs:
    """Play each algorithm in some modes, all in one process."""
    runs = [
        [
            *ON_POLICY,
            *ALGORITHMS[name],
            f"run.dir={folder}/runs",
            f"run.name={name}-{mode}",
            f"placement.mode={mode}",
            *([MIXED] if mode == "mixed" else []),
        ]
        for name, some in modes.items()
        for mode in some
    ]
    words = [str(folder / "recipe.yaml"), str(folder), *map(json.dumps, runs)]
    run = Launched(words, folder, module="tests.e2e.recorded")
    assert run.wait(timeout_s=1200.0) == 0, run.output
    assert run.orphans() == []
    return {
        (name, mode): Played(
            rows(folder / "runs" / f"{name}-{mode}"), trained(folder, f"{name}-{mode}")
        )
        for name, some in modes.items()
        for mode in some
    }


def test_a_colocated_run_samples_the_same_tokens_and_has_the_same_losses_as_one_apart(
    pair: Runs,
) -> None:
    apart, together = (pair["grpo", mode] for mode in PAIR)
    check_tokens([apart.trained, together.trained])
    check_same(apart.rows, together.rows)
    assert _moved(apart) > 0 == _moved(together), "weights travel where processes are apart"


def check_tokens(found: Sequence[Trained]) -> None:
    """The same rollouts in every step, token for token."""
    assert {version for version, _, _ in found[0]} == set(range(STEPS))
    for one, other in pairwise(found):
        assert one == other
    assert len({len(tokens) for tokens in found[0].values()}) > 3, "lengths differ"


def _moved(run: Played) -> int:
    """Bytes of weights that a run has sent."""
    return sum(row["weights/bytes"] for row in run.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_placement_samples_the_same_tokens(played: Runs, name: str) -> None:
    check_tokens([played[name, mode].trained for mode in MODES[name]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_placement_has_the_same_losses(played: Runs, name: str) -> None:
    for one, other in pairwise(played[name, mode].rows for mode in MODES[name]):
        check_same(one, other)


@pytest.mark.slow
def test_a_run_that_is_resumed_on_one_pool_goes_on_as_it_would_have_apart(
    pair: Runs, folder: Path
) -> None:
    run_dir = folder / "runs" / "grpo-disaggregated"
    saved = str(run_dir / "checkpoints" / f"step_{HALF:06d}")
    run = Launched(["train", "--resume", saved, "placement.mode=colocated"], folder)
    assert run.wait() == 0, run.output
    found = rows(run_dir)
    assert not any(row["weights/bytes"] for row in found[HALF:]), "they are made again, here"
    check_same(found, pair["grpo", "disaggregated"].rows)


def check_same(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> None:
    """The same steps with the same losses."""
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for mine, theirs in zip(one, other, strict=True):
        assert mine["reward/mean"] == theirs["reward/mean"]
        for loss, rounding in ROUNDING.items():
            assert are_close(mine[loss], theirs[loss], rounding), (mine["step"], loss)


def are_close(one: float | None, other: float | None, rounding: float) -> bool:
    """Whether two losses agree, or are both of a term that the algorithm does not have."""
    if one is None or other is None:
        return one is other
    return one == pytest.approx(other, rel=1e-4, abs=rounding)


@pytest.mark.slow
def test_where_generators_share_a_process_with_the_trainer_no_weights_travel(played: Runs) -> None:
    assert _moved(played["grpo", "colocated"]) == 0 < _moved(played["grpo", "sequential"])
    # The critic's go to its shadow as ever; the policy's would go to two generators.
    together, apart = (_moved(played["ppo", mode]) for mode in ("colocated", "disaggregated"))
    assert 0 < together < apart / 2
