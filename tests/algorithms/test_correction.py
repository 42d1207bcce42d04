"""Weights and rejections for tokens that another policy sampled."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms.correction import (
    REJECTION_KINDS,
    REJECTION_LEVELS,
    WEIGHT_LEVELS,
    WEIGHT_MODES,
    importance_weights,
    interpolated_proximal,
    off_policy_sequence_mask,
    rejection_mask,
    second_moment_limit,
    second_moment_mask,
)
from tests.algorithms.ragged import (
    BATCHES,
    assert_as_in_loops,
    assert_padding_has_no_say,
    assert_rows_are_apart,
    assert_rows_may_be_shuffled,
    few,
    on_tokens,
    ragged,
    rows_that_count,
)

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


def test_weights_by_hand_are_ratios_of_tokens_their_product_or_its_root():
    assert weights("token") == [2, 0.5, 0, 8]
    assert weights("sequence") == [8, 8, 0, 8]
    assert weights("geometric") == [2, 2, 0, 2]


def test_a_weight_out_of_bounds_is_truncated_or_masked_by_hand():
    assert weights("token", high=3.0) == [2, 0.5, 0, 3]
    assert weights("token", low=0.75, high=3.0) == [2, 0.75, 0, 3]
    assert weights("token", low=0.75) == [2, 0.75, 0, 8]
    assert weights("token", low=0.75, high=3.0, mode="mask") == [2, 0, 0, 0]
    assert weights("token", high=3.0, mode="mask") == [2, 0.5, 0, 0]
    assert weights("token", mode="mask") == [2, 0.5, 0, 8]
    assert weights("sequence", high=3.0) == [3, 3, 0, 3]
    assert weights("sequence", high=3.0, mode="mask") == [0] * 4
    assert weights("geometric", high=3.0, mode="mask") == [2, 2, 0, 2]


def test_a_weight_on_its_bound_is_inside():
    same = torch.zeros(1, 2)
    for bounds in ({"low": 1.0}, {"high": 1.0}):
        result = importance_weights(
            same, torch.tensor([[True, True]]), level="token", mode="mask", **bounds
        )
        assert result.tolist() == [[1, 1]]


def test_weights_stay_finite():
    far = torch.tensor([[1e6, -1e6], [15.0, 15.0]])
    for level in WEIGHT_LEVELS:
        assert importance_weights(far, torch.ones(2, 2).bool(), level=level).isfinite().all()


BOUNDED = {
    f"{level} {mode}": {"level": level, "mode": mode, "low": 0.6, "high": 1.5}
    for level, mode in product(WEIGHT_LEVELS, WEIGHT_MODES)
}


def weights_in_loops(row: list[float], level: str, mode: str, low: float, high: float):
    total = math.fsum(row)
    logs = {
        "token": row,
        "sequence": [total] * len(row),
        "geometric": [total / len(row)] * len(row),
    }
    result = []
    for ratio in map(math.exp, logs[level]):
        outside = 0.0 if mode == "mask" else min(max(ratio, low), high)
        result.append(ratio if low <= ratio <= high else outside)
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", BOUNDED)
def test_weights_are_as_in_plain_loops(name, dtype):
    for seed in range(12):
        batch = ragged(seed, dtype)
        rows = [row["log_ratio"] for row in rows_that_count(batch)]
        expected = [weights_in_loops(row, **BOUNDED[name]) if row else [] for row in rows]
        result = importance_weights(batch["log_ratio"], batch["loss_mask"], **BOUNDED[name])
        assert_as_in_loops(result, on_tokens(expected, batch["loss_mask"]), dtype)


@few
@given(batch=BATCHES)
def test_weights_of_a_behaviour_that_is_right_average_to_1(batch):
    # Over all tokens there are, by their probability under the behaviour: sum of q p / q.
    p, q = batch["logits"].log_softmax(-1), batch["logits"].flip(-1).log_softmax(-1)
    for log_p, log_q in zip(p.flatten(0, 1), q.flatten(0, 1), strict=True):
        x = (log_p - log_q)[None]
        ratio = importance_weights(x, torch.ones_like(x).bool(), level="token")
        assert (log_q.exp() * ratio).sum().item() == pytest.approx(1)


def kept(kind, level, **bounds):
    result = rejection_mask(LOG_RATIO, MASK, kind=kind, level=level, **bounds)
    assert result.dtype == torch.bool
    assert not result[1].any()
    return "".join("x" if counts else "." for counts in result[0].tolist())


def test_k1_bounds_the_ratio_trained_over_sampling_by_hand():
    # 2, 1/2 and 8: their product is 8, the geometric mean 2.
    assert kept("k1", "token", low=0.6) == "x..x"
    assert kept("k1", "token", high=3.0) == "xx.."
    assert kept("k1", "token", low=0.6, high=3.0) == "x..."
    assert kept("k1", "sum", high=8.1) == "xx.x"
    assert kept("k1", "sum", high=7.9) == "...."
    assert kept("k1", "sum", low=8.1) == "...."
    assert kept("k1", "mean", low=1.9, high=2.1) == "xx.x"
    assert kept("k1", "mean", high=1.9) == "...."
    assert kept("k1", "mean", low=2.1) == "...."
    assert kept("k1", "max", low=0.4, high=8.1) == "xx.x"
    assert kept("k1", "max", high=7.9) == "...."
    assert kept("k1", "max", low=0.6) == "...."


def test_divergences_by_hand():
    # k2 is log^2 / 2: 0.240, 0.240 and 2.162; k3 r - 1 - log r: 0.307, 0.193 and 4.921.
    assert kept("k2", "token", high=0.25) == "xx.."
    assert kept("k2", "token", high=0.23) == "...."
    assert kept("k2", "sum", high=2.65) == "xx.x"
    assert kept("k2", "sum", high=2.63) == "...."
    assert kept("k2", "mean", high=0.89) == "xx.x"
    assert kept("k2", "mean", high=0.87) == "...."
    assert kept("k2", "max", high=2.17) == "xx.x"
    assert kept("k2", "max", high=2.15) == "...."
    assert kept("k3", "token", high=0.25) == ".x.."
    assert kept("k3", "token", high=0.31) == "xx.."
    assert kept("k3", "sum", high=5.43) == "xx.x"
    assert kept("k3", "sum", high=5.41) == "...."
    assert kept("k3", "mean", high=1.81) == "xx.x"
    assert kept("k3", "mean", high=1.80) == "...."
    assert kept("k3", "max", high=4.93) == "xx.x"
    assert kept("k3", "max", high=4.91) == "...."


def test_what_is_on_its_bound_is_inside():
    x, mask = torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([[True, True]])
    one = rejection_mask(x, mask, kind="k1", level="token", low=1.0, high=1.0)
    assert one.tolist() == [[True, False]]
    half = rejection_mask(x, mask, kind="k2", level="token", high=0.5)
    assert half.tolist() == [[True, True]]
    for level in ("mean", "sum", "max"):
        bound = {"mean": 0.25, "sum": 0.5, "max": 0.5}[level]
        assert rejection_mask(x, mask, kind="k2", level=level, high=bound).all()


@pytest.mark.parametrize("level", REJECTION_LEVELS)
@pytest.mark.parametrize("kind", REJECTION_KINDS)
def test_without_bounds_or_a_distance_nothing_is_rejected(kind, level):
    assert torch.equal(rejection_mask(LOG_RATIO, MASK, kind=kind, level=level), MASK)
    for bounds in ({"high": 1.0}, {"low": 0.0, "high": 1.0} if kind == "k1" else {"high": 0.0}):
        same = torch.zeros_like(LOG_RATIO)
        assert torch.equal(rejection_mask(same, MASK, kind=kind, level=level, **bounds), MASK)


@pytest.mark.parametrize("level", REJECTION_LEVELS)
@pytest.mark.parametrize("kind", REJECTION_KINDS)
def test_tokens_that_are_far_off_are_rejected_without_overflow(kind, level):
    mask = torch.tensor([[True, True]])
    for far in (1e6, -1e6):
        x = torch.tensor([[far, far]])
        bounds = {"low": 0.5, "high": 2.0} if kind == "k1" else {"high": 2.0}
        assert not rejection_mask(x, mask, kind=kind, level=level, **bounds).any()


REJECTING = {
    f"{kind} {level}": {"kind": kind, "level": level, "high": 1.4 if kind == "k1" else 0.1}
    | ({"low": 0.6} if kind == "k1" else {})
    for kind, level in product(REJECTION_KINDS, REJECTION_LEVELS)
}


def rejected_in_loops(row, kind: str, level: str, high: float, low: float = 0.0) -> list[float]:
    estimate = {
        "k1": lambda x: x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }[kind]
    values = [estimate(x) for x in row]
    if level == "sum":
        values = [math.fsum(values)] * len(row)
    elif level == "mean":
        values = [math.fsum(values) / len(row)] * len(row)
    values = [math.exp(x) for x in values] if kind == "k1" else values
    inside = [low <= x <= high for x in values]
    return [float(all(inside) if level == "max" else x) for x in inside]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", REJECTING)
def test_rejections_are_as_in_plain_loops(name, dtype):
    results = []
    for seed in range(24):
        batch = ragged(seed, dtype)
        rows = [row["log_ratio"] for row in rows_that_count(batch)]
        expected = [rejected_in_loops(row, **REJECTING[name]) if row else [] for row in rows]
        result = rejection_mask(batch["log_ratio"], batch["loss_mask"], **REJECTING[name])
        assert torch.equal(result.double(), on_tokens(expected, batch["loss_mask"]))
        results += result[batch["loss_mask"]].tolist()
    assert set(results) == {True, False}


def test_bad_rollouts_that_were_left_behind_are_left_out_by_hand():
    # The mean log-ratios are -1/4 and 0.
    x = torch.tensor([[-0.5, NAN, 0.0], [-0.5, 0.5, NAN]]).requires_grad_()
    mask = torch.tensor([[True, False, True], [True, True, False]])
    bad, good = torch.tensor([[-1.0], [-1.0]]), torch.tensor([[1.0], [0.0]])

    def keeps(advantages, threshold):
        return off_policy_sequence_mask(x, advantages, mask, threshold=threshold).tolist()

    assert keeps(bad, 0.25) == mask.tolist()  # on the threshold
    assert keeps(bad, 0.24) == [[False] * 3, mask[1].tolist()]
    assert keeps(good, 0.24) == mask.tolist()
    assert keeps(bad, -0.01) == [[False] * 3] * 2
    mixed = torch.tensor([[-1.0, NAN, 1.0], [-1.0, 1.0, NAN]])
    assert keeps(mixed, 0.24) == [[False, False, True], mask[1].tolist()]


@pytest.mark.parametrize(
    ("threshold", "limit"),
    [
        # The means of 1/4, 1 and 4 are 1/4, 5/8 and 7/4.
        (2.0, 4.0),
        (1.75, 1.0),  # below, not at
        (1.0, 1.0),
        (0.625, 0.25),
        (0.25, -1.0),
    ],
)
def test_the_farthest_tokens_go_until_the_mean_square_is_below_the_threshold(threshold, limit):
    squares = torch.tensor([1.0, 4.0, 0.25])
    assert second_moment_limit(squares, threshold=threshold) == limit
    x = torch.tensor([[-1.0, NAN, 2.0], [NAN, -0.5, NAN]]).requires_grad_()
    mask = torch.tensor([[True, False, True], [False, True, False]])
    keeps = second_moment_mask(x, mask, threshold=threshold)
    expected = [[limit >= 1, False, limit >= 4], [False, limit >= 0.25, False]]
    assert keeps.tolist() == expected


def test_equal_tokens_stay_or_go_together():
    # With one of the two ones the mean is 5/8, with both 3/4.
    squares = torch.tensor([1.0, 0.25, 1.0])
    assert second_moment_limit(squares, threshold=0.7) == 0.25
    assert second_moment_limit(squares, threshold=0.8) == 1.0


def test_of_no_tokens_none_stay():
    assert second_moment_limit(torch.zeros(0), threshold=1.0) == -1.0
    nothing = torch.zeros(2, 2).bool()
    assert not second_moment_mask(torch.full((2, 2), NAN), nothing, threshold=1.0).any()


@few
@given(batch=BATCHES, threshold=st.floats(0.01, 1.0))
def test_what_stays_is_below_the_threshold_and_one_more_would_not_be(batch, threshold):
    mask = batch["loss_mask"]
    stays = second_moment_mask(batch["log_ratio"], mask, threshold=threshold)
    inside = sorted(batch["log_ratio"][stays].square().tolist())
    outside = sorted(batch["log_ratio"][mask & ~stays].square().tolist())
    assert not inside or sum(inside) / len(inside) < threshold
    assert not outside or sum([*inside, outside[0]]) / (len(inside) + 1) >= threshold
    assert not inside or not outside or inside[-1] < outside[0]


# Version 5 is trained; its own token, one and three versions old, and one that is newer.
VERSIONS = torch.tensor([[5, 4, 2, 6]])


def test_the_proximal_policy_lies_between_the_two_known_by_hand():
    logprobs = torch.full((1, 4), -1.0, requires_grad=True)
    behaviour = torch.full((1, 4), -3.0)
    proximal = interpolated_proximal(logprobs, behaviour, VERSIONS, version=5)
    # Shares 0, 1/2, 3/4 of the 2 between them.
    torch.testing.assert_close(proximal, torch.tensor([[-3.0, -2.0, -1.5, -3.0]]))
    assert not proximal.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_proximal_policy_is_as_in_plain_loops(dtype):
    for seed in range(8):
        batch = ragged(seed, dtype)
        everything = batch | {"loss_mask": torch.ones_like(batch["loss_mask"])}
        versions = (batch["values"] * 2).long() + 3
        result = interpolated_proximal(
            batch["logprobs"], batch["old_logprobs"], versions, version=4
        )
        expected = []
        for row, sampled_by in zip(rows_that_count(everything), versions.tolist(), strict=True):
            tokens = zip(row["logprobs"], row["old_logprobs"], sampled_by, strict=True)
            shares = [(p, q, 1 - 1 / (1 + max(4 - v, 0))) for p, q, v in tokens]
            expected.append([s * p + (1 - s) * q for p, q, s in shares])
        assert_as_in_loops(result, on_tokens(expected, everything["loss_mask"]), dtype)


def proximal(batch):
    versions = torch.where(batch["loss_mask"], (batch["chosen"].long() * 2), -1)
    result = interpolated_proximal(batch["logprobs"], batch["old_logprobs"], versions, version=3)
    return torch.where(batch["loss_mask"], result, 0.0)


MASKED = {
    **{
        f"weights {name}": lambda b, options=options: importance_weights(
            b["log_ratio"], b["loss_mask"], **options
        )
        for name, options in BOUNDED.items()
    },
    **{
        f"rejection {name}": lambda b, options=options: rejection_mask(
            b["log_ratio"], b["loss_mask"], **options
        ).double()
        for name, options in REJECTING.items()
    },
    "left behind": lambda b: off_policy_sequence_mask(
        b["log_ratio"], b["advantages"], b["loss_mask"], threshold=0.1
    ).double(),
    "proximal": proximal,
    "second moment": lambda b: second_moment_mask(
        b["log_ratio"], b["loss_mask"], threshold=0.15
    ).double(),
}


@pytest.mark.parametrize("name", MASKED)
@few
@given(batch=BATCHES)
def test_padding_has_no_say(name, batch):
    assert_padding_has_no_say(MASKED[name], batch)


@pytest.mark.parametrize("name", [name for name in MASKED if name != "second moment"])
@few
@given(batch=BATCHES, seed=SEEDS)
def test_a_row_does_not_see_the_others(name, batch, seed):
    assert_rows_are_apart(MASKED[name], batch, seed)


@few
@given(batch=BATCHES, seed=SEEDS)
def test_the_second_moment_does_not_see_the_order_of_rows(batch, seed):
    assert_rows_may_be_shuffled(MASKED["second moment"], batch, seed)


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match="level='row'"):
        importance_weights(LOG_RATIO, MASK, level="row")
    with pytest.raises(ValueError, match="mode='drop'"):
        importance_weights(LOG_RATIO, MASK, level="token", mode="drop")
    with pytest.raises(ValueError, match="kind='abs'"):
        rejection_mask(LOG_RATIO, MASK, kind="abs", level="token", high=1.0)
    with pytest.raises(ValueError, match="level='row'"):
        rejection_mask(LOG_RATIO, MASK, kind="k1", level="row", high=1.0)
    for kind in ("k2", "k3"):
        with pytest.raises(ValueError, match=r"low=0\.5: .* only high bounds"):
            rejection_mask(LOG_RATIO, MASK, kind=kind, level="token", low=0.5)
