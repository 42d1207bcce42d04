"""Collate the columns of groups into the padded tensors of a micro-batch."""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.algorithms import Algorithm, AlgorithmSettings, list_derivation_columns
from streamrl.algorithms.objective import derive_group_columns
from streamrl.buffer.micro_batch_schedule import RolloutIndex
from streamrl.messages import (
    COLUMN_SPECS,
    EPISODE_COLUMN,
    NO_ENTRY,
    OPTIONAL_COLUMNS,
    SCORE_NORMS,
    TOKEN_SCORES,
    TURN_COLUMN,
    Array,
    ColumnAxis,
    Columns,
    count_samples,
    find_first_samples,
    get_column_spec,
    get_token_rows,
    split_token_column,
    sum_over_samples,
)

TOKEN_COLUMNS = tuple(
    name
    for name, spec in COLUMN_SPECS.items()
    if spec.axis is ColumnAxis.TOKEN and name not in OPTIONAL_COLUMNS
)
"""Columns of a group that a loss may read per token; a batch omits columns that the group lacks."""


def derive_columns(
    spec: Algorithm,
    settings: AlgorithmSettings,
    groups: Mapping[str, Columns],
    rejected: Collection[RolloutIndex] = (),
) -> dict[str, Columns]:
    """Compute the columns that the algorithm derives from complete groups, such as advantages.

    The algorithm sees an episode as one row, whose samples are concatenated. Returns derived
    columns for each uid, with an entry per rollout or per token (rollouts concatenated).
    `rejected` are (uid, index of the episode) of episodes that the correction takes out.
    """
    if not groups:
        return {}
    names = list_derivation_columns(spec, settings)
    if spec.reads_token_scores:
        groups = {
            uid: {TOKEN_SCORES: _place_on_last_tokens(columns), **columns}
            for uid, columns in groups.items()
        }
    if spec.reads_score_norms:
        # Before the trainer has computed them.
        groups = {
            uid: {SCORE_NORMS: np.ones(len(columns["loss_mask"]), np.float32), **columns}
            for uid, columns in groups.items()
        }
    samples = {uid: count_samples(columns) for uid, columns in groups.items()}
    episodes = [
        join_samples(_spread_turns({name: columns[name] for name in names}), samples[uid])
        for uid, columns in groups.items()
    ]
    sizes = [*map(len, samples.values())]
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    lengths = np.concatenate([columns["lengths"] for columns in episodes])
    padded: dict[str, Tensor] = {}
    for name in names:
        column = np.concatenate([columns[name] for columns in episodes])
        if get_column_spec(name).axis in (ColumnAxis.TOKEN, ColumnAxis.TURN):
            column = _pad_rows(split_token_column(column, lengths))
        padded[name] = torch.from_numpy(column)
    if rejected:
        picks = [(uid, i) for uid, counts in samples.items() for i in range(len(counts))]
        padded["rejected"] = torch.tensor([pick in rejected for pick in picks])
    derived = derive_group_columns(spec, settings, padded, group_ids)
    ends = np.cumsum(sizes).tolist()
    episode_slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return {
        uid: {
            name: _split_episodes(values[rows], lengths[rows], samples[uid])
            for name, values in derived.items()
        }
        for uid, rows in zip(groups, episode_slices, strict=True)
    }


def _place_on_last_tokens(columns: Columns) -> Array:
    """Return the scores of a group on the last sampled token of each episode, by token."""
    token_scores = np.zeros(len(columns["loss_mask"]), np.float32)
    samples = count_samples(columns)
    ends = np.cumsum(sum_over_samples(columns["lengths"], samples))
    sampled = np.flatnonzero(columns["loss_mask"])
    last = sampled[np.searchsorted(sampled, ends) - 1]
    token_scores[last] = columns["scores"][find_first_samples(samples)]
    return token_scores


def _spread_turns(columns: Columns) -> Columns:
    """Return the columns of a group with an entry per token in place of one per turn.

    A sampled token has the entry of its turn, and other tokens have 0. The token's `turn_ends` are
    offsets in the group, and so grow from turn to turn over all samples of an episode.
    """
    if TURN_COLUMN not in columns:
        return columns
    lengths, mask = columns["lengths"], columns["loss_mask"]
    starts = np.cumsum(lengths) - lengths
    ends = columns[TURN_COLUMN] + np.repeat(starts, columns["num_turns"]).astype(np.int64)
    turns = np.searchsorted(ends, np.flatnonzero(mask), side="right")
    spread = dict(columns)
    for name, column in {**columns, TURN_COLUMN: ends}.items():
        if get_column_spec(name).axis is ColumnAxis.TURN:
            spread[name] = np.zeros(len(mask), column.dtype)
            spread[name][mask] = column[turns]
    return spread


