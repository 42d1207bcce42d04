"""Collate the columns of groups into the padded tensors of a micro-batch."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.algorithms import Algorithm, AlgorithmSettings, list_derivation_columns
from streamrl.algorithms.objective import derive_group_columns
from streamrl.buffer.assembly.packing import RolloutIndex
from streamrl.messages import Array, ColumnAxis, Columns, get_column_spec, split_token_column

TOKEN_COLUMNS = ("token_ids", "loss_mask", "generator_logprobs", "policy_version", "ref_logprobs")
"""Columns of a group that a loss may read per token; a batch omits columns that the group lacks."""


def derive_columns(
    spec: Algorithm, settings: AlgorithmSettings, groups: Mapping[str, Columns]
) -> dict[str, Columns]:
    """Compute the columns that the algorithm derives from complete groups, such as advantages.

    Returns derived columns for each uid, with an entry per rollout or per token (rollouts
    concatenated).
    """
    if not groups:
        return {}
    sizes = [len(columns["lengths"]) for columns in groups.values()]
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    lengths = np.concatenate([columns["lengths"] for columns in groups.values()])
    padded: dict[str, Tensor] = {}
    for name in list_derivation_columns(spec, settings):
        column = np.concatenate([columns[name] for columns in groups.values()])
        if get_column_spec(name).axis is ColumnAxis.TOKEN:
            column = _pad_rows(split_token_column(column, lengths))
        padded[name] = torch.from_numpy(column)
    derived = derive_group_columns(spec, settings, padded, group_ids)
    ends = np.cumsum(sizes).tolist()
    rollout_slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return {
        uid: {
            name: _unpad_rows(values[rollout_slice], lengths[rollout_slice])
            for name, values in derived.items()
        }
        for uid, rollout_slice in zip(groups, rollout_slices, strict=True)
    }


def _unpad_rows(values: Tensor, lengths: Array) -> Array:
    """Concatenate the first `lengths[i]` entries of each row i of a padded tensor."""
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
    """Build a micro-batch [B] of the picked rollouts, right-padded to the longest rollout.

    `picks` are (uid, index of the rollout in its group). Tensors: token_ids int64, attention_mask
    and loss_mask bool, generator_logprobs and (if present) ref_logprobs float32: [B, T], 0 in the
    padding. The columns of `derived`, [B] or [B, T], replace group columns of the same name.
    Without picks, the batch is a dummy rollout of two masked tokens, so that an idle rank runs the
    same collectives as the others.
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
    """Return the entries of a group's columns that belong to the rollout at `index`.

    Columns hold an entry per rollout or, concatenated over the rollouts, an entry per token.
    """
    lengths = columns["lengths"]
    tokens = find_token_slice(lengths, index)
    selected = {name: columns[name] for name in token_columns if name in columns}
    selected.update(derived)
    return {
        name: np.asarray(column[index if len(column) == len(lengths) else tokens])
        for name, column in selected.items()
    }


def find_token_slice(lengths: Array, index: int) -> slice:
    """Return the range of a group's concatenated tokens that belongs to the rollout at `index`."""
    end = int(lengths[: index + 1].sum())
    return slice(end - int(lengths[index]), end)


def _stack_rows(rows: Sequence[Array]) -> Array:
    return _pad_rows(rows) if rows[0].ndim else np.stack(rows)


def _pad_rows(rows: Sequence[Array]) -> Array:
    padded = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
