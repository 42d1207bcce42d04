"""Adapter of TextArena: its games for one player, and for two against an opponent."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from streamrl.environments.adapters.text_game import (
    PrivateGlobals,
    TextGame,
    load_option_function,
)
from streamrl.errors import ConfigError
from streamrl.files.optional_package import import_optional

import_package = partial(import_optional, setting="environment.kind=textarena", extra="textarena")
LEGAL_ACTIONS = re.compile(
    r"\b(?:available|valid|legal|allowed|possible) (?:move|action|column)s?\b[^:\n]*:"
    r"(.+?)(?:\n\n|\Z)",
    re.IGNORECASE | re.DOTALL,
)
"""List of actions in an observation, such as: Available Moves: '[0]', '[1]'."""
BOARD = "ObservationType.GAME_BOARD"
BRACKETED = re.compile(r"\[[^\[\]]+\]")

GameMessage = tuple[int, str, Any]
"""Message of a game: player that sent it, or the game; text; ObservationType."""


class TextArenaEnvironment(TextGame):
    """Game of TextArena. The last turn has the game's reward, other turns have 0.

    id: name in TextArena's registry. make: keyword arguments of textarena.make.
    players: 1 or 2. player: number of the policy's player, 0 or 1; player 0 moves first.
    opponent: function as file.py:function, opponent(observation, rng), that returns the action of
        the other player as text. observation: all that this player has read so far. rng:
        random.Random of the episode's seed. By default it draws from the legal actions that the
        game lists.
    actions: function as file.py:function. By default the reply's text, as the game takes it.
    observation: function as file.py:function, which gets the messages since the policy's last turn.
        By default their text, without the policy's own and without boards before the last one.

    An illegal action is answered by the game, which ends when it has had too many of them.
    """

    row_options = ("id", "make", "player", "seed")

    def __init__(  # noqa: PLR0913
        self,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        players: int = 1,
        player: int = 0,
        opponent: str = "",
        actions: str = "",
        observation: str = "",
        instructions: str = "",
        seed: int | None = None,
    ) -> None:
        if players not in (1, 2):
            raise ConfigError(f"environment.options.players={players}: must be 1 or 2")
        super().__init__(
            {"id": id, "make": make or {}, "player": player, "seed": seed},
            observation=observation,
            actions=actions,
            instructions=instructions,
        )
        self._players = players
        self._opponent: Callable[[str, random.Random], Any] = draw_legal_action
        if opponent:
            self._opponent = load_option_function(
                opponent, option="opponent", parameters=("observation", "rng")
            )
        self._read_by_opponent: list[str] = []

    @classmethod
    def check_options(cls, **options: Any) -> None:
        import_package("textarena")
        cls(**options)

    def _start(self, options: Mapping[str, Any]) -> Sequence[GameMessage]:
        name, self._player, seed = options["id"], options["player"], options["seed"]
        if self._player not in range(self._players):
            raise ConfigError(
                f"environment.options.player={self._player}: must be below players={self._players}"
            )
        self._rng = random.Random(seed)
        self._globals = PrivateGlobals(seed)
        with self._globals.hold():
            textarena = import_package("textarena")
            try:
                self._game = textarena.make(name, **options["make"])
                self._game.reset(num_players=self._players, seed=seed)
            # SyntaxError: some games need Python 3.12. AssertionError: another number of players.
            except (ValueError, ImportError, SyntaxError, AssertionError) as error:
                place = f"environment.options.id={name}, players={self._players}"
                raise ConfigError(f"{place}: {error}") from error
        self._let_opponent_play()
        messages = self._take_messages()
        if self._players > 1 and self._opponent is draw_legal_action:
            # Otherwise an opponent without actions would be noticed in the middle of a run.
            draw_legal_action(format_messages(messages, {}), random.Random(seed))
        return messages

    def _play(self, action: str) -> tuple[Sequence[GameMessage], float, bool]:
        if not (self._move(action) or self._let_opponent_play()):
            return self._take_messages(), 0.0, False
        with self._globals.hold():
            rewards, _ = self._game.close()
        return (), float(rewards[self._player]), True

    def _let_opponent_play(self) -> bool:
        """Play until it is the policy's turn; return whether the game is over."""
        while self._game.state.current_player_id != self._player:
            messages = self._take_messages()
            if self._opponent is draw_legal_action:
                # The policy's words could hold a list of actions that are not legal.
                messages = [message for message in messages if message[0] < 0]
            self._read_by_opponent.append(format_messages(messages, self._game.state.role_mapping))
            action = self._opponent("\n\n".join(self._read_by_opponent), self._rng)
            if self._move(action):
                return True
        return False

    def _move(self, action: str) -> bool:
        """Take the action of the player whose turn it is; return whether the game is over."""
        with self._globals.hold():
            is_over, _ = self._game.step(action)
        return bool(is_over)

    def _take_messages(self) -> Sequence[GameMessage]:
        """Return what the player whose turn it is was sent since the last call."""
        game = self._game
        # TextArena's wrappers of observations repeat the whole game every turn.
        wrapper = import_package("textarena").Wrapper
        while isinstance(game, wrapper):
            game = game.env
        with self._globals.hold():
            _, messages = game.get_observation()
        return messages  # type: ignore[no-any-return]

    def _format_observation(self, observation: Sequence[GameMessage]) -> str:
        others = [message for message in observation if message[0] != self._player]
        return format_messages(others, self._game.state.role_mapping)

    def _parse_action(self, text: str) -> str:
        action = text.strip()
        if not action:
            raise ValueError("Your reply was empty.")
        return action


def format_messages(messages: Sequence[GameMessage], roles: Mapping[int, str]) -> str:
    """Return messages of a game as text; of several boards only the last one.

    roles: names of the players, which precede what players have said.
    """
    # Some games write another text in place of the type.
    boards = [i for i, (_, _, kind) in enumerate(messages) if str(kind) == BOARD]
    texts = []
    for i, (sender, text, _) in enumerate(messages):
        if i not in boards[:-1]:
            name = f"[{roles.get(sender, f'Player {sender}')}] " if sender >= 0 else ""
            texts.append(f"{name}{text.strip()}")
    return "\n\n".join(texts)


def draw_legal_action(observation: str, rng: random.Random) -> str:
    """Draw one of the actions that the game has listed last.

    Raises ConfigError if the game lists none in brackets.
    """
    lists = LEGAL_ACTIONS.findall(observation)
    actions = BRACKETED.findall(lists[-1]) if lists else []
    if not actions:
        raise ConfigError(
            "environment.options.opponent: missing, and the game lists no legal actions to draw"
            " from; write file.py:function"
        )
    return rng.choice(actions)
