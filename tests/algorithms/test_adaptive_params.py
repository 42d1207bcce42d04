"""Adaptive parameters follow the statistics of a step."""

import math
from dataclasses import replace

import pytest

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.algorithms.table import variant
from streamrl.errors import AlgorithmError
from tests.algorithms.steps import make_settings

FOLLOWING = AlgorithmConfig(kl_coef=0.1, kl_target=0.05)


def make_sums(kl: float) -> dict[str, float]:
    return {"included": 2500.0, "num_sampled": 10.0, "kl_ref_sum": 10 * kl}


def make_adaptive_params(config: AlgorithmConfig) -> AdaptiveParams:
    return AdaptiveParams(config.spec, make_settings(config))


@pytest.mark.parametrize(
    ("config", "sums", "expected"),
    [
        (AlgorithmConfig(kl_coef=0.1), make_sums(7.0), {}),  # no target
        (FOLLOWING, {}, {"kl_coef": 0.1}),  # a step without policy training
        (FOLLOWING, make_sums(0.05), {"kl_coef": 0.1}),  # at the target
        (FOLLOWING, make_sums(0.055), {"kl_coef": 0.1 * (1 + 0.1 * 0.25)}),  # 10 % above
        (FOLLOWING, make_sums(5.0), {"kl_coef": 0.1 * (1 + 0.2 * 0.25)}),  # clamped to 20 %
        (FOLLOWING, make_sums(0.0), {"kl_coef": 0.1 * (1 - 0.2 * 0.25)}),
    ],
)
def test_kl_coef_follows_its_target(config, sums, expected):
    params = make_adaptive_params(config)
    params.update_after_step(sums)
    assert params.values == pytest.approx(expected)


def test_adaptive_params_resume_from_a_checkpoint():
    params, later = make_adaptive_params(FOLLOWING), make_adaptive_params(FOLLOWING)
    params.update_after_step(make_sums(1.0))
    later.load_state_dict({**params.state_dict(), "forgotten": 3.0})
    assert later.values == params.values


LIMITED = AlgorithmConfig(name="safe_rlhf", params={"cost_limit": 0.2, "lagrange_lr": 0.5})


@pytest.mark.parametrize(
    ("cost", "multiplier"),
    [
        (0.2, 1.0),  # at the limit
        (0.6, math.exp(0.5 * 0.4)),
        (0.0, math.exp(-0.5 * 0.2)),
        (1e9, 5.0),  # lagrange_max
        (-1e9, 0.0),
        (math.inf, 5.0),
    ],
)
def test_the_multiplier_rises_while_the_cost_exceeds_its_limit(cost, multiplier):
    params = make_adaptive_params(LIMITED)
    sums = {"included": 4.0, "num_sampled": 9.0, "score_sum": 4.0, "cost_sum": 4 * cost}
    params.update_after_step(sums)
    assert params.values == {"lagrange": pytest.approx(multiplier)}
    assert LIMITED.spec.params["lagrange"] == 1.0


def test_the_next_step_uses_the_adapted_value():
    params = make_adaptive_params(LIMITED)
    sums = {"included": 4.0, "num_sampled": 9.0, "score_sum": 4.0, "cost_sum": 4 * 0.6}
    for _ in range(2):
        params.update_after_step(sums)
    first_value = math.exp(0.2)
    assert params.values["lagrange"] == pytest.approx(first_value * math.exp(0.2 * first_value))
    turned = make_settings(LIMITED).with_adaptive_params(params.values)
    assert turned.params["lagrange"] == params.values["lagrange"]
    assert turned.params["cost_limit"] == 0.2


def test_a_dial_that_returns_no_number_is_named():
    def broken(value, sums, settings):
        return None

    row = variant("mine", "a test", params={"tau": 1.0}, dials={"tau": broken})
    chosen = replace(make_settings(AlgorithmConfig()), params=row.params)
    sums = {"included": 1.0, "num_sampled": 1.0, "score_sum": 1.0}
    with pytest.raises(AlgorithmError, match="algorithm mine: dial tau returned None"):
        AdaptiveParams(row, chosen).update_after_step(sums)
    with pytest.raises(ValueError, match=r"dials \['other'\] are not in params"):
        variant("mine", "a test", params={"tau": 1.0}, dials={"other": broken})
