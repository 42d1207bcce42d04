"""Batches of groups: a row is a group, with a cell per column.

A group has a cell for its prompt and a cell per column of `messages.COLUMN_SPECS`. Advantages and
returns of a group form the column `derived`.
"""

from collections.abc import Callable, Sequence

import numpy as np

from streamrl.controller.batches import Batch
from streamrl.dataflow import SEQUENCE_COLUMNS
from streamrl.messages import COLUMN_SPECS, Array, Columns, is_component_column

PROMPT_COLUMN = "prompt"
DERIVED_COLUMN = "derived"


def to_batch(groups: Sequence[Columns]) -> dict[str, list[Array]]:
    """Return groups as a batch: a row per group, a list of arrays per column."""
    return {name: [columns[name] for columns in groups] for name in (groups[0] if groups else ())}


def get_group_columns(batch: Batch) -> list[Columns]:
    """Return the stored columns of every group of a batch, without derived ones."""
    names = [name for name in batch if name in COLUMN_SPECS or is_component_column(name)]
    return [
        dict(zip(names, cells, strict=True))
        for cells in zip(*(batch[name] for name in names), strict=True)
    ]


def map_groups_by_uid(batch: Batch) -> dict[str, Columns]:
    """Return the columns of each group of a batch, by uid; ValueError for a repeated group."""
    uids = [prompt.uid for prompt in batch[PROMPT_COLUMN]]
    if len(set(uids)) < len(uids):
        duplicate = next(uid for uid in uids if uids.count(uid) > 1)
        raise ValueError(
            f"prompt {duplicate} occurs twice in the batch; a step trains a group once"
        )
    return dict(zip(uids, get_group_columns(batch), strict=True))


def compute_concatenated(batch: Batch, compute: Callable[[Columns], Array]) -> list[Array]:
    """Compute a column with a value per token for all groups of a batch in a single call.

    compute: receives the sequences of all groups together, and returns their column. Returns the
    column of each group.
    """
    concatenated = {
        name: np.concatenate([np.zeros(0, COLUMN_SPECS[name].dtype), *batch[name]])
        for name in SEQUENCE_COLUMNS
    }
    ends = np.cumsum([len(token_ids) for token_ids in batch["token_ids"]])
    # The piece after the last group is empty.
    return np.split(compute(concatenated), ends)[:-1]
