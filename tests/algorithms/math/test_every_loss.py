"""Properties of all token losses and KL estimates: references, padding, order."""

import math
from collections.abc import Callable
from functools import partial
from math import exp

import pytest
import torch
from hypothesis import given
from torch import Tensor

from streamrl.algorithms.math import losses
from streamrl.algorithms.math.tokens import apply_mask, kl_estimate
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


# References in plain Python: a row's tokens -> their losses and slopes (gradients of the row's sum
# by the trained column).
Row = dict[str, list]
Slopes = list[tuple[float, float]]


def ppo_of_token(x: float, a: float, dual: float = math.inf) -> tuple[float, float]:
    r = exp(x)
    if a > 0 and r > 1 + HIGH:
        return -a * (1 + HIGH), 0.0
    if a < 0 and r < 1 - LOW:
        return -a * (1 - LOW), 0.0
    if a < 0 and r > dual:
        return -a * dual, 0.0
    return -a * r, -a * r


def ppo(row: Row, dual: float = math.inf) -> Slopes:
    return [ppo_of_token(x, a, dual) for x, a in pairs(row)]


def pairs(row: Row) -> list[tuple[float, float]]:
    return list(zip(row["log_ratio"], row["advantages"], strict=True))


def gspo(row: Row) -> Slopes:
    n = len(row["log_ratio"])
    return [ppo_of_token(math.fsum(row["log_ratio"]) / n, a) for a in row["advantages"]]


def cispo(row: Row) -> Slopes:
    weights = [min(max(exp(x), 1 - LOW), 1 + HIGH) for x in row["log_ratio"]]
    return weigh_row(row, weights)


def weigh_row(row: Row, weights: list[float]) -> Slopes:
    tokens = zip(weights, row["advantages"], row["logprobs"], strict=True)
    return [(-w * a * logprob, -w * a) for w, a, logprob in tokens]


def gmpo(row: Row) -> Slopes:
    tokens = pairs(row)
    stopped = [x > HIGH if a > 0 else x < -LOW for x, a in tokens]
    logs = [
        (HIGH if a > 0 else -LOW) if s else x for s, (x, a) in zip(stopped, tokens, strict=True)
    ]
    n = len(tokens)
    loss = -sum(row["advantages"]) / max(n, 1) * exp(sum(logs) / max(n, 1))
    return [(loss, 0.0 if s else loss) for s in stopped]


def sapo(row: Row) -> Slopes:
    result = []
    for x, a in pairs(row):
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + exp(-tau * (exp(x) - 1)))
        result.append((-a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * exp(x)))
    return result


def clip_cov(row: Row) -> Slopes:
    return [(0.0, 0.0) if c else t for c, t in zip(row["chosen"], ppo(row), strict=True)]


def kl_cov(row: Row) -> Slopes:
    result = []
    for chosen, (x, a) in zip(row["chosen"], pairs(row), strict=True):
        coef = COEF if chosen else 0.0
        result.append((-a * exp(x) + coef * abs(x), -a * exp(x) + coef * math.copysign(1, x)))
    return result


def dppo(row: Row, kind: str) -> Slopes:
    weights = []
    for (x, a), logprob in zip(pairs(row), row["logprobs"], strict=True):
        p, q = exp(logprob), exp(logprob - x)
        far = abs(p - q)
        if kind == "kl":
            far = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        goes_on = p > q if a > 0 else p < q
        weights.append(0.0 if goes_on and far > (FAR if a > 0 else NEAR) else min(exp(x), CAP))
    return weigh_row(row, weights)


def value(row: Row, clip: float = math.inf) -> Slopes:
    result = []
    for v, target, old in zip(row["values"], row["returns"], row["old_values"], strict=True):
        held = min(max(v, old - clip), old + clip)
        moves = held == v or (v - target) ** 2 > (held - target) ** 2
        loss = max((v - target) ** 2, (held - target) ** 2) / 2
        result.append((loss, v - target if moves else 0.0))
    return result


def divergence(row: Row, kind: str) -> Slopes:
    result = []
    for logprob, reference in zip(row["logprobs"], row["ref_logprobs"], strict=True):
        x = logprob - reference
        sign = math.copysign(1, x)
        of_kind = {
            "k1": (x, 1.0),
            "k2": (x * x / 2, x),
            "k3": (exp(-x) + x - 1, 1 - exp(-x)),
            "abs": (abs(x), sign),
        }
        loss, slope = of_kind[kind.removesuffix("+")]
        result.append((loss, x if kind.endswith("+") else slope))
    return result


IN_LOOPS: dict[str, Callable[[Row], Slopes]] = {
    "ppo": ppo,
    "dual": partial(ppo, dual=DUAL),
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": partial(dppo, kind="tv"),
    "dppo_kl": partial(dppo, kind="kl"),
    "reinforce": lambda row: weigh_row(row, [1.0] * len(row["logprobs"])),
    "value": value,
    "clipped value": partial(value, clip=VALUE_CLIP),
    **{kind: partial(divergence, kind=kind) for kind in KL_KINDS},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_the_reference_in_python_loops(name, dtype):
    for seed in range(12):
        batch = ragged.make_batch(seed, dtype)
        expected = []
        for row in ragged.list_counted_rows(batch):
            ratios = zip(row["logprobs"], row["old_logprobs"], strict=True)
            expected.append(IN_LOOPS[name](row | {"log_ratio": [p - q for p, q in ratios]}))
        for i, result in enumerate(run(name, batch)):
            numbers = [[token[i] for token in row] for row in expected]
            ragged.assert_equals_rows(result, numbers, batch["loss_mask"], dtype)


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
