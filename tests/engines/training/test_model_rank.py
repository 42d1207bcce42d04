"""Columns that the ranks of a model compute for groups."""

import numpy as np
import pytest
from tensordict import TensorDict
from torch import Tensor

from streamrl.dataflow import REF_LOGPROBS
from streamrl.engines.models import activation_checkpointing
from streamrl.engines.training.model_rank import compute_token_columns
from streamrl.messages import GroupInfo, check_column_sizes, columns_to_rollouts, measure_columns
from tests.engines.scoring_models import make_reference
from tests.engines.tiny_groups import make_groups
from tests.engines.tiny_qwen import forward_logprobs, save, tiny_model

COLUMNS = make_groups(num_groups=1, group_size=6)["0:0:0"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save(tiny_model(tied=True, seed=1), tmp_path_factory.mktemp("reference"))


def test_ref_logprobs_equal_a_forward_pass_at_the_sampling_temperature(model_path):
    scorer = make_reference(model_path)
    (found,) = scorer.compute_columns([COLUMNS], REF_LOGPROBS, micro_batch_tokens=64)
    columns = {REF_LOGPROBS: found}
    check_column_sizes(measure_columns(columns), GroupInfo.from_columns(COLUMNS))
    model = tiny_model(tied=True, seed=1)
    expected = [
        forward_logprobs(model, rollout, temperature=0.8)
        for rollout in columns_to_rollouts(COLUMNS)
    ]
    assert np.abs(columns["ref_logprobs"] - np.concatenate(expected)).max() < 2e-5


def test_mlps_compute_in_chunks_of_tokens(model_path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activation_checkpointing, "MLP_CHUNK_TOKENS", 16)
    scorer = make_reference(model_path)
    sizes: list[int] = []
    scorer._backend.module.get_submodule("model.layers.0.mlp.up_proj").register_forward_hook(
        lambda _, __, output: sizes.append(output.flatten(0, -2).shape[0])
    )
    scorer.compute_columns([COLUMNS], REF_LOGPROBS, micro_batch_tokens=1000)
    assert len(sizes) > 1 and max(sizes) == 16


def test_a_rank_with_fewer_micro_batches_computes_dummies_that_change_nothing():
    shapes = list[tuple[int, ...]]()

    def compute(batch: TensorDict) -> Tensor:
        shapes.append(tuple(batch["token_ids"].shape))
        return batch["token_ids"].float()

    (found,) = compute_token_columns(
        [COLUMNS], compute, 1000, agree_on_rounds=lambda rounds: rounds + 2
    )
    assert shapes == [(6, COLUMNS["lengths"].max()), (1, 2), (1, 2)]
    np.testing.assert_array_equal(found, COLUMNS["token_ids"] * COLUMNS["loss_mask"])