def join_samples(columns: Columns, samples: Array) -> Columns:
    """Return the columns of a group with an entry per episode in place of one per rollout.

    samples: number of rollouts of each episode. Token columns stay: samples follow each other.
    """
    firsts = find_first_samples(samples)
    joined = {
        name: column[firsts] if get_column_spec(name).axis is ColumnAxis.ROLLOUT else column
        for name, column in columns.items()
    }
    return joined | {"lengths": sum_over_samples(columns["lengths"], samples)}


def _split_episodes(values: Tensor, lengths: Array, samples: Array) -> Array:
    """Return a column, with an entry per rollout or per token, from one of episodes.

    values: [E] or, padded, [E, T]. lengths: tokens of each episode.
    """
    array = values.numpy()
    if array.ndim == 1:
        return np.repeat(array, samples)
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
    padding; wide columns [B, T, width]. The columns of `derived`, [B] or [B, T], replace group
    columns of the same name. If episodes may have several samples, `episode` int64 [B] numbers the
    episodes of the batch.
    Without picks, the batch is a dummy rollout of two masked tokens, so that an idle rank runs the
    same collectives as the others.
    """
    rows = [
        _collect_rollout(groups[uid], derived[uid], index, token_columns) for uid, index in picks
    ]
    if not rows:
        specs = {name: get_column_spec(name) for name in token_columns}
        rows = [{n: np.zeros(2, spec.dtype) for n, spec in specs.items() if not spec.is_wide}]
    lengths = np.array([len(row["token_ids"]) for row in rows])
    batch = {name: torch.from_numpy(_pad_rows([row[name] for row in rows])) for name in rows[0]}
    batch["token_ids"] = batch["token_ids"].long()
    batch["attention_mask"] = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])
    if picks and all(EPISODE_COLUMN in groups[uid] for uid, _ in picks):
        batch[EPISODE_COLUMN] = torch.from_numpy(_number_episodes(groups, picks))
    return TensorDict(batch, batch_size=[len(rows)])


def _number_episodes(groups: Mapping[str, Columns], picks: Sequence[RolloutIndex]) -> Array:
    """Return the number of each picked rollout's episode in the batch, int64 [B], from 0."""
    episodes = [(uid, int(groups[uid][EPISODE_COLUMN][index])) for uid, index in picks]
    starts = [a != b for a, b in zip(episodes[1:], episodes, strict=False)]
    return np.cumsum([0, *starts])


def _collect_rollout(
    columns: Columns, derived: Columns, index: int, token_columns: Sequence[str]
) -> dict[str, Array]:
    """Return the entries of a group's columns that belong to the rollout at `index`.

    Columns hold an entry per rollout or, concatenated over the rollouts, an entry per token.
    """
    lengths = columns["lengths"]
    tokens = find_token_slice(lengths, index)
    num_tokens = int(lengths.sum())
    selected = {
        name: get_token_rows(name, columns[name], num_tokens)
        for name in token_columns
        if name in columns
    }
    selected.update(derived)
    return {
        name: np.asarray(column[index if len(column) == len(lengths) else tokens])
        for name, column in selected.items()
    }


def average_advantage(columns: Columns, derived: Columns, index: int) -> float:
    """Return the mean advantage of the trained tokens of a rollout; NaN without such tokens."""
    rollout = _collect_rollout(columns, derived, index, ("loss_mask",))
    mask = rollout["loss_mask"]
    advantages = np.broadcast_to(rollout["advantages"], mask.shape)[mask]
    return float(advantages.mean()) if advantages.size else math.nan


def find_token_slice(lengths: Array, index: int) -> slice:
    """Return the range of a group's concatenated tokens that belongs to the rollout at `index`."""
    end = int(lengths[: index + 1].sum())
    return slice(end - int(lengths[index]), end)


def _pad_rows(rows: Sequence[Array]) -> Array:
    """Return rows [T] as [B, T], 0 in the padding; numbers as [B].

    Rows of a wide column, [T, width], have no entry in the padding, see NO_ENTRY.
    """
    first = rows[0]
    if not first.ndim:
        return np.stack(rows)
    fill = NO_ENTRY.astype(first.dtype) if first.ndim > 1 else first.dtype.type(0)
    padded = np.full((len(rows), max(map(len, rows)), *first.shape[1:]), fill)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
