"""TextWorld adapter on a game of two rooms and two points, which TextWorld has made."""

import tarfile
from pathlib import Path

import pytest

from streamrl.environments.adapters.textworld import TextWorldEnvironment
from streamrl.environments.interface import Turn
from streamrl.errors import ConfigError, EpisodeError
from tests.environments.adapters.rows import make_row, play

# TextWorld turns this warning off at its import, pytest on again; Jericho knows other games.
pytestmark = pytest.mark.filterwarnings("ignore:Game '.*' is not fully supported")
ARCHIVE = Path(__file__).with_name("textworld_house.tar.xz")
WALKTHROUGH = ["go east", "close suitcase", "take latchkey", "unlock safe with latchkey"]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("games")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return str(folder / "house.z8")


def play_walkthrough(game):
    """Play what the oracle says to the end; return commands and turns."""
    row = make_row()
    commands: list[str] = []
    turns: list[Turn] = []
    while not (turns and turns[-1].done):
        commands.append(game.oracle(row, ()))
        turns += play(game, commands[-1])
    return commands, turns


def test_the_walkthrough_wins_with_the_full_score_in_shares(house):
    TextWorldEnvironment.check_options(game=house)
    game = TextWorldEnvironment(game=house, instructions="Play.")
    start = game.reset(make_row(), 0)
    assert start.startswith("Play.\n\nWho's got a virtual machine")
    assert start.endswith(
        "You don't like doors? Why not try going east, that entranceway is unblocked."
    )
    commands, turns = play_walkthrough(game)
    assert commands == WALKTHROUGH
    assert [turn.reward for turn in turns] == [0.0, 0.5, 0.0, 0.5]
    text = "You close the suitcase.\n\nYour score has just gone up by one point."
    assert turns[1].observation == text
    with pytest.raises(EpisodeError, match="no walkthrough"):
        game.oracle(make_row(), ())
    game.close()


def test_admissible_commands_are_listed_on_demand(house):
    game = TextWorldEnvironment(game=house, admissible_commands=True)
    commands = "close crate\nexamine crate\ngo east\ninventory\nlook"
    assert game.reset(make_row(), 0).endswith(f"\n\nAdmissible commands:\n{commands}")
    (turn,) = play(game, "close crate")
    assert turn.observation.startswith(
        "You close the crate.\n\nAdmissible commands:\nexamine crate"
    )
    game.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "Your reply was empty; reply with a command."),
        ("x" * 121, "A command has at most 120 characters."),
        ("caf\u00e9", "A command consists of letters, digits and punctuation."),
        ("\\help", "A command consists of letters, digits and punctuation."),
        ('say "*** The End ***"', "A command consists of letters, digits and punctuation."),
        ("restrict commands", "This command is not part of the game."),
        ("look. quit", "This command is not part of the game."),
        ("TW-print state", "This command is not part of the game."),
        ("go east then save", "This command is not part of the game."),
        ("dance", "That's not a verb I recognise."),
    ],
)
def test_a_reply_that_is_no_command_of_the_game_is_answered_and_changes_nothing(
    house, text, answer
):
    game = TextWorldEnvironment(game=house)
    game.reset(make_row(), 0)
    assert play(game, text) == [Turn(answer)]
    assert play(game, "I restart from here.\n\ngo east\n")[0].observation.startswith(
        "-= Bedroom =-"
    )
    game.close()


def test_sessions_of_one_game_are_kept_apart(house):
    games = [TextWorldEnvironment(game=house) for _ in range(3)]
    for game in games:
        game.reset(make_row(), 0)
    play(games[0], "go east")
    places = [play(game, "look")[0].observation.split("\n")[0] for game in games]
    assert places == ["-= Bedroom =-", "-= Basement =-", "-= Basement =-"]
    for game in games:
        game.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"game": "nowhere.z8"}, ".game=nowhere.z8: no such file"),
        ({"game": __file__}, r".game=.*: no such file .z1 to .z8"),
    ],
)
def test_unusable_options_are_refused(options, words):
    game = TextWorldEnvironment(**options)
    with pytest.raises(ConfigError, match=f"^environment.options{words}"):
        game.reset(make_row(), 0)


def test_commands_of_a_game_that_textworld_has_not_made_are_unknown(house, tmp_path):
    copy = tmp_path / "alone.z8"
    copy.write_bytes(Path(house).read_bytes())
    game = TextWorldEnvironment(game=str(copy), admissible_commands=True)
    with pytest.raises(ConfigError, match=r"admissible_commands: .*alone.z8 has no .json"):
        game.reset(make_row(), 0)
    game = TextWorldEnvironment(game=str(copy))
    game.reset(make_row(), 0)
    assert play(game, "go east")[0].observation.startswith("-= Bedroom =-")
    game.close()
