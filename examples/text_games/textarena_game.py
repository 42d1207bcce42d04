"""Games of TextArena, for one player or against an opponent that draws legal moves."""

import random
import re
from collections.abc import Sequence
from typing import Any

import textarena

from streamrl.environments.interface import Reply, Turn

BOARD = textarena.ObservationType.GAME_BOARD
LISTED = re.compile(
    r"(?:available|valid|legal) (?:move|action)s?[^:\n]*:(.+?)(?:\n\n|\Z)", re.I | re.S
)
"""Legal actions as games list them: Available Moves: '[0]', '[1]'."""
BRACKETED = re.compile(r"\[[^\[\]]+\]")


class TextArenaGame:
    """Game whose last turn has the game's reward. The reply's text is the action.

    id: name in TextArena's registry. players: 1 or 2. player: number of the policy's player.
    """

    def __init__(self, id: str, players: int = 1, player: int = 0) -> None:
        self._players, self._player = players, player
        self._game: Any = textarena.make(id)

    def reset(self, row: object, seed: int) -> str:
        random.seed(seed)  # games draw from the global generator: environment.isolate
        self._rng = random.Random(seed)
        self._game.reset(num_players=self._players, seed=seed)
        while isinstance(self._game, textarena.Wrapper):
            self._game = self._game.env  # wrappers repeat the whole game every turn
        self._let_opponent_play()
        messages = self._read_messages()
        if self._players == 2:
            list_legal_actions(messages)  # raises before the episode, not within
        return messages

    def step(self, reply: Reply) -> Turn:
        is_over, _ = self._game.step(reply.text.strip())
        if is_over or self._let_opponent_play():
            rewards, _ = self._game.close()
            return Turn("", float(rewards[self._player]), done=True)
        return Turn(self._read_messages())

    def _let_opponent_play(self) -> bool:
        """Play until it is the policy's turn; return whether the game is over."""
        while self._game.state.current_player_id != self._player:
            actions = list_legal_actions(self._read_messages())
            is_over, _ = self._game.step(self._rng.choice(actions))
            if is_over:
                return True
        return False

    def _read_messages(self) -> str:
        """Return what the player whose turn it is was sent by others; of the boards the last."""
        player, messages = self._game.get_observation()
        return format_messages([message for message in messages if message[0] != player])


def list_legal_actions(text: str) -> list[str]:
    lists = LISTED.findall(text)
    if not lists:
        raise ValueError("this game lists no legal moves: write the opponent's moves here")
    return BRACKETED.findall(lists[-1])


def format_messages(messages: Sequence[tuple[int, str, Any]]) -> str:
    boards = [i for i, (_, _, kind) in enumerate(messages) if kind == BOARD]
    return "\n\n".join(
        text.strip() for i, (_, text, _) in enumerate(messages) if i not in boards[:-1]
    )
