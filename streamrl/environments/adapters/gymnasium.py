"""Adapter of Gymnasium: environments of its registry as games in text."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from streamrl.environments.adapters.options import ROW_KEY, merge_row_options
from streamrl.environments.interface import Reply, Turn
from streamrl.errors import ConfigError
from streamrl.files.optional_package import import_optional
from streamrl.messages import Prompt

COLOURED = re.compile(r"\x1b\[([0-9;]*[1-9][0-9;]*)m(.*?)\x1b\[0*m", re.DOTALL)
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
COLOUR_NAMES = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def mark_colours(text: str) -> str:
    """Put coloured parts of a text in square brackets, and remove control sequences.

    Colours may be all that shows a state, such as the place of a player on a map. If the text has
    several colours, the brackets name them: [red:S].
    """
    has_several = len({_name_colour(codes) for codes, _ in COLOURED.findall(text)}) > 1

    def mark(match: re.Match[str]) -> str:
        name = f"{_name_colour(match[1])}:" if has_several else ""
        return f"[{name}{match[2]}]"

    return CONTROL_SEQUENCE.sub("", COLOURED.sub(mark, text))


def _name_colour(codes: str) -> str:
    """Return the name of the colour that an SGR sequence sets; "bold" if it sets none.

    codes: its parameters, such as 41;1: 30 to 37 and 90 to 97 set the colour of the characters, 40
    to 47 and 100 to 107 that of the background.
    """
    found = re.search(r"\b(?:3|4|9|10)([0-7])\b", codes)
    return COLOUR_NAMES[int(found[1])] if found else "bold"


import_package = partial(import_optional, setting="environment.kind=gymnasium", extra="gymnasium")
TEXT_RENDER_MODE = "ansi"
INTEGER = re.compile(r"(?<![\w.])-?\d+(?!\w|\.\d)")


class GymnasiumEnvironment:
    """Environment of Gymnasium, with a reward per turn; it ends terminated or truncated.

    id: name in the registry, or module:name for one that the module registers at its import.
    make: keyword arguments of gymnasium.make.
    actions: names of actions with their values. By default an action is an integer of a Discrete
        space. The last one in a reply counts.
    instructions: text before the first observation.
    seed: seed of the game; None: that of the environment.

    An observation is the text of `render_mode="ansi"` where the environment has this mode,
    otherwise JSON.
    """

    def __init__(
        self,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any] | None = None,
        instructions: str = "",
        seed: int | None = None,
    ) -> None:
        import_package("gymnasium")
        if not isinstance(actions, Mapping | None):
            raise ConfigError(
                f"environment.options.actions={actions}: must map names of actions to their values"
            )
        self._options = {"id": id, "make": make or {}, "seed": seed}
        self._actions = {str(name).lower(): value for name, value in (actions or {}).items()}
        self._instructions = instructions
        self._game: Any = None

    def reset(self, row: Prompt, seed: int) -> str:
        options = merge_row_options(row, seed, self._options, allowed=("id", "make", "seed"))
        if ":" in options["id"] and options["id"] != self._options["id"]:
            raise ConfigError(f"extra_info.{ROW_KEY}.id={options['id']}: a row names no module")
        self._game = self._make_game(options["id"], options["make"])
        self._check_actions(options["id"])
        observation, _ = self._game.reset(seed=options["seed"])
        texts = [self._instructions, self._format_observation(observation)]
        return "\n\n".join(filter(None, texts))

    def step(self, reply: Reply) -> Turn:
        """Play the reply's action; answer a reply without one by what is legal."""
        action = self._find_action(reply.text)
        if action is None or not self._game.action_space.contains(action):
            problem = "No action was found" if action is None else f"{action} is not a legal action"
            return Turn(f"{problem}. Reply with {self._describe_legal_actions()}.")
        observation, reward, terminated, truncated, _ = self._game.step(action)
        is_over = bool(terminated or truncated)
        text = "" if is_over else self._format_observation(observation)
        return Turn(text, float(reward), is_over)

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _make_game(self, name: str, settings: Mapping[str, Any]) -> Any:
        gymnasium = import_package("gymnasium")
        settings = {"disable_env_checker": True, **settings}
        try:
            game = gymnasium.make(name, **settings)
            has_text = TEXT_RENDER_MODE in game.metadata.get("render_modes", ())
            if has_text and "render_mode" not in settings:
                game.close()
                game = gymnasium.make(name, render_mode=TEXT_RENDER_MODE, **settings)
        except gymnasium.error.Error as error:
            raise ConfigError(f"environment.options.id={name}: {error}") from error
        return game

    def _check_actions(self, name: str) -> None:
        space = self._game.action_space
        is_discrete = isinstance(space, import_package("gymnasium.spaces").Discrete)
        unknown = [n for n, v in self._actions.items() if not space.contains(_to_action(v, space))]
        if unknown or not (self._actions or is_discrete):
            problem = f"{', '.join(unknown)} not in it" if unknown else "name actions with values"
            raise ConfigError(
                f"environment.options.actions: {name} has the action space {space}; {problem}"
            )

    def _find_action(self, text: str) -> Any:
        """Return the last action that a text names; None if there is none."""
        if not self._actions:
            numbers = INTEGER.findall(text)
            return int(numbers[-1]) if numbers else None
        names = "|".join(re.escape(name) for name in sorted(self._actions, key=len)[::-1])
        found = re.findall(rf"(?<!\w)(?:{names})(?!\w)", text.lower())
        return _to_action(self._actions[found[-1]], self._game.action_space) if found else None

    def _describe_legal_actions(self) -> str:
        if self._actions:
            return f"one of: {', '.join(self._actions)}"
        space = self._game.action_space
        first = int(space.start)
        return f"an integer from {first} to {first + int(space.n) - 1}"

    def _format_observation(self, observation: Any) -> str:
        if self._game.render_mode == TEXT_RENDER_MODE:
            return mark_colours(self._game.render()).strip("\n")
        return json.dumps(_to_plain(observation), ensure_ascii=False)


def _to_action(value: Any, space: Any) -> Any:
    """Convert an action as YAML has it: lists become arrays of the space's dtype."""
    return np.asarray(value, dtype=space.dtype) if isinstance(value, list) else value


def _to_plain(value: Any) -> Any:
    """Convert an observation to plain data for JSON, with four significant digits."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        return _to_plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value if isinstance(value, str | int | None) else str(value)
