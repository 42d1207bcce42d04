"""PPO's loss, entropy, and the aggregation of token losses."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.math.kl import probability_ratio
from streamrl.algorithms.math.losses import (
    aggregate_loss_sum,
    clipped_surrogate_loss,
    entropy_from_logits,
    outside_clip_mask,
)
from streamrl.algorithms.math.masks import apply_mask
from streamrl.algorithms.math.options import LOSS_AGGREGATIONS
from streamrl.algorithms.math.training_metrics import compute_loss_denominator
from tests.algorithms import ragged
from tests.algorithms.aggregate import aggregate_loss
from tests.algorithms.ragged import BATCHES

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def surrogate(ratio: float, advantage: float, **clip: float) -> float:
    log_ratio = torch.tensor([[math.log(ratio)]])
    loss = clipped_surrogate_loss(log_ratio, torch.tensor([[advantage]]), **(CLIP | clip))
    return round(loss.item(), 5)


def test_clipped_surrogate_by_hand():
    assert surrogate(1.1, 2.0) == -2.2  # inside: -A r
    assert surrogate(1.5, 2.0) == -2.56  # -A (1 + 0.28): clipped
    assert surrogate(0.5, 2.0) == -1.0  # worse than the clip allows for: no clipping
    assert surrogate(0.5, -2.0) == 1.6  # -A (1 - 0.2)
    assert surrogate(5.0, -2.0) == 10.0
    assert surrogate(5.0, -2.0, dual_clip=3.0) == 6.0  # -A c
    assert surrogate(1.1, 2.0, dual_clip=3.0) == -2.2


def test_the_clip_mask_marks_tokens_without_gradient():
    log_ratio = torch.tensor([[0.5, -0.5, 0.1, 0.5, -0.5]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0]])
    clipped_surrogate_loss(log_ratio, advantages, **CLIP).sum().backward()
    stopped = outside_clip_mask(log_ratio, advantages, **CLIP)
    assert stopped.tolist() == [[True, False, False, False, True]]
    assert torch.equal(ragged.gradient(log_ratio) == 0, stopped)


def test_clip_mask_by_hand_with_inclusive_bounds():
    log_ratio = torch.tensor([1.5, 0.75, 1.6, 0.7, 1.6, 0.7, 1.6, 0.7]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 0.0, 0.0])
    high, low, *_ = probability_ratio(log_ratio).tolist()  # 1.5 and 0.75, as rounded
    bounds = {"clip_low": 1 - low, "clip_high": high - 1}
    stopped = outside_clip_mask(log_ratio, advantages, **bounds)
    assert stopped.tolist() == [False, False, True, True, False, False, False, False]


def test_probability_ratio_by_hand_and_for_large_log_ratios():
    log_ratio = torch.tensor([math.log(3), 0.0, -math.log(4), 30, -30], dtype=torch.float64)
    expected = [3, 1, 0.25, 11 * math.exp(20), math.exp(-30)]
    slopes = [3, 1, 0.25, math.exp(20), math.exp(-30)]  # beyond 20 the tangent
    ratio = probability_ratio(log_ratio.requires_grad_())
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx(expected, rel=1e-9)
    assert ragged.gradient(log_ratio).tolist() == pytest.approx(slopes, rel=1e-9)
    assert probability_ratio(torch.tensor([1e4, -1e4])).square().isfinite().all()


@given(batch=BATCHES, seed=st.integers(0, 9999))
def test_the_clip_mask_ignores_padding_and_other_rows(batch, seed):
    def stopped(b):
        x, a = (apply_mask(b[name], b["loss_mask"]) for name in ("log_ratio", "advantages"))
        return outside_clip_mask(x, a, **CLIP).double()

    ragged.assert_padding_has_no_effect(stopped, batch)
    ragged.assert_rows_are_independent(stopped, batch, seed)


def test_entropy_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]))
    expected = torch.tensor([1.5 * math.log(2), math.log(3)])
    torch.testing.assert_close(entropy_from_logits(logits + 7.0), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_entropy_and_gradient_equal_the_reference_in_python_loops(dtype):
    for seed in range(6):
        logits = ragged.make_batch(seed, dtype)["logits"].requires_grad_()
        result = entropy_from_logits(logits)
        result.sum().backward()
        expected, slopes = [], []
        for row in logits.detach().flatten(0, 1).tolist():
            total = math.fsum(math.exp(z) for z in row)
            logs = [z - math.log(total) for z in row]
            expected.append(-math.fsum(math.exp(x) * x for x in logs))
            slopes.append([-math.exp(x) * (x + expected[-1]) for x in logs])
        shape = result.shape
        float64 = partial(torch.tensor, dtype=torch.float64)
        ragged.assert_equals_reference(result, float64(expected).view(shape), dtype)
        ragged.assert_equals_reference(
            ragged.gradient(logits), float64(slopes).view(*shape, -1), dtype
        )


@given(batch=BATCHES, seed=st.integers(0, 9999), shift=st.floats(-50, 50))
def test_entropy_ignores_padding_other_rows_and_shifts_of_logits(batch, seed, shift):
    def masked_entropy(b):
        return apply_mask(entropy_from_logits(b["logits"]), b["loss_mask"])

    ragged.assert_padding_has_no_effect(masked_entropy, batch)
    ragged.assert_rows_are_independent(masked_entropy, batch, seed)
    torch.testing.assert_close(
        entropy_from_logits(batch["logits"] + shift), entropy_from_logits(batch["logits"])
    )


def test_forbidden_tokens_do_not_affect_entropy_or_gradient():
    logits = torch.tensor([0.0, 1.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    without = logits.detach()[:2].clone().requires_grad_()
    torch.testing.assert_close(entropy_from_logits(logits), entropy_from_logits(without))
    (gradient,) = torch.autograd.grad(entropy_from_logits(logits), logits)
    (expected,) = torch.autograd.grad(entropy_from_logits(without), without)
    torch.testing.assert_close(gradient, torch.cat([expected, torch.zeros(1)]))


def test_the_entropy_of_extreme_logits_is_0():
    assert entropy_from_logits(torch.tensor([1e4, 0.0, -1e4])).item() == 0


LOSSES = torch.tensor([[1.0, 2.0, 3.0, 9.0], [10.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, True, False], [True, False, False, False]])
APART, TOGETHER = torch.tensor([5, 2]), torch.tensor([5, 5])


@pytest.mark.parametrize(
    ("mode", "expected", "in_one_group"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4, (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-sum", (6 + 10) / 2, (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2, (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8, (6 + 10) / 2 / 8),
        ("prompt-mean", (2 + 10) / 2, 16 / 4),
    ],
)
def test_aggregate_by_hand_and_only_prompt_mean_depends_on_groups(mode, expected, in_one_group):
    for group_ids, value in ((APART, expected), (TOGETHER, in_one_group)):
        loss = aggregate_loss(LOSSES, MASK, mode=mode, max_length=8, group_ids=group_ids)
        assert loss.item() == pytest.approx(value)


def test_prompt_mean_ignores_groups_without_tokens():
    # Three rows of two groups: (10 + 6) / 4 and 9 / 1.
    losses, mask = torch.cat([LOSSES, LOSSES]), torch.cat([MASK, MASK])
    mask[2:] = torch.tensor([[False, False, False, True], [False] * 4])
    loss = aggregate_loss(losses, mask, mode="prompt-mean", group_ids=torch.tensor([7, 7, 1, 3]))
    assert loss.item() == pytest.approx((4 + 9) / 2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12),
        ("seq-mean-token-sum", 5),
        ("seq-mean-token-mean", 5),
        ("seq-mean-token-sum-norm", 5 * 9),
        ("prompt-mean", 2),
    ],
)
def test_loss_denominator_by_hand(mode, expected):
    counts = {"num_tokens": 12, "num_sequences": 5, "num_groups": 2, "max_length": 9}
    assert compute_loss_denominator(mode, **counts) == expected


def test_a_loss_per_row_applies_to_each_of_its_tokens():
    losses = torch.tensor([[2.0], [3.0]])
    assert aggregate_loss_sum(losses, MASK, mode="token-mean").item() == 3 * 2 + 3
    assert aggregate_loss_sum(losses, MASK, mode="seq-mean-token-mean").item() == 2 + 3


def test_a_batch_without_counted_tokens_adds_0():
    nothing = torch.zeros_like(MASK)
    for mode in LOSS_AGGREGATIONS:
        total = aggregate_loss_sum(LOSSES, nothing, mode=mode, group_tokens=torch.zeros(2).long())
        assert total.item() == 0


def test_aggregate_uses_given_counts_of_the_whole_step():
    loss = aggregate_loss(LOSSES, MASK, mode="token-mean", num_tokens=32)
    assert loss.item() == pytest.approx(16 / 32)
    loss = aggregate_loss(LOSSES, MASK, mode="seq-mean-token-mean", num_sequences=4)
    assert loss.item() == pytest.approx(12 / 4)


def test_a_fully_masked_row_is_not_a_sequence():
    mask = torch.tensor([[True, True, True, False], [False, False, False, False]])
    assert aggregate_loss(LOSSES, mask, mode="seq-mean-token-mean").item() == pytest.approx(2.0)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_masked_nan_reaches_neither_loss_nor_gradient(mode):
    tokens = torch.where(MASK, LOSSES, math.nan).requires_grad_()
    loss = aggregate_loss(tokens, MASK, mode=mode, max_length=8, group_ids=TOGETHER)
    loss.backward()
    clean = torch.where(MASK, LOSSES, 0.0).requires_grad_()
    aggregate_loss(clean, MASK, mode=mode, max_length=8, group_ids=TOGETHER).backward()
    assert loss.isfinite()
    assert torch.equal(ragged.gradient(tokens), ragged.gradient(clean))


@st.composite
def split_step(draw):
    lengths = draw(st.lists(st.integers(1, 7), min_size=2, max_size=8))
    cuts = draw(st.sets(st.integers(1, len(lengths) - 1)))
    return lengths, sorted(cuts)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@given(case=split_step(), seed=st.integers(0, 99))
def test_micro_batches_do_not_change_loss_or_gradient(mode, case, seed):
    lengths, cuts = case
    draw = torch.Generator().manual_seed(seed)
    losses = torch.randn(len(lengths), max(lengths), generator=draw).double().requires_grad_()
    group_ids = torch.randint(3, (len(lengths),), generator=draw)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    step_loss = aggregate_loss(losses, mask, mode=mode, max_length=7, group_ids=group_ids)
    # A micro-batch may split a group, so each row carries the token count of its whole group.
    of_group = [sum(n for n, g in zip(lengths, group_ids, strict=True) if g == i) for i in range(3)]
    group_tokens = torch.tensor(of_group)[group_ids]
    parts = losses.new_zeros(())
    for start, end in zip([0, *cuts], [*cuts, len(lengths)], strict=True):
        part, width = slice(start, end), max(lengths[start:end])
        parts = parts + aggregate_loss_sum(
            losses[part, :width], mask[part, :width], mode=mode, group_tokens=group_tokens[part]
        )
    counts = {"num_tokens": sum(lengths), "num_sequences": len(lengths), "max_length": 7}
    divisor = compute_loss_denominator(mode, num_groups=len(set(group_ids.tolist())), **counts)
    torch.testing.assert_close(parts / divisor, step_loss)
    gradients = [torch.autograd.grad(loss, losses)[0] for loss in (parts / divisor, step_loss)]
    torch.testing.assert_close(*gradients)


def aggregate_in_loops(rows: list[list[float]], group_ids: list[int], mode: str) -> float:
    """Return the aggregated loss of the tokens of each row, by the definition of the mode."""
    rows, ids = [r for r in rows if r], [g for r, g in zip(rows, group_ids, strict=True) if r]
    groups = [[x for r, g in zip(rows, ids, strict=True) if g == i for x in r] for i in set(ids)]
    means = {
        "token-mean": [x for row in rows for x in row],
        "seq-mean-token-sum": [sum(row) for row in rows],
        "seq-mean-token-mean": [sum(row) / len(row) for row in rows],
        "seq-mean-token-sum-norm": [sum(row) / 8 for row in rows],
        "prompt-mean": [sum(group) / len(group) for group in groups],
    }
    return math.fsum(means[mode]) / len(means[mode])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_aggregation_equals_the_reference_in_python_loops(mode, dtype):
    for seed in range(1, 9):
        batch = ragged.make_batch(seed, dtype)
        group_ids = torch.tensor([4, 9, 4, 1, 9, 4])[: len(batch["loss_mask"])]
        rows = [row["values"] for row in ragged.list_counted_rows(batch)]
        value = aggregate_in_loops(rows, group_ids.tolist(), mode)
        expected = torch.tensor(value, dtype=torch.float64)
        for b in (batch, ragged.with_nan_padding(batch), ragged.with_more_padding(batch)):
            loss = aggregate_loss(
                b["values"], b["loss_mask"], mode=mode, max_length=8, group_ids=group_ids
            )
            ragged.assert_equals_reference(loss, expected, dtype)
            order = torch.arange(len(group_ids)).flip(0)
            options = {"mode": mode, "max_length": 8, "group_ids": group_ids[order]}
            reordered = aggregate_loss(b["values"][order], b["loss_mask"][order], **options)
            ragged.assert_equals_reference(reordered, expected, dtype)


def test_unknown_modes_and_missing_counts_are_refused():
    with pytest.raises(ValueError, match="'mean'"):
        aggregate_loss_sum(LOSSES, MASK, mode="mean")
    with pytest.raises(ValueError, match="max_length"):
        compute_loss_denominator("seq-mean-token-sum-norm", num_tokens=1, num_sequences=1)
    with pytest.raises(ValueError, match="'mean'"):
        compute_loss_denominator("mean", num_tokens=1, num_sequences=1)
    with pytest.raises(ValueError, match="number of groups"):
        compute_loss_denominator("prompt-mean", num_tokens=1, num_sequences=1)
    with pytest.raises(ValueError, match="needs group_tokens"):
        aggregate_loss_sum(LOSSES, MASK, mode="prompt-mean")
