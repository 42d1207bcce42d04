"""Episodes of several samples: they train as if each were one rollout."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.correction import CorrectionConfig
from streamrl.buffer.micro_batch_schedule import MicroBatchPacker
from streamrl.engines.models.forward import TokenScores
from streamrl.engines.training.collate import build_batch, derive_columns
from streamrl.engines.training.rollout_sums import sum_rollouts
from streamrl.engines.training.tasks import PolicyTask, SampleJoiner, TwoHeadedTask
from streamrl.messages import FinishReason, count_samples
from tests.algorithms import test_objective
from tests.engines.split_episodes import MAX_SAMPLED, WEIGHTS, make_episode, make_groups

SEQUENCE_WEIGHTS = CorrectionConfig(
    proximal="interpolated",
    weights="geometric",
    reject="k1",
    reject_level="mean",
    reject_low=0.8,
    reject_high=1.3,
    off_policy_threshold=0.1,
)
CONFIGS = [
    *test_objective.CONFIGS,
    AlgorithmConfig(name="ppo", gamma=0.9, kl_coef=0.1),
    AlgorithmConfig(name="gspo", single_rollout="keep", correction=SEQUENCE_WEIGHTS),
    AlgorithmConfig(name="clip_cov", params={"covariance_low": 0.01, "covariance_fraction": 0.3}),
]
every_config = test_objective.parametrize_configs(CONFIGS)
BUDGET = 160


def make_pair(seed, sizes=(4, 3, 2)):
    """Return the groups of a step, whose episodes are one rollout each, and several samples."""
    rng = np.random.default_rng(seed)
    episodes = {f"0:{i}:0": [make_episode(rng) for _ in range(n)] for i, n in enumerate(sizes)}
    return [make_groups(episodes, rng, is_split=is_split) for is_split in (False, True)]


def make_settings(config, groups):
    is_split = any("episode" in columns for columns in groups.values())
    return config.to_settings(
        max_length=MAX_SAMPLED, reward_weights=WEIGHTS, has_episodes=True, splits_episodes=is_split
    )


@dataclass
class Trained:
    """Loss, gradient at each sampled token and sums of a training step, divided as an update is."""

    loss: float
    gradients: torch.Tensor
    sums: dict[str, float]


def build_scored_batch(groups, picks, derived):
    """Return a micro-batch with the columns of the trained policy's given scores."""
    scored = {uid: {n: groups[uid][n] for n in ("logprobs", "entropy")} for uid, _ in picks}
    for uid, columns in scored.items():
        columns["word_logprobs"] = groups[uid]["logprobs"][:, None] - [2, 3]
        columns["ref_top_logprobs"] = groups[uid]["ref_logprobs"][:, None] - [1, 2]
    derived = {uid: {**derived[uid], **columns} for uid, columns in scored.items()}
    return build_batch(groups, picks, derived=derived)


def train(config, groups, *, dp_size=1):
    """Train a step in the micro-batches of `dp_size` ranks, on given logprobs."""
    chosen = make_settings(config, groups)
    task = PolicyTask("", config.spec, chosen, temperature=1.0)
    derived = derive_columns(config.spec, chosen, groups)
    packer = MicroBatchPacker(dp_size=dp_size, micro_batch_tokens=BUDGET)
    for uid, columns in groups.items():
        packer.add_group(uid, columns["lengths"].tolist(), count_samples(columns).tolist())
    loss, sums = 0.0, dict[str, float]()
    gradients = dict[tuple[str, int], torch.Tensor]()
    for picks in (picks for work in packer.take_rounds(final=True) for picks in work if picks):
        batch = build_scored_batch(groups, picks, derived).to_dict()
        leaf = batch.pop("logprobs").requires_grad_()
        # Words of a token move with it, so that its gradient has theirs.
        words = batch.pop("word_logprobs") + (leaf - leaf.detach())[..., None]
        scores = TokenScores(leaf, batch.pop("entropy"), words)
        part, part_sums = task.compute_loss_from_scores(scores, batch, version=1)
        part.backward()
        loss += part.item()
        values = {name: float(value) for name, value in part_sums.items()}
        for name, value in (values | sum_rollouts(groups, picks, derived)).items():
            sums[name] = sums.get(name, 0.0) + value
        lengths = batch["attention_mask"].sum(-1).tolist()
        gradients |= {pick: row[:n] for pick, row, n in zip(picks, leaf.grad, lengths, strict=True)}
    # Every episode may have ended in a way that masks it.
    divisor = task.compute_loss_denominator(sums) or 1.0
    ordered = torch.cat([gradients[pick] for pick in sorted(gradients)])
    mask = np.concatenate([columns["loss_mask"] for columns in groups.values()])
    return Trained(loss / divisor, ordered[torch.from_numpy(mask)] / divisor, sums)


