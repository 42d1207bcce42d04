"""Runs whose trainer ranks share the tokens of each micro-batch, against a run of a single rank."""

from pathlib import Path

import pytest

from tests.e2e.recorded import play
from tests.e2e.test_placements import ON_POLICY, check_same, check_tokens
from tests.toy import write_toy

pytestmark = pytest.mark.slow

STEPS = 3
PAIR = ["trainer.world_size=2", "trainer.sequence_parallel=2"]
RUNS = {
    "alone": ["trainer.backend=torch"],
    "whole": [*PAIR, "trainer.backend=torch", "trainer.zero_stage=0"],
    "deepspeed": [*PAIR, "trainer.zero_stage=1", "placement.mode=colocated"],
}


def test_ranks_that_share_tokens_have_the_tokens_and_losses_of_a_single_rank(tmp_path: Path):
    folder = write_toy(tmp_path)
    common = [*ON_POLICY, f"run.steps={STEPS}"]
    runs = play(folder, {name: [*common, *settings] for name, settings in RUNS.items()})
    check_tokens([run.trained for run in runs.values()], STEPS)
    for run in runs.values():
        check_same(run.rows, runs["alone"].rows)
