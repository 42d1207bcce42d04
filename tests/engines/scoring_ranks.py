"""Two ranks of models that only score, each in a process: a reference, then a shadow critic.

Runs in child processes, because torch.distributed must not be initialized in pytest's process.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from streamrl.dataflow import REF_LOGPROBS, TOP_COLUMNS
from streamrl.engines.models.chunked_head import TopWords
from streamrl.engines.trainer_config import RankLayout, TrainerConfig
from streamrl.engines.training.model_rank import ModelRank
from streamrl.engines.training.tasks import CriticTask, PolicyTask
from streamrl.messages import Array, Columns
from tests.engines.scoring_models import PPO, SETTINGS

WORLD = 2
HELD = (["a", "b", "c"], ["c", "x", "a"])
"""Leases that each rank still holds."""


class RankScores(NamedTuple):
    """Columns of this rank's groups, and the leases of HELD that it goes on with.

    whole_logprobs: of a whole model in the same process. top: with the columns of the likeliest
    words, which tensor-parallel ranks do not find.
    """

    ref_logprobs: list[Array]
    whole_logprobs: list[Array]
    top: list[Columns]
    values: list[Array]
    common: Sequence[str]


def score_rank(
    rank: int,
    ports: Sequence[int],
    path: str,
    layout: dict[str, int],
    groups: Sequence[Columns],
    published: dict[str, Tensor],
) -> RankScores:
    """Compute columns; data-parallel rank 1 has no group. published: a version of the critic."""
    precision = TrainerConfig(dtype="float32")
    config = RankLayout(WORLD, **layout).to_trainer_config(precision)
    mine = groups if config.get_dp_rank(rank) == 0 else []
    tasks = (
        PolicyTask(path, PPO.spec, SETTINGS, 0.8, TopWords(3, vocab_size=40)),
        CriticTask(path, PPO.spec, SETTINGS, None),
    )
    results: list[Any] = []
    for task, port, column in zip(tasks, ports, (REF_LOGPROBS, "values"), strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        model = ModelRank(task, config=config, rank=rank)
        if column == "values":
            model.copy_weights(None if rank else model.build_full(published))
        results.append(model.compute_columns(mine, column, micro_batch_tokens=64))
        common = model.find_common(HELD[rank])
        if column == REF_LOGPROBS:
            whole = ModelRank(task, config=RankLayout().to_trainer_config(precision))
            results.append(whole.compute_columns(groups[:1], column, micro_batch_tokens=64))
            names = (column, *(() if config.tensor_parallel > 1 else TOP_COLUMNS))
            results.append(model.score_groups(mine, names, micro_batch_tokens=64))
        model.close()
    ref_logprobs, whole, top, values = results
    return RankScores(ref_logprobs, whole, top, values, common)
