"""Credit by turn in a decision process whose gradient is known exactly.

An episode has up to three turns of two tokens, each with two choices. The first token decides
whether the episode ends with the turn, both decide its reward. All pairs of episodes are
enumerated as groups, so an estimator's expectation is exact as well.
"""

import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.objective import derive_group_columns
from tests.algorithms.steps import make_settings

NUM_TURNS, TOKENS_PER_TURN = 3, 2
WIDTH = NUM_TURNS * TOKENS_PER_TURN
END = 1
REWARDS = torch.randn(NUM_TURNS, 2, 2, generator=torch.Generator().manual_seed(3)).double()
POLICY = torch.randn(NUM_TURNS, 3, 2, generator=torch.Generator().manual_seed(4)).double()
"""Logits by turn, of the first token and of the second after each choice of the first."""

Turn = tuple[int, ...]


@cache
def list_episodes() -> list[tuple[Turn, ...]]:
    """Return all episodes as the choices of their turns."""
    unfinished: list[tuple[Turn, ...]] = [()]
    episodes: list[tuple[Turn, ...]] = []
    while unfinished:
        start = unfinished.pop()
        for turn in itertools.product((0, 1), repeat=TOKENS_PER_TURN):
            episode = (*start, turn)
            ends = turn[0] == END or len(episode) == NUM_TURNS
            (episodes if ends else unfinished).append(episode)
    return episodes


@dataclass
class Process:
    """Episodes [N] with logprobs [N, T] under logits that require gradients, and columns."""

    logits: Tensor
    logprobs: Tensor
    columns: dict[str, Tensor]

    @property
    def probabilities(self) -> Tensor:
        return self.logprobs.sum(-1).exp()

    def differentiate(self, objective: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(objective, self.logits, retain_graph=True)
        return gradient


def make_process(rewards: Tensor = REWARDS) -> Process:
    episodes = list_episodes()
    logits = POLICY.clone().requires_grad_()
    choices = logits.log_softmax(-1)
    logprobs = torch.zeros(len(episodes), WIDTH, dtype=torch.float64)
    scores, values = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    ends = torch.zeros(len(episodes), WIDTH, dtype=torch.long)
    for row, episode in enumerate(episodes):
        for k, (a, b) in enumerate(episode):
            first = TOKENS_PER_TURN * k
            logprobs[row, first], logprobs[row, first + 1] = choices[k, 0, a], choices[k, 1 + a, b]
            scores[row, first + 1] = rewards[k, a, b]
            values[row, first] = expected_return(choices.detach().exp(), rewards, k)
            ends[row, first : first + 2] = first + 2
    columns = {
        "lengths": (ends > 0).sum(-1),
        "loss_mask": ends > 0,
        "finish_reason": torch.zeros(len(episodes), dtype=torch.int8),
        "scores": scores.sum(-1),
        "token_scores": scores,
        "turn_ends": ends,
        "turn_states": ends,  # a turn's only state is its number
        "values": values,
    }
    return Process(logits, logprobs, columns)


def expected_return(probabilities: Tensor, rewards: Tensor, turn: int) -> float:
    """Return the exact value of the state before a turn."""
    if turn == NUM_TURNS:
        return 0.0
    later = expected_return(probabilities, rewards, turn + 1)
    return sum(
        float(probabilities[turn, 0, a] * probabilities[turn, 1 + a, b])
        * (float(rewards[turn, a, b]) + (later if a != END else 0.0))
        for a in (0, 1)
        for b in (0, 1)
    )


def exact_gradient(process: Process) -> Tensor:
    return process.differentiate((process.probabilities * process.columns["scores"]).sum())


def expected_gradient(process: Process, advantages: Tensor, pairs: Tensor) -> Tensor:
    """Return the expectation over pairs [P, 2] of the mean policy gradient of a pair's episodes.

    advantages: [2 P, T], of the episodes of each pair in turn.
    """
    weights = process.probabilities.detach()[pairs].prod(-1)
    terms = (advantages * process.logprobs[pairs.flatten()]).sum(-1).view(-1, 2).mean(-1)
    return process.differentiate((weights * terms).sum())


def list_pairs() -> Tensor:
    count = len(list_episodes())
    return torch.cartesian_prod(torch.arange(count), torch.arange(count))


def estimate(process: Process, **settings: object) -> Tensor:
    """Return the expected gradient with the advantages of an algorithm, without whitening."""
    config = AlgorithmConfig(whiten_advantages=False, gamma=1.0, **settings)  # type: ignore[arg-type]
    pairs = list_pairs()
    columns = {name: column[pairs.flatten()] for name, column in process.columns.items()}
    ids = torch.arange(len(pairs)).repeat_interleave(2)
    derived = derive_group_columns(config.spec, make_settings(config), columns, ids)
    advantages = derived["advantages"]
    per_token = advantages if advantages.ndim > 1 else advantages[:, None].expand(-1, WIDTH)
    return expected_gradient(process, per_token, pairs)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"name": "reinforce_pp", "time_step": "turn"}, 1),
        ({"name": "ppo", "time_step": "turn", "params": {"lam": 1.0}}, 1),
        ({"name": "ppo", "time_step": "turn", "params": {"lam": 0.3}}, 1),
        # Each episode is in its own baseline: 1 - 1 / 2 of the gradient.
        ({"name": "dr_grpo", "group_size": 2}, 1 / 2),
        ({"name": "grpo_turn", "group_size": 2}, 1 / 2),
        ({"name": "rloo", "group_size": 2}, 1),
    ],
)
def test_the_expected_gradient_is_exact(settings, scale):
    process = make_process()
    torch.testing.assert_close(estimate(process, **settings), scale * exact_gradient(process))


def test_gigpo_adds_the_exact_gradient_of_turns_whose_state_the_other_episode_reaches():
    process = make_process()
    exact, by_episode = exact_gradient(process), estimate(process, name="dr_grpo", group_size=2)
    both = estimate(process, name="gigpo", group_size=2, params={"turn_weight": 1.0})
    by_turn = both - by_episode
    # Half of the gradient, as above, with the probability that the other episode gets as far.
    lives_on = POLICY.softmax(-1)[:, 0, 1 - END]
    reaches = torch.cat([torch.ones(1), lives_on.cumprod(0)[:-1]]).double()
    torch.testing.assert_close(by_turn, reaches[:, None, None] * exact / 2)


def test_rewards_normalized_over_the_episodes_that_still_run_are_biased():
    # Each turn has reward 1 whatever the policy does: going on is better, by the turns to come.
    process = make_process(torch.ones(NUM_TURNS, 2, 2).double())
    pairs = list_pairs()
    rewards = process.columns["token_scores"][:, TOKENS_PER_TURN - 1 :: TOKENS_PER_TURN][pairs]
    runs = process.columns["loss_mask"][:, ::TOKENS_PER_TURN][pairs].double()
    means = (rewards * runs).sum(1, keepdim=True) / runs.sum(1, keepdim=True).clamp(min=1)
    to_go = ((rewards - means) * runs).flip(-1).cumsum(-1).flip(-1)
    advantages = to_go.flatten(0, 1).repeat_interleave(TOKENS_PER_TURN, -1)
    of_survivors = expected_gradient(process, advantages, pairs)
    exact = exact_gradient(process)
    assert exact.abs().max() > 0.1 and not of_survivors.any(), "nothing is learned"
    counted = estimate(process, name="grpo_turn", group_size=2)
    torch.testing.assert_close(counted, exact / 2)
