"""Chains of groups that take one another's places: who follows whom, and how many there are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.placement.steady_state.refill_chains import (
    RefillChains,
    chain_length_quantiles,
    sample_chain_lengths,
)


def test_groups_of_a_chain_follow_one_another() -> None:
    # Chains of one, three and two groups: heads first, then those that take their places.
    lengths = np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]], float)
    chained = RefillChains.from_counts(lengths, np.array([1, 3, 2]))
    assert chained.chain_by_group.tolist() == [0, 1, 2, 1, 2, 1]
    assert chained.next_group == {1: 3, 2: 4, 3: 5}
    assert chained.last_groups.tolist() == [0, 5, 4]
    assert chained.num_refills.tolist() == [0, 2, 1]
    assert chained.chain_tokens.tolist() == [2, 4 + 8 + 12, 6 + 10]


def test_the_longest_chain_is_made_as_long_as_it_is_to_be() -> None:
    lengths = np.array([[10.0], [20.0], [30.0]])
    chained = RefillChains.from_counts(lengths, np.array([1, 2])).stretch_longest(100)
    assert chained.lengths.ravel().tolist() == [10, 40, 60]
    # Its two groups are what four would be.
    assert chained.num_refills.tolist() == [0, 3]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 3))
def test_parts_have_as_many_chains_and_all_groups_once(counts: list[int], parts: int) -> None:
    every = np.repeat(counts, parts)
    lengths = np.arange(every.sum(), dtype=float)[:, None]
    found = list(RefillChains.from_counts(lengths, every).split_chains(parts))
    assert [part.num_chains for part in found] == [len(counts)] * parts
    assert np.sort(np.concatenate([part.lengths for part in found]), axis=0).tolist() == (
        lengths.tolist()
    )
    assert np.concatenate([part.num_refills for part in found]).tolist() == (every - 1).tolist()


@given(st.floats(0.01, 0.99), st.integers(1, 500))
def test_quantiles_of_chains_are_those_of_chains_that_are_drawn(filtered: float, n: int) -> None:
    counts = chain_length_quantiles(filtered, n)
    assert counts.min() >= 1 and (np.diff(counts) >= 0).all()
    # Of those below the k-th, 1 - filtered ** k are as short: to the width of a quantile.
    for k in range(1, 5):
        assert abs((counts <= k).mean() - (1 - filtered**k)) <= 1 / n


def test_chains_have_one_group_where_nothing_is_filtered() -> None:
    assert (
        chain_length_quantiles(0.0, 3).tolist()
        == sample_chain_lengths(0.0, 3, np.random.default_rng(0)).tolist()
    )
    assert chain_length_quantiles(0.0, 3).tolist() == [1, 1, 1]


def test_as_many_groups_are_drawn_as_are_sampled_for_one_that_is_kept() -> None:
    counts = sample_chain_lengths(0.8, 20_000, np.random.default_rng(1))
    assert counts.mean() == pytest.approx(5, rel=0.03)
