"""Batches of groups: a row per group."""

import pytest

from streamrl.messages import Array
from streamrl.own_loops.model_workers import check_columns


def test_columns_that_a_batch_lacks_are_named_with_those_it_has():
    batch: dict[str, list[Array]] = {"prompt": [], "scores": []}
    check_columns(batch, ["scores"])
    with pytest.raises(ValueError, match="the batch lacks derived, values; it has prompt, scores"):
        check_columns(batch, ["derived", "scores", "values"])
