"""Games of other packages: an observation becomes text, an action is read from a reply's text."""

import contextlib
import io
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import numpy as np

from streamrl.environments.interface import Reply, Turn
from streamrl.errors import ConfigError, EpisodeError
from streamrl.messages import Prompt, describe_prompt
from streamrl.user_code.python_module import FileFunction, load_referenced_function

ROW_KEY = "environment_options"
"""Key of `extra_info` under which a row has options of its own."""
_LOCK = threading.Lock()


def load_option_function(
    reference: str,
    *,
    option: str,
    parameters: Sequence[str],
    lets_through: type[Exception] | None = None,
) -> Callable[..., Any]:
    """Return the user's function that an option names as file.py:function.

    parameters: names of the positional arguments of its calls. lets_through: exception of the
    function that its caller handles; any other becomes an EpisodeError with the user's line. Raises
    ConfigError if the function cannot be loaded or has other parameters.
    """
    setting = f"environment.options.{option}"
    code = _load_function(reference, setting)
    code.check_not_async()
    code.check_positional(parameters)

    def call(*arguments: Any) -> Any:
        try:
            return code.function(*arguments)
        # SystemExit too: a user's function may call exit().
        except (Exception, SystemExit) as error:
            if lets_through and isinstance(error, lets_through):
                raise
            raise EpisodeError(f"{setting}={code.describe_error(error)}") from error

    return call


@cache
def _load_function(reference: str, setting: str) -> FileFunction:
    return load_referenced_function(reference, setting=setting)


def merge_row_options(
    row: Prompt, seed: int, options: Mapping[str, Any], *, allowed: Sequence[str]
) -> dict[str, Any]:
    """Return the options of the run with those of a row: mappings merge, other values replace.

    seed: value of the option `seed` if neither has one. allowed: options that a row may have.
    Options that name code are not among them, because rows may come from elsewhere. Raises
    ConfigError for any other option.
    """
    merged = dict(options)
    own = row.extra_info.get(ROW_KEY, {})
    if not isinstance(own, Mapping):
        place = f"{describe_prompt(row)}: extra_info.{ROW_KEY}={own!r:.100}"
        raise ConfigError(f"{place}: must map options to values")
    for name, value in own.items():
        if name not in allowed:
            place = f"{describe_prompt(row)}: extra_info.{ROW_KEY}.{name}"
            raise ConfigError(f"{place}: a row may have {', '.join(allowed)}")
        is_mapping = isinstance(merged.get(name), Mapping) and isinstance(value, Mapping)
        merged[name] = {**merged[name], **value} if is_mapping else value
    if merged["seed"] is None:
        merged["seed"] = seed
    return merged


class PrivateGlobals:
    """Global random generators of Python and numpy as a single session sees them.

    Sessions of a host process run in threads. Without states of their own, an episode would depend
    on the draws of those beside it.
    """

    def __init__(self, seed: int) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Run a block alone among the sessions, with their own generators and without its prints.

        The wait for the other sessions is bounded by the deadline of the operation.
        """
        with _LOCK:
            shared = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(shared[0])
                np.random.set_state(shared[1])


class TextGame(ABC):
    """Game as an environment class of a user.

    options: options of the game that a row may override, `seed` among them: the game's seed; None:
        that of the environment. row_options: names of those that a row may have.
    observation, actions: functions of the user as file.py:function, in place of those of the class.
        observation(observation, game) returns the text of an observation. actions(text, game)
        returns the action of a reply, or raises ValueError with what to tell the policy.
    instructions: text before the first observation.
    """

    row_options: ClassVar[tuple[str, ...]]

    def __init__(
        self, options: Mapping[str, Any], *, observation: str, actions: str, instructions: str
    ) -> None:
        self._options = options
        self._instructions = instructions
        self._game: Any = None
        self._describe: Callable[[Any], str] = self._format_observation
        self._action_function: Callable[..., Any] | None = None
        if observation:
            describe = load_option_function(
                observation, option="observation", parameters=("observation", "game")
            )
            self._describe = lambda seen: describe(seen, self._game)
        if actions:
            self._action_function = load_option_function(
                actions,
                option="actions",
                parameters=("text", "game"),
                lets_through=ValueError,
            )

    def reset(self, row: Prompt, seed: int) -> str:
        options = merge_row_options(row, seed, self._options, allowed=self.row_options)
        text = self._describe(self._start(options))
        return f"{self._instructions}\n\n{text}" if self._instructions else text

    def step(self, reply: Reply) -> Turn:
        """Play the reply's action; answer a reply without one by what is wrong with it."""
        try:
            action = self._read_action(reply.text)
        except ValueError as error:
            return Turn(str(error))
        observation, reward, is_over = self._play(action)
        return Turn("" if is_over else self._describe(observation), reward, is_over)

    @abstractmethod
    def _start(self, options: Mapping[str, Any]) -> Any:
        """Make the game `self._game` and return its first observation.

        options: those of the class and the row; `seed` is set.
        """

    @abstractmethod
    def _play(self, action: Any) -> tuple[Any, float, bool]:
        """Take an action; return the observation, its reward, and whether the game is over."""

    @abstractmethod
    def _format_observation(self, observation: Any) -> str: ...

    @abstractmethod
    def _parse_action(self, text: str) -> Any:
        """Return the action of a reply. Raises ValueError with what to tell the policy."""

    def _read_action(self, text: str) -> Any:
        if self._action_function is None:
            return self._parse_action(text)
        return self._action_function(text, self._game)
