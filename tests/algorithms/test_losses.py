"""Token losses, their reduction, and the divergence from a reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.kl import KINDS, kl_estimate
from streamrl.algorithms.losses import (
    MODES,
    aggregate,
    aggregate_sum,
    clipped_surrogate,
    entropy,
    normaliser,
    outside_clip,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def surrogate(ratio: float, advantage: float, **clip: float) -> float:
    log_ratio = torch.tensor([[math.log(ratio)]])
    loss = clipped_surrogate(log_ratio, torch.tensor([[advantage]]), **(CLIP | clip))
    return round(loss.item(), 5)


def test_clipped_surrogate_by_hand():
    assert surrogate(1.1, 2.0) == -2.2  # inside: -A r
    assert surrogate(1.5, 2.0) == -2.56  # -A (1 + 0.28), the ratio has gone far enough
    assert surrogate(0.5, 2.0) == -1.0  # worse than the clip allows for: no clipping
    assert surrogate(0.5, -2.0) == 1.6  # -A (1 - 0.2)
    assert surrogate(5.0, -2.0) == 10.0
    assert surrogate(5.0, -2.0, dual_clip=3.0) == 6.0  # -A c
    assert surrogate(1.1, 2.0, dual_clip=3.0) == -2.2


def test_the_gradient_stops_where_outside_clip_says():
    log_ratio = torch.tensor([[0.5, -0.5, 0.1, 0.5, -0.5]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0]])
    clipped_surrogate(log_ratio, advantages, **CLIP).sum().backward()
    stopped = outside_clip(log_ratio, advantages, **CLIP)
    assert stopped.tolist() == [[True, False, False, False, True]]
    assert torch.equal(log_ratio.grad == 0, stopped)


def test_a_huge_log_ratio_stays_finite():
    log_ratio = torch.tensor([[1e4, -1e4]], requires_grad=True)
    loss = clipped_surrogate(log_ratio, torch.tensor([[-1.0]]), **CLIP)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_ratio.grad.isfinite().all()


def test_at_ratio_one_the_gradient_is_that_of_reinforce():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    advantages = torch.tensor([[2.0], [-3.0]])
    clipped_surrogate(logprobs - logprobs.detach(), advantages, **CLIP).sum().backward()
    assert torch.equal(logprobs.grad, -advantages.expand(2, 3))


def test_entropy_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]))
    expected = torch.tensor([1.5 * math.log(2), math.log(3)])
    torch.testing.assert_close(entropy(logits + 7.0), expected)


LOSSES = torch.tensor([[1.0, 2.0, 3.0, 9.0], [10.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, True, False], [True, False, False, False]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
    ],
)
def test_aggregate_by_hand(mode, expected):
    loss = aggregate(LOSSES, MASK, mode=mode, max_length=8)
    assert loss.item() == pytest.approx(expected)


def test_aggregate_takes_the_counts_of_the_whole_step():
    loss = aggregate(LOSSES, MASK, mode="token-mean", num_tokens=32)
    assert loss.item() == pytest.approx(16 / 32)
    loss = aggregate(LOSSES, MASK, mode="seq-mean-token-mean", num_sequences=4)
    assert loss.item() == pytest.approx(12 / 4)


def test_an_all_masked_row_is_no_sequence():
    mask = torch.tensor([[True, True, True, False], [False, False, False, False]])
    assert aggregate(LOSSES, mask, mode="seq-mean-token-mean").item() == pytest.approx(2.0)


@pytest.mark.parametrize("mode", MODES)
def test_nan_under_the_mask_reaches_neither_loss_nor_gradient(mode):
    logprobs = torch.where(MASK, LOSSES, math.nan).requires_grad_()
    loss = aggregate_sum(logprobs.exp(), MASK, mode=mode)
    loss.backward()
    clean = torch.where(MASK, LOSSES, 0.0).requires_grad_()
    aggregate_sum(clean.exp(), MASK, mode=mode).backward()
    assert loss.isfinite()
    # exp's own backward multiplies by NaN; a loss must mask its inputs too, as policy_loss does.
    assert torch.equal(torch.where(MASK, logprobs.grad, 0.0), clean.grad)


@st.composite
def ragged(draw):
    lengths = draw(st.lists(st.integers(1, 7), min_size=2, max_size=8))
    cuts = draw(st.sets(st.integers(1, len(lengths) - 1)))
    return lengths, sorted(cuts)


@pytest.mark.parametrize("mode", MODES)
@given(case=ragged(), seed=st.integers(0, 99))
def test_splitting_a_step_leaves_its_loss_alone(mode, case, seed):
    lengths, cuts = case
    losses = torch.randn(
        len(lengths), max(lengths), generator=torch.Generator().manual_seed(seed)
    ).double()
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    whole = aggregate(losses, mask, mode=mode, max_length=7)
    parts = torch.zeros((), dtype=torch.float64)
    for start, end in zip([0, *cuts], [*cuts, len(lengths)], strict=True):
        width = max(lengths[start:end])
        parts += aggregate_sum(losses[start:end, :width], mask[start:end, :width], mode=mode)
    divisor = normaliser(mode, num_tokens=sum(lengths), num_sequences=len(lengths), max_length=7)
    torch.testing.assert_close(parts / divisor, whole)


def test_an_unknown_mode_and_a_missing_length_are_refused():
    with pytest.raises(ValueError, match="'mean'"):
        aggregate_sum(LOSSES, MASK, mode="mean")
    with pytest.raises(ValueError, match="max_length"):
        normaliser("seq-mean-token-sum-norm", num_tokens=1, num_sequences=1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", 0.5),
        ("k2", 0.125),
        ("k3", math.exp(-0.5) + 0.5 - 1),
        ("abs", 0.5),
        ("k1+", 0.5),
        ("k3+", math.exp(-0.5) + 0.5 - 1),
        ("abs+", 0.5),
    ],
)
def test_kl_estimates_by_hand(kind, expected):
    assert kl_estimate(torch.tensor(-1.0), torch.tensor(-1.5), kind).item() == pytest.approx(
        expected
    )


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+"])
def test_straight_through_estimates_have_the_gradient_of_k2(kind):
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-1.5, -2.0]), kind).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.5, -1.0]))  # x


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_policy_has_no_divergence(kind):
    logprobs = torch.tensor([-0.3, -7.0])
    assert kl_estimate(logprobs, logprobs, kind).tolist() == [0.0, 0.0]


def test_k3_is_bounded_for_any_input():
    assert kl_estimate(torch.tensor(-1e6), torch.tensor(0.0), "k3").item() == 10.0
    assert kl_estimate(torch.tensor(0.0), torch.tensor(-1e6), "k3").item() == 10.0


# Far enough apart to matter, near enough for the bound of k3 not to.
WEIGHTS = st.lists(st.floats(0.3, 1.0), min_size=4, max_size=4)


@given(WEIGHTS, WEIGHTS)
def test_k1_and_k3_average_to_the_divergence(weights, reference_weights):
    policy, reference = torch.tensor([weights, reference_weights], dtype=torch.float64)
    policy, reference = policy / policy.sum(), reference / reference.sum()
    exact = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        mean = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
        torch.testing.assert_close(mean, exact, atol=1e-9, rtol=1e-9)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
