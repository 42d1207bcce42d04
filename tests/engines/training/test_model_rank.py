"""Columns that the ranks of a model compute for groups."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from streamrl.algorithms import AlgorithmConfig
from streamrl.dataflow import REF_LOGPROBS, TOP_COLUMNS
from streamrl.engines.models import activation_checkpointing
from streamrl.engines.models.chunked_head import TopWords
from streamrl.engines.training import model_rank
from streamrl.engines.training.collate import build_batch, derive_columns
from streamrl.engines.training.tasks import PolicyTask
from streamrl.messages import GroupInfo, check_column_sizes, columns_to_rollouts, measure_columns
from streamrl.weights.parameters import LORA_A_SUFFIX, LORA_B_SUFFIX, LORA_SCALE
from tests import forked
from tests.engines.scoring_models import make_reference, make_shadow_critic
from tests.engines.scoring_ranks import HELD, WORLD, score_rank
from tests.engines.tiny_groups import make_groups
from tests.engines.tiny_qwen import forward_logprobs, save, tiny_model
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.usefixtures("process_group_of_models")

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


def test_a_reference_finds_the_likeliest_words_of_each_sampled_token(model_path):
    scorer = make_reference(model_path, top_words=TopWords(3, vocab_size=40))
    names = (REF_LOGPROBS, *TOP_COLUMNS)
    (found,) = scorer.score_groups([COLUMNS], names, micro_batch_tokens=64)
    check_column_sizes(measure_columns(found), GroupInfo.from_columns(COLUMNS))
    (alone,) = scorer.compute_columns([COLUMNS], REF_LOGPROBS, micro_batch_tokens=64)
    np.testing.assert_array_equal(found[REF_LOGPROBS], alone)
    model, mask = tiny_model(tied=True, seed=1), COLUMNS["loss_mask"]
    ids, logprobs = [], []
    for rollout in columns_to_rollouts(COLUMNS):
        tokens = torch.from_numpy(rollout.token_ids).long()[None]
        full = (model(tokens).logits[0] / 0.8).log_softmax(-1).roll(1, 0)
        top = full[:, :40].topk(3)
        ids.append(top.indices)
        logprobs.append(top.values.detach())
    expected = torch.cat(ids).numpy() * mask[:, None], torch.cat(logprobs).numpy() * mask[:, None]
    np.testing.assert_array_equal(found["ref_top_ids"].reshape(-1, 3), expected[0])
    np.testing.assert_allclose(found["ref_top_logprobs"].reshape(-1, 3), expected[1], atol=2e-5)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_student_gets_the_gradient_of_the_divergence_from_its_teacher(model_path, beta: float):
    student, teacher = tiny_model(tied=True, seed=2), tiny_model(tied=True, seed=1)
    words = student.config.vocab_size
    config = AlgorithmConfig(name="gkd", params={"beta": beta, "top_k": words})
    settings = config.to_settings(max_length=8, reward_weights={})
    scorer = make_reference(model_path, top_words=TopWords(words, vocab_size=words))
    names = (REF_LOGPROBS, *TOP_COLUMNS)
    (scored,) = scorer.score_groups([COLUMNS], names, micro_batch_tokens=64)
    group = {**COLUMNS, **scored}
    task = PolicyTask(model_path, config.spec, settings, 0.8)
    derived = derive_columns(config.spec, settings, {"a": group})
    weight, losses = student.model.layers[0].mlp.up_proj.weight, []
    for index in range(len(COLUMNS["lengths"])):
        batch = build_batch(
            {"a": group}, [("a", index)], derived=derived, token_columns=task.token_columns
        )
        losses.append(task.compute_loss(student, batch, version=0)[0])
    total = torch.stack(losses).sum()
    (found,) = torch.autograd.grad(total, weight)
    expected = torch.zeros(())
    for rollout in columns_to_rollouts(COLUMNS):
        ids = torch.from_numpy(rollout.token_ids).long()[None]
        q, p = ((model(ids).logits[0] / 0.8).log_softmax(-1) for model in (student, teacher))
        first, second = (q, p) if beta else (p.detach(), q)
        divergence = (first.exp() * (first - second)).sum(-1)[:-1]
        expected = expected + divergence[torch.from_numpy(rollout.loss_mask[1:])].sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-4)
    (gradient,) = torch.autograd.grad(expected, weight)
    torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-3)


def test_mlps_compute_in_chunks_of_tokens(model_path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activation_checkpointing, "MLP_CHUNK_TOKENS", 16)
    scorer = make_reference(model_path)
    sizes: list[int] = []
    scorer._backend.module.get_submodule("model.layers.0.mlp.up_proj").register_forward_hook(
        lambda _, __, output: sizes.append(output.flatten(0, -2).shape[0])
    )
    scorer.compute_columns([COLUMNS], REF_LOGPROBS, micro_batch_tokens=1000)
    assert len(sizes) > 1 and max(sizes) == 16


def test_a_rank_with_fewer_micro_batches_computes_dummies_that_change_nothing(
    model_path: str, monkeypatch: pytest.MonkeyPatch
):
    scorer, calls = make_reference(model_path), list[int]()
    scorer._backend.module.register_forward_hook(lambda *_: calls.append(1))
    (expected,) = scorer.compute_columns([COLUMNS], REF_LOGPROBS, micro_batch_tokens=1000)
    monkeypatch.setattr(scorer, "_find_most_rounds", lambda rounds: rounds + 2)
    (found,) = scorer.compute_columns([COLUMNS], REF_LOGPROBS, micro_batch_tokens=1000)
    assert len(calls) == 1 + 3
    np.testing.assert_array_equal(found, expected)


def test_groups_share_forward_passes_on_gpus_only(model_path: str, monkeypatch: pytest.MonkeyPatch):
    scorer, calls = make_reference(model_path), list[int]()
    scorer._backend.module.register_forward_hook(lambda *_: calls.append(1))
    groups = [COLUMNS] * 3
    expected = scorer.compute_columns(groups, REF_LOGPROBS, micro_batch_tokens=1000)
    assert len(calls) == len(groups)
    monkeypatch.setattr(model_rank, "has_run_gpus", lambda: True)
    found = scorer.compute_columns(groups, REF_LOGPROBS, micro_batch_tokens=1000)
    assert len(calls) == len(groups) + 1
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel": 2},
        {"sequence_parallel": 2},
        {},
    ],
    ids=["tensor parallel", "sequence parallel", "FSDP2"],
)
@pytest.mark.xdist_group("ranks")
def test_two_ranks_score_as_a_whole_model_and_follow_a_critic_with_adapters(
    layout: dict[str, int], tmp_path: Path
):
    path = save(tiny_model(tied=True, seed=1, kv_heads=2), tmp_path)
    groups, published = list(make_groups().values()), make_adapters()
    critic = make_shadow_critic(path)
    critic.copy_weights(critic.build_full(published))
    reference = make_reference(path, top_words=TopWords(3, vocab_size=40))
    top = reference.score_groups(groups, (REF_LOGPROBS, *TOP_COLUMNS), micro_batch_tokens=64)
    ref_logprobs = [columns[REF_LOGPROBS] for columns in top]
    values = critic.compute_columns(groups, "values", micro_batch_tokens=64)
    assert np.abs(np.concatenate(values)).max() > 0.1
    ports = find_free_ports(2)
    calls = [(rank, ports, path, layout, groups, published) for rank in range(WORLD)]
    ranks = forked.run(score_rank, calls, timeout_s=150)
    assert [len(rank.values) for rank in ranks] == [3, 3 if layout else 0]
    for rank in ranks:
        (whole,) = rank.whole_logprobs
        np.testing.assert_allclose(whole, ref_logprobs[0], atol=2e-5)
    for rank in ranks if layout else ranks[:1]:
        np.testing.assert_allclose(
            np.concatenate(rank.ref_logprobs), np.concatenate(ref_logprobs), atol=2e-5
        )
        np.testing.assert_allclose(np.concatenate(rank.values), np.concatenate(values), atol=2e-5)
        for found, expected in zip(rank.top, top, strict=True):
            for name, column in found.items():
                np.testing.assert_allclose(column, expected[name], atol=2e-5)
    # Ranks that compute the same groups go on with those that both hold, in one order.
    assert [rank.common for rank in ranks] == ([["a", "c"]] * 2 if layout else list(HELD))


def make_adapters() -> dict[str, Tensor]:
    """Make a version of a critic that trains adapters of two layers and its head."""
    seeds = torch.Generator().manual_seed(0)
    tensors = {LORA_SCALE: torch.tensor(0.5)}
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        size = 64 if "q_proj" in layer else 128
        tensors[layer + LORA_A_SUFFIX] = 0.1 * torch.randn(2, size, generator=seeds)
        tensors[layer + LORA_B_SUFFIX] = 0.1 * torch.randn(64, 2, generator=seeds)
    tensors["score.weight"] = torch.randn(1, 64, generator=seeds)
    return {**tensors, "score.bias": torch.tensor([0.25])}
