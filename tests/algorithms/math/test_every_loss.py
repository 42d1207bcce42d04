"""Properties of all token losses and KL estimates: precision, padding, distant policies."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import Tensor

from streamrl.algorithms.math import losses
from streamrl.algorithms.math.tokens import apply_mask, kl_estimate
from streamrl.algorithms.table import VESPO_PARAMS
from tests.algorithms import ragged
from tests.algorithms.ragged import BATCHES, Batch

LOW, HIGH, DUAL = 0.2, 0.28, 1.5
CLIP = {"clip_low": LOW, "clip_high": HIGH}
NEAR, FAR, CAP = 0.05, 0.08, 1.3
DPPO = {"low": NEAR, "high": FAR, "cap": CAP}
COEF, VALUE_CLIP = 0.7, 0.5
Loss = Callable[[Batch], Tensor]


def loss_of(function: Callable[..., Tensor], *columns: str, **options: float | str) -> Loss:
    """Bind options; the loss takes log-ratio, advantages and these columns of a masked batch."""
    return lambda b: function(
        b["log_ratio"], b["advantages"], **{name: b[name] for name in columns}, **options
    )


POLICY_LOSSES: dict[str, Loss] = {
    "ppo": loss_of(losses.clipped_surrogate_loss, **CLIP),
    "dual": loss_of(losses.clipped_surrogate_loss, dual_clip=DUAL, **CLIP),
    "gspo": loss_of(losses.sequence_clipped_surrogate_loss, "loss_mask", **CLIP),
    "cispo": loss_of(losses.clipped_importance_loss, "logprobs", **CLIP),
    "gmpo": loss_of(losses.geometric_mean_loss, "loss_mask", **CLIP),
    "sapo": loss_of(losses.soft_adaptive_loss),
    "clip_cov": loss_of(losses.covariance_clip_loss, "chosen", **CLIP),
    "kl_cov": loss_of(losses.covariance_kl_loss, "chosen", coef=COEF),
    "dppo_tv": loss_of(losses.divergence_masked_loss, "logprobs", kind="tv", **DPPO),
    "dppo_kl": loss_of(losses.divergence_masked_loss, "logprobs", kind="kl", **DPPO),
    "vespo": loss_of(losses.sequence_gamma_loss, "loss_mask", "logprobs", **VESPO_PARAMS),
    "dro": loss_of(losses.quadratic_penalty_loss, "logprobs", coef=COEF),
    "reinforce": lambda b: losses.score_function_loss(b["logprobs"], b["advantages"]),
}


def divergence_of(kind: str) -> Callable[[Batch], Tensor]:
    return lambda b: kl_estimate(b["logprobs"], b["ref_logprobs"], kind)


KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
LOSSES = POLICY_LOSSES | {
    "value": lambda b: losses.value_loss(b["values"], b["returns"], b["old_values"]),
    "clipped value": lambda b: losses.value_loss(
        b["values"], b["returns"], b["old_values"], clip=VALUE_CLIP
    ),
    **{kind: divergence_of(kind) for kind in KL_KINDS},
}


def trained(name: str) -> str:
    return "values" if "value" in name else "logprobs"


def run(name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss of every counted token, and the gradient of their sum; both [B, T]."""
    leaf = batch[trained(name)].clone().requires_grad_()
    mask = batch["loss_mask"]
    tokens = {
        key: apply_mask(x, mask) if x.is_floating_point() and x.ndim == 2 else x
        for key, x in (batch | {trained(name): leaf}).items()
    }
    tokens["log_ratio"] = tokens["logprobs"] - tokens["old_logprobs"]
    loss = apply_mask(LOSSES[name](tokens), mask)
    loss.sum().backward()
    return loss.detach(), ragged.gradient(leaf)


def select_result(name: str, part: int) -> Callable[[Batch], Tensor]:
    """Return a function for one result of `run`: 0 the loss, 1 the gradient."""
    return lambda batch: run(name, batch)[part]


@pytest.mark.parametrize("name", LOSSES)
@given(batch=BATCHES)
def test_padding_has_no_effect_on_loss_or_gradient(name, batch):
    for i in range(2):
        ragged.assert_padding_has_no_effect(select_result(name, i), batch)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_of_distant_policies_are_finite(name):
    mask = torch.tensor([[True, True, False], [True, False, False], [False, True, True]])
    near, far = torch.tensor([[-0.1, -1e4, -0.1]]), torch.tensor([[-1e4, -0.1, -0.1]])
    batch = {
        "loss_mask": mask,
        "logprobs": near.expand(3, 3),
        "old_logprobs": far.expand(3, 3),
        "chosen": torch.tensor([[True, True, False]]).expand(3, 3),
    }
    for sign in (1.0, -1.0):
        for result in run(name, batch | {"advantages": torch.full((3, 3), sign)}):
            assert result.isfinite().all(), f"under advantages of {sign}"


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(batch=BATCHES)
def test_advantages_may_be_per_rollout(name, batch):
    mask = batch["loss_mask"]
    per_row = batch["advantages"][:, :1]
    tokens = batch | {"log_ratio": apply_mask(batch["log_ratio"], mask)}
    result, expected = (
        apply_mask(POLICY_LOSSES[name](tokens | {"advantages": advantages}), mask)
        for advantages in (per_row, per_row.expand(mask.shape))
    )
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
