"""All sources of an environment's tools besides its class, in a host process."""

import asyncio
from collections.abc import Sequence

from streamrl.environments.interface import ToolSchema
from streamrl.environments.tool_calls.tool_schema import get_tool_name
from streamrl.environments.tool_config import PYTHON, ToolConfig
from streamrl.environments.tool_sources.mcp_tools import McpTools
from streamrl.environments.tool_sources.python_tool import PythonTools
from streamrl.environments.tool_sources.tool_source import ToolSession, ToolSource
from streamrl.errors import ConfigError


class ToolSources:
    """Sources in the order of environment.tools, behind one list of tools.

    own_tools: tools of the user's class. max_reply_chars: longest reply that the policy reads.
    """

    def __init__(
        self,
        configs: Sequence[ToolConfig],
        own_tools: Sequence[ToolSchema],
        *,
        max_reply_chars: int,
    ) -> None:
        self._sources = [_make_source(config, max_reply_chars) for config in configs]
        self._own_tools = own_tools
        self._tools_by_source: list[Sequence[ToolSchema]] | None = None
        self._listing = asyncio.Lock()

    async def check(self) -> None:
        """Raise ConfigError if tools cannot run on this machine."""
        for source in self._sources:
            await source.check()

    async def list_tools(self, deadline: float) -> Sequence[ToolSchema]:
        """Return the schemas of all tools; a server is asked once, for all episodes.

        deadline: s of the event loop's clock. Raises EpisodeError, and ConfigError for tools with
        the same name.
        """
        listed = [tools for _, tools in await self._list_by_source(deadline)]
        return [*self._own_tools, *(tool for tools in listed for tool in tools)]

    async def _list_by_source(
        self, deadline: float
    ) -> Sequence[tuple[ToolSource, Sequence[ToolSchema]]]:
        async with self._listing:
            if self._tools_by_source is None:
                listed = [await source.list_tools(deadline) for source in self._sources]
                self._check_names(listed)
                self._tools_by_source = listed
        return list(zip(self._sources, self._tools_by_source, strict=True))

    def _check_names(self, listed: Sequence[Sequence[ToolSchema]]) -> None:
        owners = {get_tool_name(tool): "the class" for tool in self._own_tools}
        for source, tools in zip(self._sources, listed, strict=True):
            for name in map(get_tool_name, tools):
                if name in owners:
                    raise ConfigError(
                        f"{source.label}: has a tool {name}, as has {owners[name]}; rename one, or"
                        " leave it out: `only` of an MCP server names the tools to use"
                    )
                owners[name] = source.label

    async def open(self, deadline: float, opened: dict[str, ToolSession]) -> None:
        """Open all sources for an episode, at the same time. Raises EpisodeError.

        opened: gets the session of each tool, by name, also if another source fails.
        """

        async def open_source(source: ToolSource, tools: Sequence[ToolSchema]) -> None:
            session = await source.open(deadline)
            opened.update((get_tool_name(tool), session) for tool in tools)

        try:
            async with asyncio.TaskGroup() as tasks:
                for source, tools in await self._list_by_source(deadline):
                    if tools:
                        tasks.create_task(open_source(source, tools))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


def _make_source(config: ToolConfig, max_reply_chars: int) -> ToolSource:
    if config.kind == PYTHON:
        return PythonTools(config, kept_chars=max_reply_chars)
    return McpTools(config)
