"""Games of other packages: an observation becomes text, an action is read from a reply's text."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from streamrl.environments.adapters.option_function import load_option_function
from streamrl.environments.adapters.row_options import merge_row_options
from streamrl.environments.interface import Reply, Turn
from streamrl.messages import Prompt


class TextGame(ABC):
    """Game as an environment class of a user.

    options: options of the game that a row may override, `seed` among them: the game's seed; None:
        that of the environment. row_options: names of those that a row may have.
    observation, actions: functions of the user as file.py:function, in place of those of the class.
        observation(observation, game) returns the text of an observation. actions(text, game)
        returns the action of a reply, or raises ValueError with what to tell the policy.
    instructions: text before the first observation.
    """

    row_options: ClassVar[tuple[str, ...]] = ("make", "seed")

    def __init__(
        self, options: Mapping[str, Any], *, observation: str, actions: str, instructions: str
    ) -> None:
        self._options = options
        self._instructions = instructions
        self._game: Any = None
        self._observation_function: Callable[..., Any] | None = None
        self._action_function: Callable[..., Any] | None = None
        if observation:
            self._observation_function = load_option_function(
                observation,
                option="observation",
                parameters=("observation", "game"),
                gives_text=True,
            )
        if actions:
            self._action_function = load_option_function(
                actions, option="actions", parameters=("text", "game"), lets_through=(ValueError,)
            )

    def reset(self, row: Prompt, seed: int) -> str:
        options = merge_row_options(row, self._options, allowed=self.row_options)
        if options["seed"] is None:
            options["seed"] = seed
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

    def _describe(self, observation: Any) -> str:
        if self._observation_function is None:
            return self._format_observation(observation)
        return str(self._observation_function(observation, self._game))
