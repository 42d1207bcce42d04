"""Batches of groups: columns of many groups computed at once."""

import numpy as np

from streamrl.messages import Array, Columns
from streamrl.own_loops.model_workers import (
    compute_concatenated,
    get_group_columns,
    to_batch,
)
from tests.engines.tiny_groups import make_groups


def test_a_column_of_all_groups_is_computed_at_once_and_split_again():
    groups = list(make_groups(num_groups=3, group_size=2).values())
    batch = to_batch(groups)
    calls: list[Columns] = []

    def compute(columns: Columns) -> Array:
        calls.append(columns)
        return columns["token_ids"] + 1

    pieces = compute_concatenated(batch, compute)
    (columns,) = calls
    assert len(columns["lengths"]) == 6
    for piece, group in zip(pieces, get_group_columns(batch), strict=True):
        np.testing.assert_array_equal(piece, group["token_ids"] + 1)


def test_a_rank_without_groups_computes_an_empty_column():
    empty: dict[str, list[Array]] = {"token_ids": [], "loss_mask": [], "lengths": []}
    seen: list[Columns] = []

    def compute(columns: Columns) -> Array:
        seen.append(columns)
        return columns["token_ids"]

    assert compute_concatenated(empty, compute) == []
    assert [column.dtype for column in seen[0].values()] == ["int32", "bool", "int32"]
