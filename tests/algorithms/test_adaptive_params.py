"""Numbers that follow what a step showed."""

import math
from dataclasses import replace

import pytest

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.algorithms.table import variant
from streamrl.errors import AlgorithmError
from tests.algorithms.steps import settings_of

FOLLOWING = AlgorithmConfig(kl_coef=0.1, kl_target=0.05, kl_horizon=1000)


def showing(kl: float) -> dict[str, float]:
    return {"num_sampled": 10.0, "kl_ref_sum": 10 * kl}


def dials_of(config: AlgorithmConfig) -> AdaptiveParams:
    return AdaptiveParams(config.spec, settings_of(config))


def test_without_a_target_there_is_nothing_to_turn():
    dials = dials_of(AlgorithmConfig(kl_coef=0.1))
    dials.update_after_step(showing(7.0), num_rollouts=8)
    assert dials.values == {}


@pytest.mark.parametrize(
    ("kl", "coef"),
    [
        (0.05, 0.1),  # at the target
        (0.055, 0.1 * (1 + 0.1 * 250 / 1000)),  # a tenth above it
        (5.0, 0.1 * (1 + 0.2 * 250 / 1000)),  # far above: a fifth at most
        (0.0, 0.1 * (1 - 0.2 * 250 / 1000)),
    ],
)
def test_the_weight_of_the_divergence_follows_its_target(kl, coef):
    dials = dials_of(FOLLOWING)
    dials.update_after_step(showing(kl), num_rollouts=250)
    assert dials.values == {"kl_coef": pytest.approx(coef)}


def test_a_step_the_policy_left_out_turns_nothing():
    dials = dials_of(FOLLOWING)
    dials.update_after_step({}, num_rollouts=250)
    assert dials.values == {"kl_coef": 0.1}


def test_they_go_on_where_they_stood():
    dials, later = dials_of(FOLLOWING), dials_of(FOLLOWING)
    dials.update_after_step(showing(1.0), num_rollouts=250)
    later.load_state_dict({**dials.state_dict(), "forgotten": 3.0})
    assert later.values == dials.values


LIMITED = AlgorithmConfig(name="safe_rlhf", params={"cost_limit": 0.2, "lagrange_lr": 0.5})


@pytest.mark.parametrize(
    ("cost", "multiplier"),
    [
        (0.2, 1.0),  # at the limit
        (0.6, math.exp(0.5 * 0.4)),
        (0.0, math.exp(-0.5 * 0.2)),
        (1e9, 5.0),  # lagrange_max
        (-1e9, 0.0),
    ],
)
def test_the_multiplier_rises_while_the_cost_is_above_its_limit(cost, multiplier):
    dials = dials_of(LIMITED)
    dials.update_after_step(
        {"num_sampled": 9.0, "score_sum": 4.0, "cost_sum": 4 * cost}, num_rollouts=4
    )
    assert dials.values == {"lagrange": pytest.approx(multiplier)}
    assert LIMITED.spec.params["lagrange"] == 1.0


def test_the_next_step_starts_where_the_dial_stands():
    dials = dials_of(LIMITED)
    shown = {"num_sampled": 9.0, "score_sum": 4.0, "cost_sum": 4 * 0.6}
    for _ in range(2):
        dials.update_after_step(shown, num_rollouts=4)
    first = math.exp(0.2)
    assert dials.values["lagrange"] == pytest.approx(first * math.exp(0.2 * first))
    turned = settings_of(LIMITED).with_adaptive_params(dials.values)
    assert turned.params["lagrange"] == dials.values["lagrange"]
    assert turned.params["cost_limit"] == 0.2


def test_a_dial_that_gives_no_number_is_named():
    def broken(value, shown, settings):
        return None

    row = variant("mine", "a test", params={"tau": 1.0}, dials={"tau": broken})
    with pytest.raises(AlgorithmError, match="algorithm mine: dial tau returned None"):
        chosen = replace(settings_of(AlgorithmConfig()), params=row.params)
        AdaptiveParams(row, chosen).update_after_step(
            {"num_sampled": 1.0, "score_sum": 1.0}, num_rollouts=1
        )
    with pytest.raises(ValueError, match=r"dials \['other'\] are not in params"):
        variant("mine", "a test", params={"tau": 1.0}, dials={"other": broken})
