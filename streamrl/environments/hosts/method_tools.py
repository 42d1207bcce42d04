"""Tools that are methods of a user's object."""

from collections.abc import Mapping
from typing import Any

from streamrl.environments.hosts.call_runner import UserCodeError
from streamrl.environments.hosts.user_environment import UserEnvironment
from streamrl.environments.interface import CallOutcome
from streamrl.environments.tool_calls.reply_text import format_tool_error, format_tool_result
from streamrl.environments.tool_sources.tool_source import ToolAnswer


class MethodTools:
    """Methods of an environment's object as tools (ToolSession)."""

    timeout_note = ""

    def __init__(self, environment: UserEnvironment) -> None:
        self._environment = environment

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a method. Raises UserCodeError if it returns neither text nor JSON."""
        try:
            result = await self._environment.call(name, **arguments)
        except UserCodeError as error:
            assert error.__cause__ is not None
            text = format_tool_error(error.__cause__, self._environment.description.file)
            return ToolAnswer(text, CallOutcome.TOOL_ERROR)
        try:
            return ToolAnswer(format_tool_result(result))
        except TypeError as error:
            # A fault of the tool, which no other call would avoid: not the policy's to learn from.
            raise self._environment.make_result_error(name, result, "text or JSON") from error

    async def close(self) -> None:
        """Do nothing: the environment closes its object."""
