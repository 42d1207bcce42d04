"""Importance weights for off-policy tokens, and the interpolated proximal policy."""

import torch

from streamrl.algorithms.correction import WEIGHT_LEVELS
from streamrl.algorithms.math.correction import (
    importance_weights,
    interpolated_proximal,
    weight_sums,
)


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


def test_weights_are_averaged_over_tokens_or_rollouts():
    mask = torch.tensor([[True, True, True], [False, True, False], [False, False, False]])
    weights = torch.where(mask, torch.tensor([[0.5], [2.0], [torch.nan]]), torch.nan)
    assert weight_sums(weights, mask, level="token").tolist() == [3.5, 4.0]
    for level in ("sequence", "geometric"):
        assert weight_sums(weights, mask, level=level).tolist() == [2.5, 2.0]