@every_config
@settings(max_examples=3)
@given(seed=st.integers(0, 9999), dp_size=st.integers(1, 3))
def test_an_episode_in_one_or_in_several_samples_gives_the_same_update(config, seed, dp_size):
    whole, split = make_pair(seed)
    expected, trained = train(config, whole), train(config, split, dp_size=dp_size)
    assert trained.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(trained.gradients, expected.gradients, rtol=1e-5, atol=1e-6)
    for result in (trained, expected):
        del result.sums["sampled_max"]  # no sum, and the micro-batches differ
    assert trained.sums == pytest.approx(expected.sums, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["ppo", "safe_rlhf"])
@settings(max_examples=3)
@given(seed=st.integers(0, 9999))
def test_a_critic_learns_the_same_returns(name, seed):
    config, returns = AlgorithmConfig(name=name, gamma=0.9), []
    for groups in make_pair(seed):
        derived = derive_columns(config.spec, make_settings(config, groups), groups)
        masks = {uid: columns["loss_mask"] for uid, columns in groups.items()}
        returns.append(np.concatenate([derived[uid]["returns"][masks[uid]] for uid in groups]))
    np.testing.assert_allclose(returns[1], returns[0], rtol=1e-5, atol=1e-6)


class GivenScores(TwoHeadedTask):
    """Task that scores a batch with its columns in place of a model."""

    def _score_both_heads(self, forward, batch):
        return TokenScores(batch["logprobs"], batch["entropy"]), batch["trained_values"]


@settings(max_examples=3)
@given(seed=st.integers(0, 9999))
def test_a_shared_critic_weighs_episodes_as_the_policy_does(seed):
    config = AlgorithmConfig(name="ppo", loss_aggregation="seq-mean-token-mean")
    losses = []
    for groups in make_pair(seed):
        chosen = make_settings(config, groups)
        task = GivenScores("", config.spec, chosen, temperature=1.0, value_clip=0.2)
        picks = [
            (uid, i) for uid, columns in groups.items() for i in range(len(columns["lengths"]))
        ]
        derived = derive_columns(config.spec, chosen, groups)
        batch = build_scored_batch(groups, picks, derived)
        batch["trained_values"] = batch["logprobs"]
        loss, sums = task.compute_loss(lambda: None, batch, version=0)
        divisor = task.compute_loss_denominator({name: float(x) for name, x in sums.items()}) or 1.0
        losses.append(float(loss) / divisor)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_group_of_equal_scores_counts_once_however_it_is_split():
    groups, _ = make_pair(5, sizes=(3, 2, 2))
    for columns, scores in zip(groups.values(), ([0.5, 0.5, 0.5], [0, 1], [1, 1]), strict=True):
        columns["scores"] = np.array(scores, np.float32)
        columns["finish_reason"][:] = FinishReason.STOP.value
    config = AlgorithmConfig()
    derived = derive_columns(config.spec, make_settings(config, groups), groups)
    parts = [
        sum_rollouts(groups, [(uid, i)], derived)
        for uid, c in groups.items()
        for i in range(len(c["scores"]))
    ]
    assert sum(part["groups"] for part in parts) == 3
    assert sum(part["equal_score_groups"] for part in parts) == 2


def test_wide_columns_keep_their_entries_when_samples_are_joined():
    join = SampleJoiner(torch.tensor([0, 0, 1]))
    column = torch.arange(12.0).reshape(3, 2, 2)
    expected = [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [0, 0], [0, 0]]]
    assert join(column).tolist() == expected
