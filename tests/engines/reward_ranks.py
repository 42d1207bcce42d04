"""Ranks that hold a reward model together, in processes of their own."""

import os
from collections.abc import Mapping, Sequence

from streamrl.engines.trainer_config import RankLayout, TrainerConfig
from streamrl.engines.training.model_rank import ModelRank
from streamrl.engines.training.tasks import RewardModelTask

Rows = Sequence[Sequence[int]]


def compute_on_rank(
    rank: int, port: int, path: str, layout: Mapping[str, int], calls: Sequence[Rows]
) -> list[list[float]]:
    """Load a rank; return the logits that each call gives it, whose rows its dp rank shares."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config = RankLayout(**layout).to_trainer_config(TrainerConfig(dtype="float32"))
    model = ModelRank(RewardModelTask(path), config=config, rank=rank)
    own = config.get_dp_rank(rank)
    return [model.compute_logits(rows[own :: config.dp_size]) for rows in calls]
