"""Running pass rates of rows, and the chance of a row to be drawn."""

from itertools import permutations

import pytest

from streamrl.data.pass_rates import HALF_LIFE, PassRates


def test_a_rate_is_the_decayed_mean_of_results_and_ages_to_one_half():
    rates = PassRates()
    assert rates.estimate_rate(7) == 0.5
    rates.record_results(0, {"0:7:0": 1.0, "0:8:0": None})
    rates.record_results(HALF_LIFE, {"1:7:0": 0.0})
    rates.advance_version(HALF_LIFE)  # the second result is of this version, not of an earlier one
    # One result of weight 1/2, and 1/4 of prior weight at 1/2: (1/2 + 1/8) / (3/4).
    assert rates.estimate_rate(7) == pytest.approx(5 / 6)
    rates.advance_version(HALF_LIFE + 1)
    decay = 0.5 ** (1 / HALF_LIFE)
    expected = (0.5 * decay + 0.125) / (1.5 * decay + 0.25)
    assert rates.estimate_rate(7) == pytest.approx(expected)
    rates.advance_version(100 * HALF_LIFE)
    assert rates.estimate_rate(7) == pytest.approx(0.5)


def test_estimates_do_not_depend_on_the_order_in_which_results_arrive():
    results = [(0, "0:1:0", 0.1), (0, "1:1:0", 0.7), (2, "2:1:0", 1 / 3)]
    estimates = set()
    for order in permutations(results):
        rates = PassRates()
        for version, uid, rate in order:
            rates.record_results(version, {uid: rate})
        rates.advance_version(3)
        estimates.add(rates.estimate_rate(1))
    assert len(estimates) == 1


def test_rows_are_chosen_with_chance_4p_1_minus_p():
    rates = PassRates()
    rates.record_results(0, {f"0:{row}:0": 0.9 for row in range(4000)})
    rates.advance_version(1)
    # After a result of 0.9, slightly decayed: p = 0.82, 4 p (1 - p) = 0.59.
    chosen = sum(rates.is_chosen(seed=5, epoch=3, row=row) for row in range(4000))
    assert chosen / 4000 == pytest.approx(0.59, abs=0.03)
    assert all(rates.is_chosen(seed=5, epoch=3, row=row) for row in range(4000, 4100))
