"""Chains of replaced groups: order and numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.steady_state.continuous_batching import (
    RefillChains,
    compute_chain_length_quantiles,
)


def test_chain_lists_replacements_in_order():
    # Chains of one, three and two groups: first the first group of every chain, then replacements.
    lengths = np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]], float)
    chains = RefillChains.from_counts(lengths, np.array([1, 3, 2]))
    assert chains.chain_by_group.tolist() == [0, 1, 2, 1, 2, 1]
    assert chains.next_group == {1: 3, 2: 4, 3: 5}
    assert chains.last_groups.tolist() == [0, 5, 4]
    assert chains.num_refills.tolist() == [0, 2, 1]
    assert chains.chain_tokens.tolist() == [2, 4 + 8 + 12, 6 + 10]


def test_stretch_longest_scales_the_longest_chain():
    lengths = np.array([[10.0], [20.0], [30.0]])
    chains = RefillChains.from_counts(lengths, np.array([1, 2])).stretch_longest(100)
    assert chains.lengths.ravel().tolist() == [10, 40, 60]
    # The two groups stand for four.
    assert chains.num_refills.tolist() == [0, 3]


@given(st.floats(0.01, 0.99), st.integers(1, 500))
def test_chain_length_quantiles_are_geometric(filtered: float, n: int):
    counts = compute_chain_length_quantiles(filtered, n)
    assert counts.min() >= 1 and (np.diff(counts) >= 0).all()
    # The fraction of chains with at most k groups is 1 - filtered ** k, up to the width of a
    # quantile.
    for k in range(1, 5):
        assert abs((counts <= k).mean() - (1 - filtered**k)) <= 1 / n
