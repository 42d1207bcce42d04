"""Games of Gymnasium in text, with a reward per turn."""

import json
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from streamrl.environments.interface import Reply, Turn

COLOURED = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0*m", re.DOTALL)
"""Coloured text, which may be all that shows a state, such as the place of a player on a map."""


class GymnasiumGame:
    """Game whose actions have names; the last one in a reply is the action.

    id: name in Gymnasium's registry. actions: names with their values. make: keyword arguments of
    gymnasium.make. With `render_mode: ansi` an observation is the text of the game, with its
    coloured parts in square brackets; otherwise JSON with numbers of 4 decimals.
    """

    def __init__(
        self, id: str, actions: Mapping[str, Any], make: Mapping[str, Any] | None = None
    ) -> None:
        self._game: Any = gymnasium.make(id, **(make or {}))
        self._actions = {name.lower(): action for name, action in actions.items()}
        names = "|".join(re.escape(name) for name in sorted(self._actions, key=len)[::-1])
        self._named = re.compile(rf"(?<!\w)(?:{names})(?!\w)")

    def reset(self, row: object, seed: int) -> str:
        observation, _ = self._game.reset(seed=seed)
        return self._format(observation)

    def step(self, reply: Reply) -> Turn:
        named = self._named.findall(reply.text.lower())
        if not named:
            return Turn(f"Reply with one of: {', '.join(self._actions)}.")
        observation, reward, is_terminated, is_truncated, _ = self._game.step(
            self._actions[named[-1]]
        )
        return Turn(self._format(observation), float(reward), bool(is_terminated or is_truncated))

    def close(self) -> None:
        self._game.close()

    def _format(self, observation: Any) -> str:
        if self._game.render_mode == "ansi":
            return COLOURED.sub(r"[\1]", self._game.render()).strip("\n")
        return json.dumps(observation, default=lambda part: np.round(part.tolist(), 4).tolist())
