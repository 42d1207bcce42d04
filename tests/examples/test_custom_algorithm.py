"""The example of a custom algorithm."""

from pathlib import Path

import torch

from streamrl.algorithms import AlgorithmConfig
from tests.algorithms.steps import derive_columns, make_step, train

PATH = str(Path("examples/custom_algorithm/median.py"))


def test_its_advantages_are_scores_minus_the_median():
    config = AlgorithmConfig(name="median_grpo", path=PATH)
    step = make_step(sizes=(3, 2))
    step.columns["scores"] = torch.tensor([0.0, 1.0, 9.0, 2.0, 4.0])
    derived = derive_columns(config, step)
    assert derived["advantages"].tolist() == [-1.0, 0.0, 8.0, -1.0, 1.0]
    assert train(config, step, derived).gradient.isfinite().all()
