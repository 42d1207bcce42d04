"""Adapter of Gymnasium: environments of its registry as games in text."""

import importlib
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from streamrl.environments.adapters.options import (
    ROW_KEY,
    load_option_function,
    merge_row_options,
)
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
    colours = {_name_colour(codes) for codes, _ in COLOURED.findall(text)}

    def mark(match: re.Match[str]) -> str:
        name = f"{_name_colour(match[1])}:" if len(colours) > 1 else ""
        return f"[{name}{match[2]}]"

    return CONTROL_SEQUENCE.sub("", COLOURED.sub(mark, text))


def _name_colour(codes: str) -> str:
    """Return the name of the colour that an SGR sequence sets; "bold" if it sets none.

    codes: its parameters, such as 41;1: 30 to 37 and 90 to 97 set the colour of the characters, 40
    to 47 and 100 to 107 that of the background.
    """
    for code in (int(code) for code in codes.split(";") if code):
        if code // 10 in (3, 4, 9, 10) and code % 10 < len(COLOUR_NAMES):
            return COLOUR_NAMES[code % 10]
    return "bold"


import_package = partial(import_optional, setting="environment.kind=gymnasium", extra="gymnasium")
TEXT_RENDER_MODE = "ansi"
INTEGER = re.compile(r"(?<![\w.])-?\d+(?!\w|\.\d)")


class GymnasiumEnvironment:
    """Environment of Gymnasium, with a reward per turn; it ends terminated or truncated.

    id: name in the registry, or module:name for one that the module registers at its import.
    make: keyword arguments of gymnasium.make.
    actions: names of actions with their values, or a function as file.py:function that returns the
        action of a text and a game, or raises ValueError with what to tell the policy. By default
        an action is an integer of a Discrete space. The last one in a reply counts.
    observation: function as file.py:function that returns the text of an observation and a game. By
        default the text of `render_mode="ansi"` where the environment has this mode, otherwise the
        observation as JSON.
    instructions: text before the first observation.
    seed: seed of the game; None: that of the environment.
    """

    def __init__(
        self,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any] | str = "",
        observation: str = "",
        instructions: str = "",
        seed: int | None = None,
    ) -> None:
        import_package("gymnasium")
        self._options = {"id": id, "make": make or {}, "seed": seed}
        self._instructions = instructions
        self._game: Any = None
        self._actions: Mapping[str, Any] = {}
        self._action_function: Callable[..., Any] | None = None
        if not isinstance(actions, str):
            self._actions = {str(name).lower(): value for name, value in actions.items()}
        elif actions:
            self._action_function = load_option_function(
                actions, option="actions", parameters=("text", "game"), lets_through=ValueError
            )
        self._describe: Callable[..., str] = _format_observation
        if observation:
            self._describe = load_option_function(
                observation, option="observation", parameters=("observation", "game")
            )

    def reset(self, row: Prompt, seed: int) -> str:
        options = merge_row_options(row, seed, self._options, allowed=("id", "make", "seed"))
        self._make_game(options["id"], options["make"])
        observation, _ = self._game.reset(seed=options["seed"])
        texts = [self._instructions, self._describe(observation, self._game)]
        return "\n\n".join(filter(None, texts))

    def step(self, reply: Reply) -> Turn:
        """Play the reply's action; answer a reply without one by what is wrong with it."""
        try:
            action = self._read_action(reply.text)
        except ValueError as error:
            return Turn(str(error))
        observation, reward, terminated, truncated, _ = self._game.step(action)
        is_over = bool(terminated or truncated)
        text = "" if is_over else self._describe(observation, self._game)
        return Turn(text, float(reward), is_over)

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _make_game(self, name: str, settings: Mapping[str, Any]) -> None:
        gymnasium = import_package("gymnasium")
        if ":" in name and name != self._options["id"]:
            raise ConfigError(f"extra_info.{ROW_KEY}.id={name}: a row names no module")
        try:
            spec, has_text = _find_spec(name)
            defaults = {"render_mode": TEXT_RENDER_MODE} if has_text else {}
            self._game = gymnasium.make(
                spec, **{"disable_env_checker": True, **defaults, **settings}
            )
        except gymnasium.error.Error as error:
            raise ConfigError(f"environment.options.id={name}: {error}") from error
        space = self._game.action_space
        for action, value in self._actions.items():
            if not space.contains(_to_action(value, space)):
                raise ConfigError(
                    f"environment.options.actions.{action}={value}: not in the action space"
                    f" {space} of {name}"
                )
        is_discrete = isinstance(space, import_package("gymnasium.spaces").Discrete)
        if not (self._actions or self._action_function or is_discrete):
            raise ConfigError(
                f"environment.options.actions: {name} has the action space {space}; name its"
                " actions with their values, or write file.py:function"
            )

    def _read_action(self, text: str) -> Any:
        """Return the action of a reply. Raises ValueError with what to tell the policy."""
        space, action = self._game.action_space, None
        if self._action_function:
            action = self._action_function(text, self._game)
        elif self._actions:
            names = "|".join(re.escape(name) for name in sorted(self._actions, key=len)[::-1])
            if found := re.findall(rf"(?<!\w)(?:{names})(?!\w)", text.lower()):
                action = _to_action(self._actions[found[-1]], space)
        elif found := INTEGER.findall(text):
            action = int(found[-1])
        if action is None or not space.contains(action):
            problem = "No action was found" if action is None else f"{action} is not a legal action"
            raise ValueError(f"{problem}.{self._describe_legal_actions()}")
        return action

    def _describe_legal_actions(self) -> str:
        space = self._game.action_space
        if self._actions:
            return f" Reply with one of: {', '.join(self._actions)}."
        if self._action_function:
            return ""
        first = int(space.start)
        return f" Reply with an integer from {first} to {first + int(space.n) - 1}."


def _format_observation(observation: Any, game: Any) -> str:
    if game.render_mode == TEXT_RENDER_MODE:
        return mark_colours(game.render()).strip("\n")
    return json.dumps(_to_plain(observation), ensure_ascii=False)


def _find_spec(name: str) -> tuple[Any, bool]:
    """Return the EnvSpec of a name or module:name, and whether it renders text.

    Importing the module registers the name.
    """
    module, _, name = name.rpartition(":")
    if module:
        importlib.import_module(module)
    spec = import_package("gymnasium").spec(name)
    creator = spec.entry_point
    if isinstance(creator, str):
        creator = import_package("gymnasium.envs.registration").load_env_creator(creator)
    # A function that makes the environment has no metadata.
    modes = creator.metadata.get("render_modes", ()) if hasattr(creator, "metadata") else ()
    return spec, TEXT_RENDER_MODE in modes


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
