"""Two steps of an algorithm of the table, in trainer processes."""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from streamrl.algorithms import AlgorithmConfig
from streamrl.messages import Columns
from tests.engines.trainer_layouts import Layout
from tests.engines.trainer_ranks import (
    GROUPS,
    SEVERAL_LR,
    TEMPERATURE,
    RankJob,
    get_micro_batch,
    parameters_of,
    split_rounds,
    sum_metrics,
)

if TYPE_CHECKING:
    from streamrl.engines.training.model_trainer import ModelTrainer


def train_row(job: RankJob, layout: Layout, name: str) -> None:
    """Train on policy, then off policy on the same rollouts; two ranks have half each."""
    from streamrl.engines.training.tasks import PolicyTask

    groups = scored_groups(job.model_path)
    config = AlgorithmConfig(name=name)
    settings = config.to_settings(max_length=10, reward_weights={"right": 1.0})
    task = PolicyTask(job.model_path, config.spec, settings, TEMPERATURE)
    trainer = job.trainer(layout, config, task=task, lr=SEVERAL_LR)
    norms = [train(trainer, groups, layout)["policy/grad_norm"] for _ in range(2)]
    job.results[f"row/{layout.label}/{name}"] = {
        "norms": norms,
        "parameters": parameters_of(trainer),
    }
    trainer.close()


def train(trainer: "ModelTrainer", groups: dict[str, Columns], layout: Layout) -> dict[str, float]:
    """Run a step, in a micro-batch on a single rank or two on each of two ranks."""
    trainer.plan_step(groups)
    rounds = split_rounds(groups, num_micro_batches=layout.num_shares, num_shares=layout.num_shares)
    sums = sum_metrics(
        trainer.train_micro_batch(groups, get_micro_batch(trainer, work)) for work in rounds
    )
    total = torch.tensor(list(sums.values()), dtype=torch.float64)
    if layout.world_size > 1:
        dist.all_reduce(total)
    total_sums = dict(zip(sums, total.tolist(), strict=True))
    return trainer.update(trainer.compute_loss_denominator(total_sums))


@cache
def scored_groups(model_path: str) -> dict[str, Columns]:
    """Make groups of plausible rollouts with the columns that any algorithm needs."""
    from streamrl.engines.training.forward_scorers import LogprobScorer

    scorer = LogprobScorer(model_path, temperature=TEMPERATURE, micro_batch_tokens=64)
    groups: dict[str, Columns] = {}
    for uid, columns in GROUPS.items():
        scores = columns["scores"]
        expected = np.where(columns["loss_mask"], 0.1, 0).astype(np.float32)
        groups[uid] = {
            **columns,
            "generator_logprobs": scorer.compute_ref_logprobs(columns)["ref_logprobs"],
            "reward/right": scores,
            "baseline_scores": np.full_like(scores, scores.mean()),
            "costs": 1 - scores,
            "values": expected,
            "cost_values": expected,
        }
    return groups
