"""Numbers that follow what a step showed."""

import pytest

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.dials import Dials
from tests.algorithms.steps import settings_of

FOLLOWING = AlgorithmConfig(kl_coef=0.1, kl_target=0.05, kl_horizon=1000)


def showing(kl: float) -> dict[str, float]:
    return {"num_sampled": 10.0, "kl_ref_sum": 10 * kl}


def test_without_a_target_there_is_nothing_to_turn():
    dials = Dials(settings_of(AlgorithmConfig(kl_coef=0.1)))
    dials.after(showing(7.0), num_rollouts=8)
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
    dials = Dials(settings_of(FOLLOWING))
    dials.after(showing(kl), num_rollouts=250)
    assert dials.values == {"kl_coef": pytest.approx(coef)}


def test_a_step_the_policy_left_out_turns_nothing():
    dials = Dials(settings_of(FOLLOWING))
    dials.after({}, num_rollouts=250)
    assert dials.values == {"kl_coef": 0.1}


def test_they_go_on_where_they_stood():
    dials, later = Dials(settings_of(FOLLOWING)), Dials(settings_of(FOLLOWING))
    dials.after(showing(1.0), num_rollouts=250)
    later.load_state_dict({**dials.state_dict(), "forgotten": 3.0})
    assert later.values == dials.values
