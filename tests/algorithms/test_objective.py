"""Application of rows: derived columns, and the loss of any part of a step."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.algorithms import (
    ALGORITHMS,
    AlgorithmConfig,
    summarize_policy,
)
from streamrl.algorithms.config import LOSS_AGGREGATIONS
from streamrl.algorithms.correction import CorrectionConfig
from streamrl.algorithms.objective import derive_group_columns, policy_loss, shared_value_loss
from streamrl.messages import FinishReason
from tests.algorithms.steps import derive_columns, make_settings, make_step, train

REJECT = CorrectionConfig(proximal="trainer", reject="k1", reject_low=0.6, reject_high=1.8)
EVERYTHING = replace(REJECT, weights="token", weight_high=1.2, off_policy_threshold=0.05)
CONFIGS = [
    *(AlgorithmConfig(name=name) for name in ALGORITHMS),
    *(AlgorithmConfig(loss_aggregation=mode) for mode in LOSS_AGGREGATIONS),
    AlgorithmConfig(kl_coef=0.1, entropy_coef=0.02, mask_truncated=True, overlong_buffer=4),
    AlgorithmConfig(kl_coef=0.1, kl_in="reward", kl_kind="k1", advantage_scale="batch"),
    AlgorithmConfig(name="dapo", kl_coef=0.1, correction=EVERYTHING),
    AlgorithmConfig(kl_coef=0.1, kl_kind="k3*"),
    AlgorithmConfig(name="cispo", correction=CorrectionConfig(reject="k3", reject_high=0.1)),
]


def parametrize_configs(configs: Sequence[AlgorithmConfig]) -> pytest.MarkDecorator:
    ids = [f"{config.name}-{i}" for i, config in enumerate(configs)]
    return pytest.mark.parametrize("config", configs, ids=ids)


every_config = parametrize_configs(CONFIGS)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


@every_config
def test_nan_padding_and_more_padding_have_no_effect(config):
    step = make_step()
    steps = (step, step.with_nan_padding(), step.with_more_padding(3))
    clean, nan_padded, more_padded = (
        train(config, variant, derive_columns(config, variant)) for variant in steps
    )
    close(nan_padded.loss, clean.loss)
    close(nan_padded.gradient, clean.gradient)
    close(nan_padded.sums, clean.sums)
    close(more_padded.loss, clean.loss)
    close(more_padded.gradient[:, :-3], clean.gradient)
    assert clean.gradient.abs().sum() > 0


@every_config
@given(seed=st.integers(0, 50), data=st.data())
def test_micro_batches_and_ranks_add_up_to_the_whole_step(config, seed, data):
    step = make_step(seed)
    derived = derive_columns(config, step)
    full = train(config, step, derived)
    order = data.draw(st.permutations(range(step.num_rows)))
    cuts = sorted(data.draw(st.sets(st.integers(1, step.num_rows - 1), max_size=4)))
    loss, sums = torch.zeros((), dtype=torch.float64), dict.fromkeys(full.sums, 0.0)
    for start, end in zip([0, *cuts], [*cuts, step.num_rows], strict=True):
        rows = order[start:end]
        columns_of_part = {name: values[torch.tensor(rows)] for name, values in derived.items()}
        trained = train(config, step.rows(rows), columns_of_part)
        close(trained.gradient, full.gradient[torch.tensor(rows)])
        loss = loss + trained.loss
        sums = {name: sums[name] + value.item() for name, value in trained.sums.items()}
    close(loss, full.loss)
    expected = {name: value.item() for name, value in full.sums.items()}
    assert sums == pytest.approx(expected, rel=1e-6, abs=1e-6)
    chosen = make_settings(config)
    divisor = chosen.compute_loss_denominator(sums)
    assert divisor == pytest.approx(chosen.compute_loss_denominator(expected))
    assert summarize_policy(sums, divisor) == pytest.approx(
        summarize_policy(expected, divisor), abs=1e-6
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_row_order_has_no_effect(name):
    config, step = AlgorithmConfig(name=name), make_step()
    order = torch.randperm(step.num_rows, generator=torch.Generator().manual_seed(1)).tolist()
    in_order, permuted = (
        train(config, rows, derive_columns(config, rows)) for rows in (step, step.rows(order))
    )
    close(permuted.loss, in_order.loss)
    close(permuted.gradient, in_order.gradient[torch.tensor(order)])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_scope_group_needs_no_other_groups_and_scope_step_does(name):
    # With so few tokens, no covariance reaches the paper's band.
    params = {"covariance_low": 0.01, "covariance_fraction": 0.3} if name == "clip_cov" else {}
    config, step = AlgorithmConfig(name=name, params=params), make_step()
    full = derive_columns(config, step)
    differs = False
    for group in range(3):
        rows = (step.group_ids == group).nonzero()[:, 0].tolist()
        group_only = derive_columns(config, step.rows(rows))
        pairs = [(group_only[key], full[key][torch.tensor(rows)]) for key in full]
        if config.scope == "group":
            for of_group, of_step in pairs:
                close(of_group, of_step)
        differs |= any(not torch.equal(of_group, of_step) for of_group, of_step in pairs)
    # Scope "step" must be necessary: otherwise training could start as groups arrive.
    assert differs or config.scope == "group" or config.spec.reads_score_norms


@pytest.mark.parametrize("name", ALGORITHMS)
def test_uncounted_tokens_have_no_gradient(name):
    config, step = AlgorithmConfig(name=name, kl_coef=0.1, entropy_coef=0.1), make_step()
    derived = derive_columns(config, step)
    derived["loss_mask"] = torch.zeros_like(derived["loss_mask"])
    trained = train(config, step, derived)
    assert trained.loss.item() == 0
    assert trained.gradient.abs().sum() == 0
    sums = {name: value.item() for name, value in trained.sums.items()}
    assert set(sums.values()) == {0.0}
    assert make_settings(config).compute_loss_denominator(sums) == 0
    assert summarize_policy(sums, 0.0) == {}


def compute_first_step_gradient(config):
    """Return the on-policy gradient: the trained policy is the sampling policy."""
    step = make_step()
    step.logprobs = step.columns["generator_logprobs"].clone()
    settled = derive_columns(AlgorithmConfig(name="grpo"), step)
    return train(config, step, derive_columns(config, step) | settled).gradient[..., 0]


@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(name="grpo", dual_clip=3.0, loss_aggregation="token-mean"),
        AlgorithmConfig(name="cispo"),
        AlgorithmConfig(name="gpg"),
        AlgorithmConfig(name="kl_cov", loss_aggregation="token-mean"),
        AlgorithmConfig(name="dppo_tv"),
        AlgorithmConfig(name="dppo_kl"),
        AlgorithmConfig(name="sapo", loss_aggregation="token-mean"),
        AlgorithmConfig(name="vespo"),
        AlgorithmConfig(name="dro", advantage_scale="std"),
        AlgorithmConfig(name="luspo", loss_aggregation="token-mean"),
        AlgorithmConfig(name="gspo", loss_aggregation="token-mean"),
        AlgorithmConfig(name="dapo", correction=CorrectionConfig(proximal="trainer")),
    ],
    ids=lambda config: config.name,
)
def test_the_first_on_policy_step_is_reinforce_for_most_rows(config):
    # -A times the gradient of log pi.
    step = make_step()
    advantages = derive_columns(AlgorithmConfig(name="grpo"), step)["advantages"]
    expected = torch.where(step.columns["loss_mask"], -advantages[:, None], 0.0)
    close(compute_first_step_gradient(AlgorithmConfig(loss_aggregation="token-mean")), expected)
    close(compute_first_step_gradient(config), expected)


def compute_loss(config, **changes):
    """Train two rows with three and one counted tokens; the ratios are 1.5, 1, 0.5 and 1."""
    batch = {
        "logprobs": torch.tensor([[0.0, math.log(1.5), 0.0, math.log(0.5)], [0.0] * 4]),
        "loss_mask": torch.tensor([[False, True, True, True], [False, True, False, False]]),
        "generator_logprobs": torch.zeros(2, 4),
        "ref_logprobs": torch.full((2, 4), -0.5),
        "advantages": torch.tensor([1.0, -2.0]),
        "group_tokens": torch.tensor([4, 4]),
        **changes,
    }
    policy = {"logprobs": batch.pop("logprobs"), "entropy": torch.full((2, 4), 2.0)}
    loss, sums = policy_loss(config.spec, make_settings(config), batch, **policy)
    return loss.item(), {name: value.item() for name, value in sums.items()}


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_weighted_kl_of_an_older_policys_tokens_has_the_gradient_of_the_kl(kind):
    # Every word once, weighted by its probability under the older policy: an exact expectation.
    older, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    logits = torch.tensor([0.1, -0.4, 0.7], requires_grad=True)
    policy = logits.softmax(-1)
    (policy * (policy / reference).log()).sum().backward()
    config = AlgorithmConfig(name="dapo", kl_coef=1.0, kl_kind=f"{kind}*")
    batch = {
        "loss_mask": torch.ones(1, 1, dtype=torch.bool),
        "advantages": torch.zeros(1),
        "group_tokens": torch.ones(1),
    }
    total = torch.zeros(3)
    for word, probability in enumerate(older):
        leaf = logits.detach().clone().requires_grad_()
        columns = batch | {
            "generator_logprobs": probability.log().view(1, 1),
            "ref_logprobs": reference[word].log().view(1, 1),
        }
        logprobs = leaf.log_softmax(-1)[word].view(1, 1)
        loss, _ = policy_loss(
            config.spec,
            make_settings(config),
            columns,
            logprobs=logprobs,
            entropy=torch.zeros(1, 1),
        )
        loss.backward()
        total += probability * leaf.grad
    torch.testing.assert_close(total, logits.grad)


def test_a_shared_critic_learns_nothing_of_a_rollout_that_is_not_included():
    config = AlgorithmConfig(name="ppo", loss_aggregation="token-mean")
    batch = {
        "loss_mask": torch.ones(2, 2, dtype=torch.bool),
        "included": torch.tensor([True, False]),
        "returns": torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        "values": torch.zeros(2, 2),
        "group_tokens": torch.tensor([4, 4]),
    }
    values = torch.ones(2, 2, requires_grad=True)
    loss, sums = shared_value_loss(make_settings(config), batch, values, clip=None)
    loss.backward()
    assert values.grad is not None and values.grad[0].any() and not values.grad[1].any()
    assert sums["critic_num_tokens"] == 2


def test_metrics_by_hand():
    metrics = summarize_policy(compute_loss(AlgorithmConfig(name="dapo"))[1], 4.0)
    expected = {
        "policy/clip_frac": pytest.approx(0.25),
        "policy/entropy": pytest.approx(2.0),
        "policy/ess": pytest.approx(4.0**2 / (4 * (2.25 + 1 + 0.25 + 1))),
        "correction/weight_mean": 1.0,
        "correction/rejected_frac": 0.0,
        "loss/policy": pytest.approx(-0.78 / 4),
        "loss/entropy": 0.0,
    }
    assert metrics.items() >= expected.items()
    assert summarize_policy({}, 4.0) == {}


@pytest.mark.parametrize(
    ("low", "loss", "divisor", "rejected"),
    [(0.8, -1 + 2.0, 4, 0.5), (7.0, 0.0, 0, 1.0)],  # the ratios 1.5 and 0.5 are out, or all
)
def test_rejected_tokens_count_in_the_denominator_unless_all_are(low, loss, divisor, rejected):
    correction = CorrectionConfig(reject="k1", reject_low=low, reject_high=low + 0.45)
    config = AlgorithmConfig(name="dapo", correction=correction)
    found, sums = compute_loss(config)
    assert found == pytest.approx(loss)
    assert make_settings(config).compute_loss_denominator(sums) == divisor
    assert summarize_policy(sums, divisor)["correction/rejected_frac"] == rejected


def test_mask_truncated_keeps_the_score_in_the_group():
    step = make_step(sizes=(3,))
    plain = derive_columns(AlgorithmConfig(), step)
    masked = derive_columns(AlgorithmConfig(mask_truncated=True), step)
    cut_off = step.columns["finish_reason"] == 1
    assert cut_off.any()
    assert not cut_off.all()
    close(masked["advantages"], plain["advantages"])
    assert not masked["loss_mask"][cut_off].any()
    assert torch.equal(masked["loss_mask"][~cut_off], plain["loss_mask"][~cut_off])
    assert masked["group_tokens"].tolist() == [int(masked["loss_mask"].sum())] * 3


def test_an_episode_past_its_time_is_masked_apart_from_truncated_ones():
    step = make_step(sizes=(4,))
    reasons = [FinishReason.STOP, FinishReason.TURNS, FinishReason.TOKENS, FinishReason.TIMEOUT]
    codes = torch.tensor([reason.value for reason in reasons], dtype=torch.int8)
    step.columns = {**step.columns, "finish_reason": codes}

    def list_trained(*, mask_truncated, has_episodes):
        settings = replace(
            make_settings(AlgorithmConfig(mask_truncated=mask_truncated)),
            has_episodes=has_episodes,
        )
        spec = AlgorithmConfig().spec
        derived = derive_group_columns(spec, settings, step.columns, step.group_ids)
        return derived["loss_mask"].any(-1).tolist()

    assert list_trained(mask_truncated=False, has_episodes=False) == [True] * 4
    assert list_trained(mask_truncated=False, has_episodes=True) == [True, True, True, False]
    assert list_trained(mask_truncated=True, has_episodes=False) == [True, False, False, True]
    assert list_trained(mask_truncated=True, has_episodes=True) == [True, False, False, False]


def test_a_teachers_reward_has_the_gradient_of_the_reverse_divergence():
    """Expectation over all words of a token, in float64, against the divergence itself."""
    logits = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    student, teacher = logits.log_softmax(-1)
    leaf = logits[0].clone().requires_grad_()
    policy = leaf.log_softmax(-1)
    (policy.exp() * (policy - teacher)).sum().backward()
    score = torch.eye(7, dtype=torch.float64) - student.exp()  # d log pi(word) / d logits
    step = make_step(sizes=(7,))
    words = torch.arange(7)
    first = step.columns["loss_mask"].int().argmax(-1)
    step.columns["generator_logprobs"][words, first] = student
    step.columns["ref_logprobs"][words, first] = teacher
    advantages = derive_columns(AlgorithmConfig(name="distill"), step)["advantages"]
    expected = -(student.exp() * advantages[words, first]) @ score
    close(leaf.grad, expected)
