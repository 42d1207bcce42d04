"""Credit by turn: returns, generalized advantages and baselines of groups, by hand."""

from statistics import stdev

import torch

from streamrl.algorithms import AlgorithmConfig
from streamrl.algorithms.math.advantages import (
    TurnSteps,
    anchor_advantages,
    turn_relative_advantages,
)
from streamrl.algorithms.objective import derive_group_columns
from tests.algorithms.steps import make_settings

# Two turns of two tokens with a tool's token between them; one turn of three tokens.
TURN_ENDS = torch.tensor([[0, 3, 3, 0, 6, 6], [0, 4, 4, 4, 0, 0]])
SAMPLED = TURN_ENDS > 0
TOKEN_SCORES = torch.tensor([[0, 1.0, 0, 0, 0, 4], [0, 0, 2, 0, 0, 0]])
COLUMNS = {
    "lengths": torch.tensor([6, 4]),
    "loss_mask": SAMPLED,
    "finish_reason": torch.tensor([0, 0]),
    "scores": TOKEN_SCORES.sum(-1),
    "token_scores": TOKEN_SCORES,
    "turn_ends": TURN_ENDS,
    "turn_states": torch.tensor([[0, 7, 7, 0, 8, 8], [0, 7, 7, 7, 0, 0]]),
    "values": torch.tensor([[9, 0.5, 9, 9, 1, 9], [9, 0.25, 9, 9, 9, 9]]),
    "baseline_scores": torch.tensor([0.5, 0.5]),
}


def derive(
    columns: dict[str, torch.Tensor] = COLUMNS, **settings: object
) -> dict[str, torch.Tensor]:
    """Return the derived columns of both rollouts, of one group, without whitening."""
    config = AlgorithmConfig(whiten_advantages=False, **settings)  # type: ignore[arg-type]
    return derive_group_columns(config.spec, make_settings(config), columns, torch.tensor([0, 0]))


def spread(first: float, second: float, only: float) -> torch.Tensor:
    """Return an entry per token of the first rollout's two turns and of the second's turn."""
    return torch.tensor([[0, first, first, 0, second, second], [0, only, only, only, 0, 0]])


def test_turns_are_summed_selected_and_spread():
    turns = TurnSteps(TURN_ENDS)
    assert turns.mask.tolist() == [[True, True], [True, False]]
    assert turns.sum_tokens(TOKEN_SCORES).tolist() == [[1, 4], [2, 0]]
    assert turns.select_first(COLUMNS["values"]).tolist() == [[0.5, 1], [0.25, 0]]
    states = torch.where(SAMPLED, 2**62 + TURN_ENDS, 5)
    assert turns.select_first(states).tolist() == [[2**62 + 3, 2**62 + 6], [2**62 + 4, 0]]
    torch.testing.assert_close(turns.spread(torch.tensor([[1.0, 2], [3, 9]])), spread(1.0, 2, 3))


def test_an_ended_episode_counts_0_in_the_baseline_of_a_turn():
    # Returns by turn: 1 + 4, 4 and 2, 0; means 3.5 and 2.
    derived = derive(name="grpo_turn")
    torch.testing.assert_close(derived["advantages"], spread(1.5, 2, -1.5))
    discounted = derive(name="grpo_turn", gamma=0.5)
    torch.testing.assert_close(discounted["advantages"], spread(0.5, 2, -0.5))


def test_the_deviation_of_a_step_has_no_turns_that_no_episode_of_a_group_reaches():
    # Two episodes of one turn with returns 0 and 2; one of three turns, with returns of 4, 1 and 1.
    rewards = torch.tensor([[0.0, 0, 0], [2, 0, 0], [3, 0, 1]])
    mask = torch.tensor([[True, False, False], [True, False, False], [True, True, True]])
    advantages = turn_relative_advantages(
        rewards, mask, torch.tensor([0, 0, 1]), gamma=1.0, scale="batch"
    )
    lead = 1 / stdev([0, 2, 4, 1, 1])
    torch.testing.assert_close(advantages, torch.tensor([[-lead, 0, 0], [lead, 0, 0], [0, 0, 0]]))


def test_turns_in_equal_states_of_a_prompt_are_compared():
    # Scores 5 and 2, mean 3.5. State 7: returns 1 + 0.5 * 4 and 2, mean 2.5. State 8 is alone.
    derived = derive(name="gigpo", gamma=0.5, params={"turn_weight": 2.0})
    expected = spread(1.5 + 2 * 0.5, 1.5, -1.5 - 2 * 0.5)
    torch.testing.assert_close(derived["advantages"], expected)


def test_turns_without_a_state_or_of_other_prompts_are_not_compared():
    rewards, states = torch.tensor([[1.0, 3], [5, 0]]), torch.tensor([[7, 0], [7, 0]])
    apart = anchor_advantages(rewards, states, torch.tensor([0, 1]), gamma=1.0)
    assert not apart.any()
    together = anchor_advantages(rewards, states, torch.tensor([0, 0]), gamma=1.0)
    torch.testing.assert_close(together, torch.tensor([[-0.5, 0], [0.5, 0]]))


def test_without_turns_a_rollout_is_a_turn():
    columns = {name: x for name, x in COLUMNS.items() if name != "turn_ends"}
    derived = derive(columns, name="grpo_turn")
    whole = torch.where(SAMPLED, torch.tensor([[1.5], [-1.5]]), 0.0)
    torch.testing.assert_close(derived["advantages"], whole)


def test_turn_mean_divides_by_the_trained_tokens_of_a_turn():
    derived = derive(name="grpo", loss_aggregation="turn-mean")
    assert derived["turn_tokens"].tolist() == [[0, 2, 2, 0, 2, 2], [0, 3, 3, 3, 0, 0]]


def test_equal_histories_of_states_weigh_more_by_hand():
    # Episodes pass states A, B; A, B; C, B. Returns from the second turn on are 4, 2 and 0.
    rewards = torch.tensor([[0.0, 4.0], [0.0, 2.0], [0.0, 0.0]])
    states, ids = torch.tensor([[1, 2], [1, 2], [3, 2]]), torch.zeros(3)
    hierarchy = anchor_advantages(rewards, states, ids, gamma=1.0, depth_weights=(1.0, 2.0))
    # In state B the mean is 2, after A, B it is 3: (1 * 2 + 2 * 1) / 3 and (1 * 0 + 2 * -1) / 3.
    # The third has no other turn after C, B. Before the first turns there is no state.
    expected = [[1.0, 4 / 3], [-1.0, -2 / 3], [0.0, -2.0]]
    torch.testing.assert_close(hierarchy, torch.tensor(expected))
