"""Runs whose trainer ranks share the tokens of each micro-batch, against a run of a single rank."""

import json
from pathlib import Path

import pytest

from tests.e2e.launched import Launched, rows
from tests.e2e.recorded import trained
from tests.e2e.test_placements import ON_POLICY, check_same
from tests.toy import write_toy

pytestmark = pytest.mark.slow

STEPS = 3
PAIR = ["trainer.world_size=2", "trainer.sequence_parallel=2"]
RUNS = {
    "alone": ["trainer.backend=torch"],
    "whole": [*PAIR, "trainer.backend=torch", "trainer.zero_stage=0"],
    "sharded": [*PAIR, "trainer.backend=torch", "trainer.zero_stage=3"],
    "deepspeed": [*PAIR, "trainer.zero_stage=1", "placement.mode=colocated"],
}


def test_ranks_that_share_tokens_have_the_tokens_and_losses_of_a_single_rank(tmp_path: Path):
    folder = write_toy(tmp_path)
    common = [*ON_POLICY, f"run.steps={STEPS}", f"run.dir={folder}/runs"]
    runs = [[*common, *settings, f"run.name={name}"] for name, settings in RUNS.items()]
    words = [str(folder / "recipe.yaml"), str(folder), *map(json.dumps, runs)]
    Launched(words, folder, module="tests.e2e.recorded").finish()
    alone, *others = (trained(folder, name) for name in RUNS)
    assert {version for version, _, _ in alone} == set(range(STEPS))
    assert others == [alone] * len(others)
    first, *rest = (rows(folder / "runs" / name) for name in RUNS)
    for metrics in rest:
        check_same(first, metrics)
