"""The rows, what a config may ask of them, and the loss they put together."""

import dataclasses
import math

import pytest
import torch
from omegaconf import OmegaConf

from streamrl.algorithms import (
    ALGORITHMS,
    AlgorithmConfig,
    columns_needed,
    policy_loss,
    summarise,
)
from streamrl.dataflow import dataflow_for
from streamrl.errors import ConfigError
from streamrl.messages import ROLLOUT_COLUMNS


def batch_of(**changes):
    """Two rows, three and one tokens that count; the ratios are 1.5, 1, 0.5 and 1."""
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    batch = {
        "loss_mask": mask,
        "generator_logprobs": torch.zeros(2, 4),
        "ref_logprobs": torch.full((2, 4), -0.5),
        "advantages": torch.tensor([1.0, -2.0]),
    }
    logprobs = torch.tensor([[0.0, math.log(1.5), 0.0, math.log(0.5)], [0.0, 0.0, 0.0, 0.0]])
    return batch | changes, logprobs


def loss_of(config, batch, logprobs, entropy=None):
    entropy = torch.full_like(logprobs, 2.0) if entropy is None else entropy
    return policy_loss(config.row, config.settings, batch, logprobs=logprobs, entropy=entropy)


def test_the_grpo_loss_by_hand():
    # Row 0: -1.2 (clipped), -1, -0.5 over 3 tokens; row 1: 2 over 1 token.
    loss, sums = loss_of(AlgorithmConfig(), *batch_of())
    assert loss.item() == pytest.approx(-2.7 / 3 + 2.0)
    assert sums["clipped_sum"].item() == 1
    assert sums["num_tokens"].item() == 4
    assert sums["num_rollouts"].item() == 2


def test_the_dapo_loss_by_hand():
    loss, _ = loss_of(AlgorithmConfig(name="dapo"), *batch_of())
    assert loss.item() == pytest.approx(-1.28 - 1 - 0.5 + 2.0)


def test_divergence_and_entropy_join_under_the_same_aggregation():
    config = AlgorithmConfig(name="dapo", kl_coef=0.1, kl_kind="k1", entropy_coef=0.01)
    batch, logprobs = batch_of()
    loss, sums = loss_of(config, batch, logprobs)
    kl = 4 * 0.5 + math.log(1.5) + math.log(0.5)
    assert loss.item() == pytest.approx(-0.78 + 0.1 * kl - 0.01 * 4 * 2.0)
    assert sums["kl_ref_sum"].item() == pytest.approx(kl)
    metrics = summarise({name: value.item() for name, value in sums.items()}, 4.0)
    assert metrics["loss/policy"] + metrics["loss/kl"] + metrics["loss/entropy"] == pytest.approx(
        loss.item() / 4
    )


def test_metrics_by_hand():
    _, sums = loss_of(AlgorithmConfig(name="dapo"), *batch_of())
    metrics = summarise({name: value.item() for name, value in sums.items()}, 4.0)
    assert metrics == {
        "policy/clip_frac": pytest.approx(0.25),
        "policy/ratio_mean": pytest.approx(1.0),
        "policy/entropy": pytest.approx(2.0),
        "policy/ess": pytest.approx(4.0**2 / (4 * (2.25 + 1 + 0.25 + 1))),
        "loss/policy": pytest.approx(-0.78 / 4),
        "loss/entropy": 0.0,
    }
    assert summarise({}, 4.0) == {}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nan_in_the_padding_changes_nothing(name):
    config = AlgorithmConfig(name=name, kl_coef=0.1, entropy_coef=0.1)
    batch, logprobs = batch_of()
    mask = batch["loss_mask"]

    def spoilt(values):
        return torch.where(mask, values, math.nan)

    results = []
    for change in (lambda values: values, spoilt):
        leaf = logprobs.clone().requires_grad_()
        changed = batch | {
            key: change(batch[key]) for key in ("generator_logprobs", "ref_logprobs")
        }
        loss, _ = loss_of(config, changed, change(leaf), change(torch.full((2, 4), 2.0)))
        loss.backward()
        results.append((loss.item(), torch.where(mask, leaf.grad, 0.0).tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_order_of_rows_changes_nothing(name):
    config = AlgorithmConfig(name=name, kl_coef=0.1)
    batch, logprobs = batch_of()
    turned = {key: value.flip(0) for key, value in batch.items()}
    loss, sums = loss_of(config, batch, logprobs)
    loss_turned, sums_turned = loss_of(config, turned, logprobs.flip(0))
    torch.testing.assert_close(loss, loss_turned)
    torch.testing.assert_close(sums, sums_turned)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_without_tokens_that_count_adds_nothing(name):
    config = AlgorithmConfig(name=name, kl_coef=0.1, entropy_coef=0.1)
    batch, logprobs = batch_of(loss_mask=torch.zeros(2, 4, dtype=torch.bool))
    leaf = logprobs.clone().requires_grad_()
    loss, sums = loss_of(config, batch, leaf)
    loss.backward()
    assert loss.item() == 0
    assert leaf.grad.abs().sum() == 0
    assert all(value.item() == 0 for value in sums.values())


def test_rows_fill_what_the_config_leaves_open_and_no_more():
    grpo, dapo = AlgorithmConfig().settings, AlgorithmConfig(name="dapo").settings
    assert (grpo.clip_low, grpo.clip_high) == (0.2, 0.2)
    assert grpo.loss_aggregation == "seq-mean-token-mean"
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)
    assert (dapo.loss_aggregation, dapo.kl_coef, dapo.dual_clip) == ("token-mean", 0.0, None)
    assert AlgorithmConfig(name="dapo", clip_high=0.5, dual_clip=3.0).settings == (
        dataclasses.replace(dapo, clip_high=0.5, dual_clip=3.0)
    )


def test_columns_feed_the_dataflow():
    plain = columns_needed(AlgorithmConfig())
    assert plain == (*ROLLOUT_COLUMNS, "scores")
    assert dataflow_for(plain).stages == ["generate", "reward", "train"]
    with_reference = columns_needed(AlgorithmConfig(kl_coef=0.01))
    assert with_reference == (*ROLLOUT_COLUMNS, "scores", "ref_logprobs")
    assert "reference" in dataflow_for(with_reference).stages


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "drpo"}, "algorithm.name=drpo: no such algorithm; did you mean grpo?"),
        (
            {"group_size": 1},
            "algorithm.group_size=1: grpo compares the rollouts of a group; needs at least 2",
        ),
        ({"clip_low": 0.0}, "algorithm.clip_low=0.0: must be above 0"),
        ({"dual_clip": 1.0}, "algorithm.dual_clip=1.0: must be above 1"),
        ({"advantage_eps": 0.0}, "algorithm.advantage_eps=0.0: must be above 0"),
        ({"kl_coef": -1.0}, "algorithm.kl_coef=-1.0: must be at least 0"),
        (
            {"kl_kind": "k4"},
            "algorithm.kl_kind=k4: must be one of k1, k2, k3, abs, k1+, k3+, abs+",
        ),
        ({"advantage_scale": "max"}, "algorithm.advantage_scale=max: must be one of std, none"),
    ],
)
def test_an_impossible_config_is_refused(settings, message):
    with pytest.raises(ConfigError) as refusal:
        AlgorithmConfig(**settings)
    assert str(refusal.value) == message


def test_the_config_is_one_omegaconf_can_read():
    merged = OmegaConf.merge(
        OmegaConf.structured(AlgorithmConfig), {"name": "dapo", "clip_low": 0.1}
    )
    assert OmegaConf.to_object(merged) == AlgorithmConfig(name="dapo", clip_low=0.1)
