"""Length distributions: closed forms against samples."""

import numpy as np
import pytest

from streamrl.errors import ConfigError
from streamrl.planner.problem.workload import (
    EmpiricalLengths,
    LengthDistribution,
    LognormalLengths,
    Workload,
    make_fixed_lengths,
)

KINDS = [
    make_fixed_lengths(100),
    LognormalLengths(300, 0.8, 4096),
    LognormalLengths(1500, 1.2, 2048),
    EmpiricalLengths.from_samples([3, 90, 40, 40, 1000]),
]


@pytest.mark.parametrize("lengths", KINDS, ids=str)
def test_mean_longest_and_limit_match_samples(lengths: LengthDistribution):
    rng = np.random.default_rng(0)
    samples = lengths.sample(200_000, rng)
    assert samples.min() >= 1
    assert samples.max() <= lengths.max_tokens
    assert samples.mean() == pytest.approx(lengths.mean, rel=0.01)
    longest = lengths.sample(64_000, rng).reshape(1000, 64).max(axis=1).mean()
    assert lengths.expected_longest(64) == pytest.approx(longest, rel=0.1)


def test_filtering_raises_the_number_of_sampled_groups():
    workload = Workload(60, 4, 100.0, make_fixed_lengths(50), filtered_fraction=0.4)
    assert workload.num_rollouts == 240
    assert workload.sampled_workload == Workload(100, 4, 100.0, make_fixed_lengths(50))
    assert Workload(60, 4, 100.0, make_fixed_lengths(50)).sampled_workload.groups_per_step == 60
    with pytest.raises(ConfigError, match="filtered=1: must be 0 or more, and at most"):
        Workload(1, 8, 100.0, make_fixed_lengths(50), filtered_fraction=1.0)


def test_micro_batch_must_hold_the_longest_rollout():
    # A prompt of 9.6 tokens counts as 10, and 10 + 20 fit into 30.
    Workload(1, 1, 9.6, make_fixed_lengths(20), micro_batch_tokens=30).check_micro_batch_tokens()
    message = "tokens=29: must hold one rollout, 30 tokens = prompt 10 [+] longest completion 20"
    with pytest.raises(ConfigError, match=f"pipeline.micro_batch_{message}"):
        short = Workload(1, 1, 9.6, make_fixed_lengths(20), micro_batch_tokens=29)
        short.check_micro_batch_tokens("pipeline.micro_batch_tokens")
