"""Columns of groups become the padded tensors of a micro-batch."""

import numpy as np
import torch

from streamrl.algorithms import AlgorithmConfig
from streamrl.engines.training.collate import build_batch, derive_columns
from streamrl.messages import rollouts_to_columns
from tests.rollouts import make_rollout


def group_of(*rollouts, scores):
    columns = rollouts_to_columns([make_rollout(*tokens, logprob=-0.5) for tokens in rollouts])
    ref_logprobs = 2 * columns["generator_logprobs"]
    return columns | {"scores": np.array(scores, np.float32), "ref_logprobs": ref_logprobs}


def test_a_batch_by_hand():
    groups = {
        "a": group_of(([1, 2], [3, 6]), ([1, 2], [4]), scores=[0.0, 2.0]),
        "b": group_of(([7], [8, 9, 10]), ([7], [8]), scores=[1.0, 1.0]),
    }
    grpo = AlgorithmConfig()
    settings = grpo.to_settings(max_length=8, reward_weights={})
    derived = derive_columns(grpo.spec, settings, groups)
    batch = build_batch(groups, [("b", 0), ("a", 1)], derived=derived)
    assert batch.batch_size == torch.Size([2])
    assert batch["token_ids"].tolist() == [[7, 8, 9, 10], [1, 2, 4, 0]]
    assert batch["attention_mask"].tolist() == [[True] * 4, [True, True, True, False]]
    assert batch["loss_mask"].tolist() == [[False, True, True, True], [False, False, True, False]]
    assert batch["generator_logprobs"].tolist() == [[0, -0.5, -0.5, -0.5], [0, 0, -0.5, 0]]
    assert batch["ref_logprobs"].tolist() == [[0, -1, -1, -1], [0, 0, -1, 0]]
    # Compares the complete group "a", one rollout of which is in the batch.
    torch.testing.assert_close(batch["advantages"], torch.tensor([0.0, 0.5**0.5]))


def test_groups_without_token_scores_get_them_beside_groups_that_have_them():
    spec = AlgorithmConfig(name="reinforce_pp", whiten_advantages=False).spec
    settings = AlgorithmConfig(name="reinforce_pp", whiten_advantages=False).to_settings(
        max_length=8, reward_weights={}
    )
    groups = {
        "a": group_of(([1], [3, 6]), ([1, 2], [4]), scores=[3.0, 2.0]),
        "b": group_of(([7], [8, 9]), scores=[1.0]),
    }
    groups["b"]["token_scores"] = np.array([0, 0.75, 0.25], np.float32)
    derived = derive_columns(spec, settings, groups)
    assert derived["a"]["advantages"].tolist() == [0, 3, 3, 0, 0, 2]
    assert derived["b"]["advantages"].tolist() == [0, 1, 0.25]


def test_a_batch_without_picks_is_a_masked_dummy_rollout():
    batch = build_batch({}, [], derived={})
    assert batch["token_ids"].shape == (1, 2)
    assert not batch["loss_mask"].any()
    assert batch["attention_mask"].all()
    assert batch["ref_logprobs"].tolist() == [[0.0, 0.0]]


def test_wide_columns_have_a_row_per_token_and_no_entry_in_the_padding():
    groups = {"a": group_of(([1], [3]), ([1, 2], [4]), scores=[0.0, 2.0])}
    groups["a"]["sampling_mask"] = np.array([-1, -1, 3, 9, -1, -1, -1, -1, 4, -1], np.int32)
    groups["a"]["routed_experts"] = np.arange(15, dtype=np.uint8)
    picks = [("a", 0), ("a", 1)]
    batch = build_batch(groups, picks, derived={"a": {}})
    assert batch["sampling_mask"].tolist() == [
        [[-1, -1], [3, 9], [-1, -1]],
        [[-1, -1], [-1, -1], [4, -1]],
    ]
    assert batch["routed_experts"][0].tolist() == [[0, 1, 2], [3, 4, 5], [255, 255, 255]]
    dummy = build_batch({}, [], derived={}, token_columns=("token_ids", "routed_experts"))
    assert "routed_experts" not in dummy
