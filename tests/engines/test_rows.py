"""Every algorithm of the table on a real trainer, on one and on two ranks."""

import pytest

from streamrl.algorithms import ALGORITHMS
from tests.engines.conftest import param_of_ranks
from tests.engines.trainer_layouts import ONE, TWO
from tests.engines.trainer_ranks import SEVERAL_LR, TrainerCase

pytestmark = pytest.mark.xdist_group("ranks")

QUICK = {
    "grpo": "of a group, token by token",
    "gspo": "a ratio of the whole rollout",
    "kl_cov": "picks among the tokens of a micro-batch",
    "reinforce_pp": "whitens over the step, on all ranks",
    "gdpo": "scores of several rewards",
    "safe_rlhf": "values and costs",
}
"""Algorithms that take different paths through a trainer, and the difference."""
ROWS = [
    param_of_ranks(
        name,
        cases=[TrainerCase("row", layout, (name,)) for layout in (ONE, TWO)],
        is_quick=name in QUICK,
    )
    for name in ALGORITHMS
]


@pytest.mark.parametrize("name", ROWS)
def test_an_algorithm_makes_the_same_updates_for_any_ranks_and_micro_batches(results, name):
    (single_rank,), pair = results[f"row/{ONE.label}/{name}"], results[f"row/{TWO.label}/{name}"]
    assert single_rank["norms"][0] > 0
    for case in pair:
        assert case["norms"] == pytest.approx(single_rank["norms"], rel=1e-4)
        for parameter, expected in single_rank["parameters"].items():
            difference = (case["parameters"][parameter] - expected).abs().max().item()
            assert difference < 0.2 * SEVERAL_LR, parameter
