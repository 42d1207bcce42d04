"""Gymnasium adapter on FrozenLake, which has a text mode, and CartPole, which has none."""

import json

import pytest
from gymnasium.envs.classic_control.pendulum import PendulumEnv

from streamrl.environments.adapters.gymnasium import GymnasiumEnvironment, mark_colours
from streamrl.environments.interface import Turn
from streamrl.errors import ConfigError
from tests.environments.adapters.rows import make_row, play

DIRECTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
SOLUTION = ("down", "down", "right", "right", "down", "right")


def make_lake(**options):
    settings = {
        "id": "FrozenLake-v1",
        "make": {"is_slippery": False},
        "actions": DIRECTIONS,
        **options,
    }
    return GymnasiumEnvironment(**settings)


def test_frozen_lake_is_played_to_its_goal_and_marks_the_player():
    lake = make_lake(instructions="Reach G.")
    assert lake.reset(make_row(), 0) == "Reach G.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    *turns, last = play(lake, *SOLUTION)
    assert turns[0].observation == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [(turn.reward, turn.done) for turn in turns] == [(0.0, False)] * 5
    assert last == Turn("", 1.0, done=True)
    lake.close()


@pytest.mark.parametrize(
    ("text", "action"),
    [("down", "Down"), ("I go Right.", "Right"), ("not left but DOWN", "Down"), ("**up**", "Up")],
)
def test_the_last_name_of_an_action_in_a_reply_counts(text, action):
    lake = make_lake()
    lake.reset(make_row(), 0)
    assert f"({action})" in play(lake, text)[0].observation


@pytest.mark.parametrize("text", ["downwards", "3"])
def test_a_reply_without_an_action_is_answered_by_the_legal_ones(text):
    lake = make_lake()
    start = lake.reset(make_row(), 0)
    (turn,) = play(lake, text)
    assert turn == Turn("No action was found. Reply with one of: left, down, right, up.")
    assert play(lake, "left")[0].observation == "  (Left)\n" + start


def test_cart_pole_is_played_to_its_end_by_integers():
    pole = GymnasiumEnvironment(id="CartPole-v1")
    assert len(json.loads(pole.reset(make_row(), 3))) == 4
    turns = play(pole, *["1"] * 5)
    while not turns[-1].done:
        turns += play(pole, "push to the right: 1.")
    assert 5 < len(turns) < 20
    assert {turn.reward for turn in turns} == {1.0}


def test_a_row_may_have_options_of_its_own():
    lake = make_lake()
    row = make_row(make={"map_name": "8x8"}, seed=1)
    assert lake.reset(row, 0).startswith("[S]FFFFFFF\n")
    play(lake, "down")
    with pytest.raises(ConfigError, match=r"actions.* values; a row may have id, make, seed$"):
        make_lake().reset(make_row(actions={"up": 1}), 0)
    with pytest.raises(ConfigError, match=r"id=os:Lake-v1: a row names no module"):
        make_lake().reset(make_row(id="os:Lake-v1"), 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "FrozenLke-v1"}, "id=FrozenLke-v1: .*Did you mean: `FrozenLake`"),
        ({"actions": {"jump": 9}}, r"actions: .* the action space Discrete\(4\); jump not in it"),
        ({"id": "Pendulum-v1", "make": {}, "actions": {}}, "actions: Pendulum-v1 has the action"),
    ],
)
def test_unusable_options_are_refused(options, words):
    lake = make_lake(**options)
    with pytest.raises(ConfigError, match=f"^environment.options.{words}"):
        lake.reset(make_row(), 0)


def test_a_game_whose_actions_are_refused_is_closed(monkeypatch):
    closed: list[PendulumEnv] = []
    monkeypatch.setattr(PendulumEnv, "close", lambda game: closed.append(game))
    pendulum = GymnasiumEnvironment(id="Pendulum-v1")
    with pytest.raises(ConfigError, match="name actions with values"):
        pendulum.reset(make_row(), 0)
    pendulum.close()
    assert closed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[41mS\x1b[0mFF", "[S]FF"),
        ("|\x1b[35mR\x1b[0m: |\x1b[43m \x1b[0m", "|[magenta:R]: |[yellow: ]"),
        ("\x1b[1mtitle\x1b[0m", "[title]"),
        ("\x1b[2J\x1b[1;1Hplain\x1b[0m", "plain"),
        ("no codes [x]", "no codes [x]"),
    ],
)
def test_colours_become_marks_and_other_sequences_go(text, expected):
    assert mark_colours(text) == expected


def test_actions_are_names_with_values():
    with pytest.raises(ConfigError, match=r"options.actions=mine.py:f: must map names"):
        make_lake(actions="mine.py:f")
