"""A session's object of a user's class, behind the same methods for both shapes."""

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.call_runner import EpisodeCalls, HostCalls, UserCodeError
from streamrl.environments.hosts.host_protocol import CLOSE_TIMEOUT_S
from streamrl.environments.hosts.user_class import CONSTRUCTOR, UserClass
from streamrl.environments.interface import (
    EnvironmentStep,
    EpisodeSummary,
    Message,
    Reply,
    ResetResult,
    Turn,
)
from streamrl.environments.tool_calls.reply_text import replace_surrogates
from streamrl.files.bounded_read import MIB
from streamrl.messages import Prompt
from streamrl.user_code.checks import format_value, to_finite_float

MAX_OBSERVATION_BYTES = 16 * MIB
"""Limit of an observation as JSON: a guard for the socket, far above any context window."""


class UserEnvironment:
    """Environment of a session. Every method raises UserCodeError, and TimeoutError if too slow.

    Siblings share nothing: each session has an object of its own.
    """

    def __init__(
        self, user_class: UserClass, settings: EnvironmentConfig, host_calls: HostCalls
    ) -> None:
        self.description = user_class.description
        self._class = user_class
        self._settings = settings
        self._calls = EpisodeCalls(host_calls)
        self._object: Any = None
        self._row: Prompt | None = None

    async def reset(self, prompt: Prompt, seed: int) -> ResetResult:
        """Construct the object, and reset it if the class has `reset`."""
        offered = {"row": prompt, "seed": seed}
        observation = None
        self._row = prompt
        async with asyncio.timeout(self._settings.turn_timeout_s):
            # Copied: an object that changes a list among its options must not change its siblings'.
            options = copy.deepcopy(dict(self._class.options))
            self._object = await self._calls.run(
                self._class.methods[CONSTRUCTOR], self._class.class_object, **options
            )
            if self._class.is_async:
                self._calls.end_thread()
            if "reset" in self._class.methods:
                arguments = {name: offered[name] for name in self._class.reset_arguments}
                observation = await self.call("reset", **arguments)
        messages = () if observation is None else self.to_messages("reset", observation)
        return ResetResult(messages, self.description.tools)

    async def step(self, reply: Reply) -> EnvironmentStep:
        raise NotImplementedError

    async def score(self, episode: EpisodeSummary) -> float:
        if not self.description.has_score:
            return sum(episode.rewards)
        async with asyncio.timeout(self._settings.turn_timeout_s):
            return self.to_float("score", await self.call("score", episode))

    async def oracle(self, messages: Sequence[Message]) -> str:
        """Return the turn that the class's `oracle` would write next."""
        async with asyncio.timeout(self._settings.turn_timeout_s):
            reply = await self.call("oracle", self._row, messages)
        if not isinstance(reply, str):
            raise self.make_result_error("oracle", reply, "a text")
        return "".join((reply, ""))  # a plain str, as the pool unpickles no subclass

    async def close(self) -> None:
        try:
            if self._object is not None and "close" in self._class.methods:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.call("close")
        finally:
            self._calls.end_thread()

    @property
    def is_hanging(self) -> bool:
        """True while a call that was given up occupies the episode's thread."""
        return self._calls.is_hanging

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self._object, name)
        return await self._calls.run(self._class.methods[name], function, *args, **kwargs)

    def to_float(self, name: str, value: Any) -> float:
        number = to_finite_float(value)
        if number is None:
            raise self.make_result_error(name, value, "a finite number")
        return number

    def to_messages(self, name: str, observation: Any) -> Sequence[Message]:
        """Return what a method returned as chat messages of plain data; a text is a user message.

        Raises UserCodeError if `observation` is neither, or longer than MAX_OBSERVATION_BYTES.
        """
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        if not _are_messages(observation):
            raise self.make_result_error(name, observation, "a text or a list of chat messages")
        try:
            # A copy of plain data: the pool unpickles neither subclasses of str nor user classes.
            text = json.dumps([dict(message) for message in observation], ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.make_result_error(name, observation, f"plain JSON data ({error})") from error
        encoded = replace_surrogates(text).encode()
        if len(encoded) > MAX_OBSERVATION_BYTES:
            raise UserCodeError(
                f"{self._locate(name)} returned an observation of {len(encoded) / MIB:.1f} MiB; the"
                f" limit is {MAX_OBSERVATION_BYTES // MIB} MiB"
            )
        messages: list[Message] = json.loads(encoded)
        return messages

    def make_result_error(self, name: str, value: Any, wanted: str) -> UserCodeError:
        return UserCodeError(f"{self._locate(name)} returned {format_value(value)}, not {wanted}")

    def _locate(self, name: str) -> str:
        method = self._class.methods[name]
        return f"{method.name} in {method.file}"


class TurnEnvironment(UserEnvironment):
    """Environment whose class has `step`."""

    async def step(self, reply: Reply) -> EnvironmentStep:
        async with asyncio.timeout(self._settings.turn_timeout_s):
            turn = await self.call("step", reply)
        if not isinstance(turn, Turn):
            raise self.make_result_error("step", turn, "a Turn")
        reward, done = self.to_float("step", turn.reward), bool(turn.done)
        messages = () if done else self.to_messages("step", turn.observation)
        return EnvironmentStep(messages, reward, done)


def _are_messages(observation: Any) -> bool:
    return isinstance(observation, list | tuple) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
        for message in observation
    )
