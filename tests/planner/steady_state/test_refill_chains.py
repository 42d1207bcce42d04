"""Chains of replaced groups: order and numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.steady_state.refill_chains import (
    RefillChains,
    compute_chain_length_quantiles,
    sample_chain_lengths,
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


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 3))
def test_split_chains_covers_all_groups_evenly(counts: list[int], parts: int):
    all_counts = np.repeat(counts, parts)
    lengths = np.arange(all_counts.sum(), dtype=float)[:, None]
    split = list(RefillChains.from_counts(lengths, all_counts).split_chains(parts))
    assert [chains.num_chains for chains in split] == [len(counts)] * parts
    assert np.sort(np.concatenate([chains.lengths for chains in split]), axis=0).tolist() == (
        lengths.tolist()
    )
    expected = (all_counts - 1).tolist()
    assert np.concatenate([chains.num_refills for chains in split]).tolist() == expected


@given(st.floats(0.01, 0.99), st.integers(1, 500))
def test_chain_length_quantiles_are_geometric(filtered: float, n: int):
    counts = compute_chain_length_quantiles(filtered, n)
    assert counts.min() >= 1 and (np.diff(counts) >= 0).all()
    # The fraction of chains with at most k groups is 1 - filtered ** k, up to the width of a
    # quantile.
    for k in range(1, 5):
        assert abs((counts <= k).mean() - (1 - filtered**k)) <= 1 / n


def test_chains_have_one_group_without_filtering():
    assert (
        compute_chain_length_quantiles(0.0, 3).tolist()
        == sample_chain_lengths(0.0, 3, np.random.default_rng(0)).tolist()
    )
    assert compute_chain_length_quantiles(0.0, 3).tolist() == [1, 1, 1]


def test_sampled_chain_lengths_have_the_expected_mean():
    counts = sample_chain_lengths(0.8, 20_000, np.random.default_rng(1))
    assert counts.mean() == pytest.approx(5, rel=0.03)
