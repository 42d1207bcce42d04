"""Scores by token: turns, tokens and spans that a reward names."""

from typing import Any

import numpy as np
import pytest

from streamrl.errors import RewardError
from streamrl.messages import Prompt
from streamrl.rewards.interface.completion import Completion
from streamrl.rewards.interface.reward import Reward
from streamrl.rewards.reward_scorer import measure_pieces
from streamrl.rewards.reward_set import COSTS, REWARDS, RewardComponent, RewardSet
from streamrl.rewards.token_scores import check_places, place_group_scores, place_score
from streamrl.user_code.reward_result import RewardOutcome, RewardResult
from tests.bpe_tokenizer import make_byte_tokenizer

# Two turns, of two and of three tokens; the last token adds no text.
COMPLETION = Completion(
    ("ab", "cde"), "ab?cde", turn_ids=(np.array([1, 2], np.int32), np.array([3, 4, 0], np.int32))
)
CHARACTERS = {1: 1, 2: 1, 3: 2, 4: 1, 0: 0}


def measure(ids: np.ndarray) -> list[int]:
    return [CHARACTERS[int(token)] for token in ids]


def make_result(score: float, **places: Any) -> RewardResult:
    return RewardResult(score, RewardOutcome.PASS, **places)


@pytest.mark.parametrize(
    ("places", "part", "expected"),
    [
        ({}, "last_turn", [0, 0, 0, 0, 3]),
        ({"turn_scores": (1.0, 2.0)}, "last_turn", [0, 1, 0, 0, 2]),
        ({"turn_scores": (1.0, 0.5)}, "sampled", [0, 1, 0, 0, 2]),
        ({"token_scores": (1.0, 2.0, 0.0)}, "last_turn", [0, 0, 1, 2, 0]),
        ({"token_scores": (1.0, 0.0, 0.0, 0.0, 0.0)}, "conversation", [1, 0, 0, 0, 2]),
        # "c" and "cd" end within the first token of the turn, "e" with the second.
        (
            {"span_scores": ((0, 1, 1.0), (0, 2, 0.5), (2, 3, 1.5))},
            "last_turn",
            [0, 0, 1.5, 1.5, 0],
        ),
        # "b" and "cd" of "ab\ncde".
        ({"span_scores": ((1, 2, 1.0), (3, 5, 2.0))}, "sampled", [0, 1, 2, 0, 0]),
    ],
)
def test_a_score_falls_where_the_reward_says(places, part, expected):
    placed = place_score(make_result(3.0, **places), COMPLETION, part, measure)
    np.testing.assert_allclose(placed, expected)


@pytest.mark.parametrize(
    ("places", "part", "message"),
    [
        ({"turn_scores": (1.0,)}, "sampled", "has scores of 1 turns, there are 2"),
        ({"token_scores": (1.0,)}, "last_turn", "has scores of 1 tokens, there are 3"),
        ({"span_scores": ((2, 4, 1.0),)}, "last_turn", "characters 2 to 4, the text has 3"),
        ({"span_scores": ((1, 1, 1.0),)}, "last_turn", "characters 1 to 1, the text has 3"),
        ({"span_scores": ((0, 1, 1.0),)}, "conversation", "set of=sampled, not of=conversation"),
        ({"turn_scores": (2e38, -2e38)}, "sampled", "overflow a float32"),
    ],
)
def test_parts_that_do_not_fit_a_completion_are_refused(places, part, message):
    with pytest.raises(RewardError, match=message):
        check_places(make_result(1.0, **places), COMPLETION, part)


def test_placed_scores_are_weighed_and_mixed_as_scores_are():
    steps = [make_result(1.0, turn_scores=(1.0, 0.0))] * 2
    results = {"steps": steps, "whole": [make_result(4.0), RewardResult.make_not_judged()]}
    weights = {"steps": (2.0, "sampled"), "whole": (0.5, "last_turn")}
    passes = np.array([True, True])
    placed = place_group_scores(results, weights, passes, [COMPLETION] * 2, measure)
    np.testing.assert_allclose(placed, [0, 2, 0, 0, 2, 0, 2, 0, 0, 0])
    gated = place_group_scores(results, weights, ~passes, [COMPLETION] * 2, measure)
    assert not gated.any(), "a completion that fails a gate has score 0"


@pytest.mark.parametrize(
    ("score_spec", "message"),
    [
        (REWARDS, "reward has, .*: completion 0 has scores of 2 turns, there are 1"),
        (COSTS, "cost has, .*: completion 0 has scores of parts; a cost falls on the last token"),
    ],
)
async def test_misplaced_parts_name_the_component_also_of_texts(score_spec, message):
    class TwoTurns(Reward):
        async def score(self, prompt, completions):
            return [make_result(1.0, turn_scores=(1.0, 0.0))]

    component = RewardComponent("has", 1.0, False, TwoTurns())
    rewards = RewardSet([component], score_spec=score_spec)
    with pytest.raises(RewardError, match=message):
        await rewards.judge_texts(Prompt("0:1:0", np.array([0], np.int32)), ["a"])


def test_pieces_are_measured_without_special_tokens():
    tokenizer = make_byte_tokenizer(["<end>"])
    ids = np.array(tokenizer.encode("a ü<end>"), np.int32)
    pieces = measure_pieces(tokenizer, ids)
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    assert sum(pieces) == len(text) == 3 and pieces[-1] == 0
