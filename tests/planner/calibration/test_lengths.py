"""Completion lengths resampled by group."""

import numpy as np

from streamrl.planner.calibration.run_trace import GroupedLengths
from streamrl.planner.problem.workload import Workload
from streamrl.planner.simulator.simulated_prompts import CompletionLengths

SEEN = [("a", "generate", (3, 4)), ("b", "generate", (9, 8)), ("b", "greedy", (7,))]


def test_samples_keep_groups_and_greedy_completions_together():
    lengths = GroupedLengths.from_groups(SEEN)
    assert (lengths.mean, lengths.max_tokens) == (6.0, 9)
    completions = CompletionLengths(Workload(8, 2, 5.0, lengths), seed=0)
    samples = {
        (*completions.get_lengths(f"0:{i}:0"), completions.get_greedy_length(f"0:{i}:0"))
        for i in range(300)
    }
    assert samples == {(3, 4, 3), (9, 8, 7)}


def test_any_count_can_be_drawn():
    lengths = GroupedLengths.from_groups(SEEN)
    for count in (1, 4, 7):
        assert len(lengths.sample(count, np.random.default_rng(0))) == count
