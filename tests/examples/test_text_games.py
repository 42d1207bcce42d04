"""Text games: the classes play a game of each package to its end, as a host process loads them."""

import random
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.environment_host import load_user_class
from streamrl.environments.interface import Reply, Turn

FOLDER = Path("examples/text_games")


def make_game(file, **options):
    config = EnvironmentConfig(path=str(FOLDER / file), options=options)
    loaded = load_user_class(config)
    return loaded.class_object(**loaded.options)


def play(game, *texts):
    return [game.step(Reply(text)) for text in texts]


def test_frozen_lake_is_played_to_its_goal_and_shows_the_player():
    config = yaml.safe_load((FOLDER / "README.md").read_text().split("```")[3][len("yaml\n") :])
    lake = make_game("gymnasium_game.py", **config["environment"]["options"])
    assert lake.reset(None, 0) == "[S]FFF\nFHFH\nFFFH\nHFFG"
    refused, first, *_, last = play(
        lake, "Downwards.", "Not left but DOWN.", "down", "right", "right", "down", "right"
    )
    assert refused == Turn("Reply with one of: left, down, right, up.")
    assert first == Turn("  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG", 0.0, False)
    assert (last.reward, last.done) == (1.0, True)
    pole = make_game("gymnasium_game.py", id="CartPole-v1", actions={"left": 0, "right": 1})
    assert re.fullmatch(r"\[(-?0\.\d{1,4}(, )?){4}\]", pole.reset(None, 3))
    assert pole._format({"x": np.float32(0.1), "y": np.arange(2)}) == '{"x": 0.1, "y": [0, 1]}'
    turns = play(pole, *["right"] * 10)
    assert not turns[0].done and turns[-1].done
    for game in (lake, pole):
        game.close()


@pytest.mark.parametrize("player", [0, 1])
def test_tictactoe_is_played_to_its_reward(player):
    config = yaml.safe_load((FOLDER / "README.md").read_text().split("```")[1][len("yaml\n") :])
    game = make_game("textarena_game.py", **config["environment"]["options"], player=player)
    observation, turn, rng = game.reset(None, 3), Turn(), random.Random(3)
    assert f"You are Player {player} in Tic Tac Toe" in observation
    while not turn.done:
        assert turn.reward == 0
        moves = re.findall(r"\[\d\]", observation.rpartition("Available Moves")[2])
        turn = game.step(Reply(rng.choice(moves)))
        observation = turn.observation
    assert turn.reward in (-1, 0, 1)


def test_a_game_that_lists_no_moves_for_the_opponent_is_refused_at_its_reset():
    game = make_game("textarena_game.py", id="ConnectFour-v0", players=2)
    with pytest.raises(ValueError, match="lists no legal moves"):
        game.reset(None, 3)


# TextWorld turns this warning off at its import, pytest on again; Jericho knows other games.
@pytest.mark.filterwarnings("ignore:Game '.*' is not fully supported")
def test_the_walkthrough_of_an_adventure_wins_its_full_score(tmp_path):
    with tarfile.open(Path(__file__).with_name("textworld_house.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    game = make_game("textworld_game.py", game=str(tmp_path / "house.z8"))
    assert game.reset(None, 0).endswith("going east, that entranceway is unblocked.")
    refused = Turn("Reply with a command of the game.")
    commands = ("", "\\help", "tw-print state", "look then quit", "disable print state option")
    assert play(game, *commands) == [refused] * len(commands)
    assert play(game, "examine manuscript") != [refused]
    turns = play(game, *(game.oracle(None, None) for _ in range(4)))
    assert [turn.reward for turn in turns] == [0.0, 0.5, 0.0, 0.5]
    assert [turn.done for turn in turns] == [False, False, False, True]
    game.close()
