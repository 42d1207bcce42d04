"""Columns of groups become the padded tensors of a micro-batch."""

import numpy as np
import pytest
import torch

from streamrl.algorithms import AlgorithmConfig
from streamrl.engines.training.collate import build_batch, derive_columns
from streamrl.messages import rollouts_to_columns
from tests.engines.tiny_groups import make_groups
from tests.rollouts import make_rollout

GRPO = AlgorithmConfig()


def derived_from(groups, config=GRPO):
    settings = config.to_settings(max_length=8, reward_weights={})
    return derive_columns(config.spec, settings, groups)


def group_of(*rollouts, scores):
    columns = rollouts_to_columns([make_rollout(*tokens, logprob=-0.5) for tokens in rollouts])
    return columns | {"scores": np.array(scores, np.float32)}


def test_a_batch_by_hand():
    groups = {
        "a": group_of(([1, 2], [3]), ([1, 2], [4, 5]), scores=[0.0, 2.0]),
        "b": group_of(([7], [8, 9, 10]), ([7], [8]), scores=[1.0, 1.0]),
    }
    batch = build_batch(groups, [("b", 0), ("a", 1)], derived=derived_from(groups))
    assert batch.batch_size == torch.Size([2])
    assert batch["token_ids"].tolist() == [[7, 8, 9, 10], [1, 2, 4, 5]]
    assert batch["loss_mask"].tolist() == [[False, True, True, True], [False, False, True, True]]
    assert batch["generator_logprobs"].tolist() == [[0, -0.5, -0.5, -0.5], [0, 0, -0.5, -0.5]]
    torch.testing.assert_close(batch["advantages"], torch.tensor([0.0, 0.5**0.5]))
    assert "ref_logprobs" not in set(batch.keys())


def test_advantages_compare_the_complete_group_for_any_picks():
    groups = make_groups()
    batch = build_batch(groups, [("0:1:0", 2)], derived=derived_from(groups))
    scores = groups["0:1:0"]["scores"].astype(np.float64)
    expected = (scores[2] - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    assert batch["advantages"].item() == pytest.approx(expected)


def test_every_token_column_is_collated_unchanged():
    groups = make_groups()
    picks = [(uid, index) for uid, columns in groups.items() for index in range(4)]
    batch = build_batch(groups, picks, derived=derived_from(groups))
    for name in ("token_ids", "loss_mask", "generator_logprobs", "ref_logprobs"):
        unpadded = batch[name][batch["attention_mask"]].numpy()
        assert (unpadded == np.concatenate([c[name] for c in groups.values()])).all()


def test_a_batch_without_picks_is_a_masked_dummy_rollout():
    batch = build_batch({}, [], derived={})
    assert batch["token_ids"].shape == (1, 2)
    assert not batch["loss_mask"].any()
    assert batch["attention_mask"].all()
    assert batch["ref_logprobs"].tolist() == [[0.0, 0.0]]
