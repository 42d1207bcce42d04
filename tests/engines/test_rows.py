"""Every algorithm of the table on a real trainer, on one and on two ranks."""

import pytest
import torch

from streamrl.algorithms import ALGORITHMS
from streamrl.engines.training.forward_scorers import LogprobScorer
from streamrl.messages import split_token_column
from tests.engines.conftest import param_of_ranks
from tests.engines.tiny_qwen import save, tiny_model
from tests.engines.trainer_layouts import ONE, TWO
from tests.engines.trainer_ranks import GROUPS, SEVERAL_LR, TEMPERATURE, TrainerCase

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


def logprobs_by_rollout(model_path):
    """Return the logprob of each rollout, summed over tokens: [B] per group."""
    scorer = LogprobScorer(model_path, temperature=TEMPERATURE, micro_batch_tokens=64)
    return [
        torch.tensor(
            [
                part.sum()
                for part in split_token_column(
                    scorer.compute_ref_logprobs(columns)["ref_logprobs"], columns["lengths"]
                )
            ]
        )
        for columns in GROUPS.values()
    ]


@pytest.mark.parametrize("name", ROWS)
def test_an_algorithm_makes_better_rollouts_likelier(results, model_path, tmp_path, name):
    (case,) = results[f"row/{ONE.label}/{name}"]
    assert case["norms"][0] > 0
    model = tiny_model(tied=True, seed=0, kv_heads=2)
    model.load_state_dict(case["parameters"])
    before, after = logprobs_by_rollout(model_path), logprobs_by_rollout(save(model, tmp_path))
    gain = 0.0
    for columns, old, new in zip(GROUPS.values(), before, after, strict=True):
        scores = torch.from_numpy(columns["scores"])
        gain += ((scores - scores.mean()) * (new - old)).sum().item()
    assert gain > 0


@pytest.mark.parametrize("name", ROWS)
def test_an_algorithm_makes_the_same_updates_for_any_ranks_and_micro_batches(results, name):
    (single_rank,), pair = results[f"row/{ONE.label}/{name}"], results[f"row/{TWO.label}/{name}"]
    for case in pair:
        assert case["norms"] == pytest.approx(single_rank["norms"], rel=1e-4)
        for parameter, expected in single_rank["parameters"].items():
            difference = (case["parameters"][parameter] - expected).abs().max().item()
            assert difference < 0.2 * SEVERAL_LR, parameter
