"""Importance weights for off-policy tokens, and the interpolated proximal policy."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from streamrl.algorithms.config import WEIGHT_LEVELS, WEIGHT_MODES
from streamrl.algorithms.math.correction import importance_weights, interpolated_proximal
from tests.algorithms import ragged

NAN = math.nan
SEEDS = st.integers(0, 9999)
# Ratios 2, 1/2 and 8, with a tool's token between; and a row without a token.
LOG_RATIO = torch.tensor([[2.0, 0.5, NAN, 8.0], [NAN] * 4]).log().requires_grad_()
MASK = torch.tensor([[True, True, False, True], [False] * 4])


def weights(level, **bounds):
    result = importance_weights(LOG_RATIO, MASK, level=level, **bounds)
    assert not result.requires_grad
    assert result[1].tolist() == [0.0] * 4
    return [round(x, 5) for x in result[0].tolist()]


def test_importance_weights_of_each_level_by_hand():
    assert weights("token") == [2, 0.5, 0, 8]
    assert weights("sequence") == [8, 8, 0, 8]
    assert weights("geometric") == [2, 2, 0, 2]


def test_importance_weights_are_truncated_or_masked_by_hand():
    assert weights("token", high=3.0) == [2, 0.5, 0, 3]
    assert weights("token", low=0.75, high=3.0) == [2, 0.75, 0, 3]
    assert weights("token", low=0.75) == [2, 0.75, 0, 8]
    assert weights("token", low=0.75, high=3.0, mode="mask") == [2, 0, 0, 0]
    assert weights("token", high=3.0, mode="mask") == [2, 0.5, 0, 0]
    assert weights("token", mode="mask") == [2, 0.5, 0, 8]
    assert weights("sequence", high=3.0) == [3, 3, 0, 3]
    assert weights("sequence", high=3.0, mode="mask") == [0] * 4
    assert weights("geometric", high=3.0, mode="mask") == [2, 2, 0, 2]


def test_importance_weights_stay_finite():
    far = torch.tensor([[1e6, -1e6], [15.0, 15.0]])
    for level in WEIGHT_LEVELS:
        assert importance_weights(far, torch.ones(2, 2).bool(), level=level).isfinite().all()


BOUNDED: dict[str, dict[str, Any]] = {
    f"{level} {mode}": {"level": level, "mode": mode, "low": 0.6, "high": 1.5}
    for level, mode in product(WEIGHT_LEVELS, WEIGHT_MODES)
}


def weights_in_loops(row: list[float], level: str, mode: str, low: float, high: float):
    total, n = math.fsum(row), len(row)
    logs = {"token": row, "sequence": [total] * n, "geometric": [total / n] * n}
    result = []
    for ratio in map(math.exp, logs[level]):
        outside = 0.0 if mode == "mask" else min(max(ratio, low), high)
        result.append(ratio if low <= ratio <= high else outside)
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", BOUNDED)
def test_importance_weights_equal_the_reference_in_python_loops(name, dtype):
    for seed in range(12):
        batch = ragged.make_batch(seed, dtype)
        rows = [row["log_ratio"] for row in ragged.list_counted_rows(batch)]
        expected = [weights_in_loops(row, **BOUNDED[name]) if row else [] for row in rows]
        result = importance_weights(batch["log_ratio"], batch["loss_mask"], **BOUNDED[name])
        ragged.assert_equals_rows(result, expected, batch["loss_mask"], dtype)


# Version 5 is trained; its own token, one and three versions old, and one that is newer.
VERSIONS = torch.tensor([[5, 4, 2, 6]])


def test_interpolated_proximal_by_hand():
    logprobs = torch.full((1, 4), -1.0, requires_grad=True)
    behavior = torch.full((1, 4), -3.0)
    proximal = interpolated_proximal(logprobs, behavior, VERSIONS, version=5)
    # Shares 0, 1/2, 3/4 of the 2 between them.
    torch.testing.assert_close(proximal, torch.tensor([[-3.0, -2.0, -1.5, -3.0]]))
    assert not proximal.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_interpolated_proximal_equals_the_reference_in_python_loops(dtype):
    for seed in range(8):
        batch = ragged.make_batch(seed, dtype)
        everything = batch | {"loss_mask": torch.ones_like(batch["loss_mask"])}
        versions = (batch["values"] * 2).long() + 3
        columns = batch["logprobs"], batch["old_logprobs"], versions
        result, expected = interpolated_proximal(*columns, version=4), []
        for row, sampled_by in zip(
            ragged.list_counted_rows(everything), versions.tolist(), strict=True
        ):
            tokens = zip(row["logprobs"], row["old_logprobs"], sampled_by, strict=True)
            shares = [(p, q, 1 - 1 / (1 + max(4 - v, 0))) for p, q, v in tokens]
            expected.append([s * p + (1 - s) * q for p, q, s in shares])
        ragged.assert_equals_rows(result, expected, everything["loss_mask"], dtype)


def proximal(batch):
    versions = torch.where(batch["loss_mask"], (batch["chosen"].long() * 2), -1)
    result = interpolated_proximal(batch["logprobs"], batch["old_logprobs"], versions, version=3)
    return torch.where(batch["loss_mask"], result, 0.0)
