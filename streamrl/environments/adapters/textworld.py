"""Adapter of TextWorld: games from files."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.environments.adapters.text_game import PrivateGlobals, TextGame
from streamrl.environments.interface import Message
from streamrl.errors import ConfigError, EpisodeError
from streamrl.files.optional_package import import_optional
from streamrl.messages import Prompt

import_package = partial(import_optional, setting="environment.kind=textworld", extra="textworld")
GAME_SUFFIX = re.compile(r"\.z[1-8]")
"""Suffix of games of the Z-machine; TextWorld 1.7 plays no others as text."""
STATUS_LINE = re.compile(r"\s*>?[ ]{20,}[^\n]*\Z|\s*>\s*\Z")
"""End of the interpreter's output: its prompt, and a line with place, score and moves."""
MAX_COMMAND_CHARS = 120
"""Longest command; the interpreters' buffers have about 200 characters."""
COMMAND_CHARS = re.compile(r"[A-Za-z0-9 ,.;:'\"!?()-]*")
"""Characters of commands. A backslash is a command to the terminal, in which the interpreter hangs;
TextWorld reads score, actions and the end of a game from marks in <>, [] and **, which a game may
repeat from a command."""
META_COMMAND = re.compile(
    r"(?:^|[.,;]|\bthen\b)\s*(?:tw-\S+|q|quit|restart|restore|save|undo|oops|script|unscript"
    r"|transcript|verify|version|superbrief|brief|verbose|notify|restrict commands"
    r"|(?:enable|disable) print state option)\b",
    re.IGNORECASE,
)
"""Commands to the interpreter and TextWorld's own, which no turn may use: they write files, end the
interpreter, or tell what a player cannot know."""


class TextWorldEnvironment(TextGame):
    """Game of TextWorld. A turn's reward is its gain in score, as a share of the highest score.

    Games that neither TextWorld has made nor Jericho knows have no score: all rewards are 0.

    game: file .z1 to .z8, with its .json for games that TextWorld has made.
    admissible_commands: list the commands that do something in each observation. Games that
        TextWorld has made only.
    actions: function as file.py:function. By default the last line of a reply is the command.
    observation: function as file.py:function, which gets textworld.core.GameState.
    """

    row_options = ("game", "seed")

    def __init__(
        self,
        *,
        game: str = "",
        admissible_commands: bool = False,
        actions: str = "",
        observation: str = "",
        instructions: str = "",
        seed: int | None = None,
    ) -> None:
        super().__init__(
            {"game": game, "seed": seed},
            observation=observation,
            actions=actions,
            instructions=instructions,
        )
        self._has_commands = admissible_commands
        self._max_score = 0.0
        self._score = 0.0
        self._walkthrough: Sequence[str] = ()
        self._num_steps = 0

    @classmethod
    def check_options(cls, **options: Any) -> None:
        import_package("textworld")
        cls(**options)

    def oracle(self, row: Prompt, messages: Sequence[Message]) -> str:
        """Return the next command of the game's walkthrough."""
        if self._num_steps >= len(self._walkthrough):
            raise EpisodeError(f"{self._path}: no walkthrough, or the game did not follow it")
        return self._walkthrough[self._num_steps]

    def close(self) -> None:
        if self._game is not None:
            with self._globals.hold():
                self._game.close()

    def _start(self, options: Mapping[str, Any]) -> Any:
        self._globals = PrivateGlobals(options["seed"])
        with self._globals.hold():
            textworld = import_package("textworld")
            self._path = self._find_game(options["game"])
            infos = textworld.EnvInfos(
                objective=True,
                score=True,
                max_score=True,
                admissible_commands=self._has_commands,
                extras=["walkthrough"],
            )
            self._game = textworld.start(str(self._path), infos)
            self._game.seed(options["seed"])
            state = self._game.reset()
        self._score = float(state.get("score") or 0)
        self._max_score = float(state.get("max_score") or 0)
        self._walkthrough = list(state.get("extra.walkthrough") or ())
        return state

    def _play(self, action: str) -> tuple[Any, float, bool]:
        with self._globals.hold():
            state, score, is_over = self._game.step(action)
        self._num_steps += 1
        score = float(score or 0)
        gain, self._score = score - self._score, score
        return state, gain / (self._max_score or 1.0), bool(is_over)

    def _find_game(self, game: str) -> Path:
        path = Path(game)
        if not (GAME_SUFFIX.fullmatch(path.suffix) and path.is_file()):
            raise ConfigError(f"environment.options.game={game}: no such file .z1 to .z8")
        if self._has_commands and not path.with_suffix(".json").is_file():
            raise ConfigError(
                f"environment.options.admissible_commands: {game} has no .json beside it, which"
                " only games that TextWorld has made have"
            )
        return path

    def _format_observation(self, observation: Any) -> str:
        text = observation["feedback"]
        objective = observation.get("objective")
        if objective and objective in text:  # the first observation, below a banner
            text = text[text.index(objective) :]
        text = re.sub(r"\n{3,}", "\n\n", STATUS_LINE.sub("", text).strip())
        if not self._has_commands:
            return text
        commands = "\n".join(observation["admissible_commands"] or ())
        return f"{text}\n\nAdmissible commands:\n{commands}"

    def _parse_action(self, text: str) -> str:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise ValueError("Your reply was empty; reply with a command.")
        command = lines[-1]
        if len(command) > MAX_COMMAND_CHARS:
            raise ValueError(f"A command has at most {MAX_COMMAND_CHARS} characters.")
        if not COMMAND_CHARS.fullmatch(command):
            raise ValueError("A command consists of letters, digits and punctuation.")
        if META_COMMAND.search(command):
            raise ValueError("This command is not part of the game.")
        return command
