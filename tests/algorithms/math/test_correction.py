"""Importance weights for off-policy tokens, and the interpolated proximal policy."""

import math

import torch

from streamrl.algorithms.correction import WEIGHT_LEVELS
from streamrl.algorithms.math.correction import importance_weights, interpolated_proximal

NAN = math.nan
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


# Version 5 is trained; its own token, one and three versions old, and one that is newer.
VERSIONS = torch.tensor([[5, 4, 2, 6]])


def test_interpolated_proximal_by_hand():
    logprobs = torch.full((1, 4), -1.0, requires_grad=True)
    behavior = torch.full((1, 4), -3.0)
    proximal = interpolated_proximal(logprobs, behavior, VERSIONS, version=5)
    # Shares 0, 1/2, 3/4 of the 2 between them.
    torch.testing.assert_close(proximal, torch.tensor([[-3.0, -2.0, -1.5, -3.0]]))
    assert not proximal.requires_grad
