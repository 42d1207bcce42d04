"""Excluded rollouts: whatever they hold, nothing that is computed over their group changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.messages import FinishReason
from streamrl.stream.step_metrics import compute_score_metrics
from tests.engines.split_episodes import make_episode, make_groups
from tests.engines.training.test_samples import every_config, make_settings, train

EXCLUDED = {"0:0:0": (1,), "0:1:0": (0, 2), "0:2:0": ()}
"""Episodes that are excluded, by group."""
OF_ALL = ("rollouts", "sampled_sum", "sampled_max", "probability_sum", "truncated_sum")
"""Sums that measure the generation of all rollouts."""


def make_steps(seed):
    """Return a step with excluded episodes, with others in their places, and without them."""
    rng = np.random.default_rng(seed)
    included = {uid: [make_episode(rng) for _ in range(5)] for uid in EXCLUDED}
    for episodes in included.values():
        for i, episode in enumerate(episodes):
            scores = dict(episode.scores)
            scores |= {"finish_reason": FinishReason.STOP.value, "scores": abs(scores["scores"])}
            episodes[i] = replace(episode, scores=scores)

    def exclude(uid, episodes):
        """Put an episode past its time in each place to be excluded."""
        changed = list(episodes)
        for i in EXCLUDED[uid]:
            late = make_episode(rng)
            scores = {**late.scores, "scores": 1e4, "finish_reason": FinishReason.TIMEOUT.value}
            changed[i] = replace(late, scores=scores)
        return changed

    steps = [
        {uid: exclude(uid, episodes) for uid, episodes in included.items()},
        {uid: exclude(uid, episodes) for uid, episodes in included.items()},
        {
            uid: [episode for i, episode in enumerate(episodes) if i not in EXCLUDED[uid]]
            for uid, episodes in included.items()
        },
    ]
    return [make_groups(step, np.random.default_rng(seed), is_split=True) for step in steps]


@every_config
@settings(max_examples=2)
@given(seed=st.integers(0, 9999))
def test_an_excluded_rollout_changes_nothing_and_could_be_absent(config, seed):
    results = []
    for groups in make_steps(seed):
        trained = train(config, groups)
        for name in OF_ALL:
            del trained.sums[name]
        params = AdaptiveParams(config.spec, make_settings(config, groups))
        params.update_after_step(trained.sums)
        numbers = {**trained.sums, **params.values, **compute_score_metrics(trained.sums)}
        results.append((trained, numbers))
    (expected, expected_numbers) = results[-1]
    assert expected.gradients.any()
    for trained, numbers in results[:-1]:
        assert trained.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-6)
        moved = trained.gradients[trained.gradients != 0]
        torch.testing.assert_close(moved, expected.gradients[expected.gradients != 0])
        assert numbers == pytest.approx(expected_numbers, rel=1e-5, abs=1e-5)
