"""The guessing game: its answers and rewards, and its demonstrations."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.guess import training
from examples.guess.guess import MAX_GUESSES, NUMBERS, Guess
from examples.guess.problems import make_rows
from streamrl.config.run_config import load_config
from streamrl.environments.hosts.environment_host import load_user_class
from streamrl.environments.interface import Reply
from streamrl.messages import Prompt
from tests.examples.turns import check_demonstrations

RECIPE = "configs/grpo_guess.yaml"
ROW = Prompt("0:0:0", np.array([1], np.int32))


def start_game(number: int) -> Guess:
    game = Guess()
    game.reset(ROW, seed=0)
    game.number = number
    return game


def play_game(game: Guess, *guesses: str) -> tuple[list[str], list[float]]:
    """Return answers and rewards of the turns."""
    turns = [game.step(Reply(guess)) for guess in guesses]
    return [str(turn.observation) for turn in turns], [turn.reward for turn in turns]


def test_answers_name_the_side_of_the_number_and_the_interval_that_is_left():
    answers, rewards = play_game(start_game(40), "31", "47", "39", "40")
    assert answers == [">32-63", "<32-46", ">40-46", "="]
    evenness = [2 * 31 / 64, 2 * 15 / 32, 2 * 7 / 15]
    assert rewards == pytest.approx([*(x / 6 for x in evenness), 1 + 3 / 6])


@pytest.mark.parametrize("text", ["", "7", "007", "-1", "3x", " 31", "\u0663\u0661", "31\n"])
def test_other_text_costs_a_guess(text: str):
    game = start_game(40)
    assert play_game(game, text, "31") == (["?00-63", ">32-63"], [0.0, 2 * 31 / 64 / 6])
    assert game.num_guesses == 2


def test_the_number_follows_from_the_seed_and_every_number_occurs():
    numbers = []
    for seed in range(2000):
        games = [Guess(), Guess()]
        for game in games:
            game.reset(ROW, seed=seed)
        assert games[0].number == games[1].number
        numbers.append(games[0].number)
    assert set(numbers) == set(NUMBERS)


@given(st.sampled_from(NUMBERS), st.lists(st.integers(0, 99), min_size=1, max_size=MAX_GUESSES))
def test_the_number_is_never_excluded_and_only_a_won_game_scores_1(number: int, guesses: list[int]):
    game = start_game(number)
    rewards = []
    for count, guess in enumerate(guesses, start=1):
        turn = game.step(Reply(f"{guess:02d}"))
        rewards.append(turn.reward)
        assert turn.done == (guess == number or count == MAX_GUESSES)
        assert number in game.left
        assert 0 <= turn.reward <= 2
        if turn.done:
            break
    assert (sum(rewards) >= 1) == game.is_won == (number in guesses)


def test_demonstrations_guess_within_the_interval_and_render_as_episodes_do():
    rng, rows = random.Random(0), make_rows()["train"]
    demonstrations = [training.demonstrate(row, rng) for row in rows[:50]]
    for _, *turns in demonstrations:
        intervals = ["00-63", *(message["content"][1:] for message in turns[1::2])]
        guesses = [message["content"] for message in turns[::2]]
        assert len(guesses) <= MAX_GUESSES
        for interval, guess in zip(intervals, guesses, strict=False):
            first, last = interval.split("-")
            assert first <= guess <= last
    check_demonstrations(demonstrations, num_prompt=1)


def test_the_recipe_has_the_limits_of_the_game():
    config = load_config(Path(RECIPE))
    assert config.environment.max_turns == MAX_GUESSES
    assert config.generator.max_new_tokens == training.MAX_NEW_TOKENS
    description = load_user_class(config.environment).description
    assert description.has_state and not description.tools
    # All tokens of the longest game: guesses with EOS, and answers, which end with a newline.
    longest = MAX_GUESSES * training.MAX_NEW_TOKENS + (MAX_GUESSES - 1) * len(">32-63\n")
    assert config.environment.max_tokens >= longest
