"""From the columns of groups to the padded tensors of one micro-batch."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.algorithms import Algorithm, Settings
from streamrl.engines.packing import Pick
from streamrl.messages import Array, Columns, Per, column_spec

TOKEN_COLUMNS = ("token_ids", "loss_mask", "generator_logprobs", "ref_logprobs")
"""The columns a loss may read per token; absent ones are left out."""


def group_advantages(
    row: Algorithm, settings: Settings, groups: Mapping[str, Columns]
) -> dict[str, Tensor]:
    """Advantages [n] float32 of whole groups by uid, whatever part of them is in a micro-batch."""
    if not groups:
        return {}
    sizes = [len(columns["lengths"]) for columns in groups.values()]
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    per_rollout = [name for name in row.columns if column_spec(name).per is Per.ROLLOUT]
    stacked = {
        name: torch.from_numpy(np.concatenate([columns[name] for columns in groups.values()]))
        for name in ("lengths", *per_rollout)
    }
    advantages = row.advantages(stacked, group_ids, settings)
    return dict(zip(groups, advantages.split(sizes), strict=True))


def build_batch(
    groups: Mapping[str, Columns],
    picks: Sequence[Pick],
    *,
    advantages: Mapping[str, Tensor],
    token_columns: Sequence[str] = TOKEN_COLUMNS,
) -> TensorDict:
    """The picked rollouts as rows, padded on the right to the longest: batch size [B].

    token_ids int64, attention_mask and loss_mask bool, generator_logprobs float32, ref_logprobs
    float32 if the groups have it: [B, T], 0 in the padding. advantages float32 [B], row by row from
    those of the whole groups. Without picks there is one row of two tokens, none of which counts:
    a rank with nothing to do goes through the same forward and backward as the others.
    """
    rows = [_rollout(groups[uid], index, token_columns) for uid, index in picks]
    if not rows:
        rows = [_blank(token_columns)]
    lengths = np.array([len(row["token_ids"]) for row in rows])
    batch = {name: torch.from_numpy(_pad([row[name] for row in rows])) for name in rows[0]}
    batch["token_ids"] = batch["token_ids"].long()
    batch["attention_mask"] = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])
    picked = [advantages[uid][index] for uid, index in picks]
    batch["advantages"] = torch.stack(picked) if picked else torch.zeros(1)
    return TensorDict(batch, batch_size=[len(rows)])


def _rollout(columns: Columns, index: int, names: Sequence[str]) -> dict[str, Array]:
    end = int(columns["lengths"][: index + 1].sum())
    start = end - int(columns["lengths"][index])
    return {name: columns[name][start:end] for name in names if name in columns}


def _blank(names: Sequence[str]) -> dict[str, Array]:
    return {name: np.zeros(2, column_spec(name).dtype) for name in names}


def _pad(rows: Sequence[Array]) -> Array:
    padded = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
