"""From the columns of groups to the padded tensors of one micro-batch."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.algorithms import Algorithm, AlgorithmSettings, list_derivation_columns
from streamrl.algorithms.objective import derive_group_columns
from streamrl.buffer.assembly.packing import RolloutIndex
from streamrl.messages import Array, ColumnAxis, Columns, get_column_spec, split_token_column

TOKEN_COLUMNS = (
    "token_ids",
    "loss_mask",
    "generator_logprobs",
    "policy_version",
    "ref_logprobs",
)
"""The columns a loss may read per token; absent ones are left out."""


def derive_columns(
    row: Algorithm, settings: AlgorithmSettings, groups: Mapping[str, Columns]
) -> dict[str, Columns]:
    """What the algorithm derives from whole groups, as further columns of each group by uid.

    Like those they come from: an entry per rollout, or per token, rollouts laid end to end.
    """
    if not groups:
        return {}
    sizes = [len(columns["lengths"]) for columns in groups.values()]
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    lengths = np.concatenate([columns["lengths"] for columns in groups.values()])
    wide: dict[str, Tensor] = {}
    for name in list_derivation_columns(row, settings):
        column = np.concatenate([columns[name] for columns in groups.values()])
        if get_column_spec(name).axis is ColumnAxis.TOKEN:
            column = _pad_rows(split_token_column(column, lengths))
        wide[name] = torch.from_numpy(column)
    derived = derive_group_columns(row, settings, wide, group_ids)
    ends = np.cumsum(sizes).tolist()
    rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return {
        uid: {name: _unpad_rows(values[of], lengths[of]) for name, values in derived.items()}
        for uid, of in zip(groups, rows, strict=True)
    }


def _unpad_rows(values: Tensor, lengths: Array) -> Array:
    array = values.numpy()
    if array.ndim == 1:
        return array
    return np.concatenate([row[:length] for row, length in zip(array, lengths, strict=True)])


def build_batch(
    groups: Mapping[str, Columns],
    picks: Sequence[RolloutIndex],
    *,
    derived: Mapping[str, Columns],
    token_columns: Sequence[str] = TOKEN_COLUMNS,
) -> TensorDict:
    """The picked rollouts as rows, padded on the right to the longest: batch size [B].

    token_ids int64, attention_mask and loss_mask bool, generator_logprobs float32, ref_logprobs
    float32 if the groups have it: [B, T], 0 in the padding. What `derived` has of a group is added,
    [B] or [B, T], in the place of a column of that name. Without picks there is one row of two
    tokens, none of which counts, with nothing derived: a rank with nothing to do goes through the
    same forward and backward as the others.
    """
    rows = [
        _collect_rollout(groups[uid], derived[uid], index, token_columns) for uid, index in picks
    ]
    if not rows:
        rows = [{name: np.zeros(2, get_column_spec(name).dtype) for name in token_columns}]
    lengths = np.array([len(row["token_ids"]) for row in rows])
    batch = {name: torch.from_numpy(_stack_rows([row[name] for row in rows])) for name in rows[0]}
    batch["token_ids"] = batch["token_ids"].long()
    batch["attention_mask"] = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])
    return TensorDict(batch, batch_size=[len(rows)])


def _collect_rollout(
    columns: Columns, derived: Columns, index: int, token_columns: Sequence[str]
) -> dict[str, Array]:
    """What one rollout has: per token [T], or one number []."""
    lengths = columns["lengths"]
    tokens = find_token_slice(lengths, index)
    taken = {name: columns[name] for name in token_columns if name in columns}
    taken.update(derived)
    return {
        name: np.asarray(column[index if len(column) == len(lengths) else tokens])
        for name, column in taken.items()
    }


def find_token_slice(lengths: Array, index: int) -> slice:
    """Where the tokens of a rollout are in a token column of its group."""
    end = int(lengths[: index + 1].sum())
    return slice(end - int(lengths[index]), end)


def _stack_rows(rows: Sequence[Array]) -> Array:
    return _pad_rows(rows) if rows[0].ndim else np.stack(rows)


def _pad_rows(rows: Sequence[Array]) -> Array:
    padded = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
