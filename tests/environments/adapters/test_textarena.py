"""TextArena adapter: games for one player, and for two against an opponent."""

import random

import pytest

from streamrl.environments.adapters.textarena import (
    TextArenaEnvironment,
    draw_legal_action,
)
from streamrl.environments.interface import Turn
from streamrl.errors import ConfigError
from tests.environments.adapters.rows import make_row, play

OPPONENT = """
import re

def first_free(observation, rng):
    board = observation.rpartition("Available Moves")[2]
    return re.findall(r"\\[\\d\\]", board)[0]
"""


@pytest.fixture
def opponent(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OPPONENT)
    return f"{path}:first_free"


def make_tictactoe(**options):
    options = {"id": "TicTacToe-v0", "players": 2, **options}
    TextArenaEnvironment.check_options(**options)
    return TextArenaEnvironment(**options)


def test_tictactoe_is_won_against_a_scripted_opponent(opponent):
    game = make_tictactoe(opponent=opponent)
    start = game.reset(make_row(), 0)
    assert "You are Player 0 in Tic Tac Toe" in start and "Available Moves: '[0]'" in start
    first, second, last = play(game, "[6]", "[7]", "I take [8].")
    assert (first.reward, first.done) == (0.0, False)
    # The opponent's move and the board after it; neither the policy's words nor an older board.
    assert "[Player 1] [0]" in first.observation and "[Player 0]" not in first.observation
    assert first.observation.count("Current Board") == 1
    assert " X | 1 | 2 " in first.observation
    assert not second.done
    assert last == Turn("", 1.0, done=True)


def test_the_policy_may_move_second(opponent):
    game = make_tictactoe(opponent=opponent)
    start = game.reset(make_row(player=1), 0)
    assert "You are Player 1" in start and "[Player 0] [0]" in start


def test_an_illegal_move_is_answered_and_the_second_in_a_row_loses(opponent):
    game = make_tictactoe(opponent=opponent)
    game.reset(make_row(), 0)
    (turn,) = play(game, "the middle")
    assert "attempted an invalid move" in turn.observation and not turn.done
    assert play(game, "[9]")[-1] == Turn("", -1.0, done=True)
    game.reset(make_row(), 0)
    assert play(game, " ") == [Turn("Your reply was empty.")]


def play_random(game, seed):
    """Play the first free cell against the random opponent; return all observations."""
    texts = [game.reset(make_row(), seed)]
    for cell in range(9):
        (turn,) = play(game, f"[{cell}]")
        texts.append(turn.observation or str(turn.reward))
        if turn.done:
            return texts
    raise AssertionError("the game has no end")


def test_the_default_opponent_draws_legal_moves_by_the_seed():
    games = [play_random(make_tictactoe(), seed) for seed in range(6)]
    assert games == [play_random(make_tictactoe(), seed) for seed in range(6)]
    assert len({str(game) for game in games}) > 3


def make_number_game(seed):
    game = TextArenaEnvironment(id="GuessTheNumber-v0")
    return game, [game.reset(make_row(), seed)]


def test_sessions_side_by_side_have_random_numbers_of_their_own():
    def finish(game, texts):
        for number in range(1, 21):
            (turn,) = play(game, f"[{number}]")
            texts.append(turn.observation or str(turn.reward))
            if turn.done:
                break
        return texts

    alone = [finish(*make_number_game(seed)) for seed in (1, 2, 3)]
    state = random.getstate()
    games = [make_number_game(seed) for seed in (1, 2, 3)]
    assert [finish(*game) for game in games] == alone
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("Available Moves: '[0]', '[12]'", {"[0]", "[12]"}),
        ("old\nValid moves: [a], [b]\n\nnew\nYour available actions are: '[Bet]'", {"[Bet]"}),
        ("Legal actions:\n[up]\n[down]\n\nWrite [x].", {"[up]", "[down]"}),
    ],
)
def test_legal_actions_are_those_that_the_game_listed_last(text, actions):
    assert {draw_legal_action(text, random.Random(i)) for i in range(20)} == actions


def test_a_game_that_lists_no_actions_needs_an_opponent():
    with pytest.raises(ConfigError, match=r"options.opponent: missing, and the game lists no"):
        draw_legal_action("Say something.", random.Random(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "TicTacTo-v0"}, "id=TicTacTo-v0, "),
        ({"players": 1}, "id=TicTacToe-v0, players=1: .*has to be 2"),
        ({"players": 3}, "players=3: must be 1 or 2"),
        ({"player": 2}, "player=2: must be below players=2"),
    ],
)
def test_unusable_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=f"^environment.options.{words}"):
        make_tictactoe(**options).reset(make_row(), 0)
