"""Entries of the config list `environment.tools`: tools besides those of the user's class."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import format_value

PYTHON, MCP = "python", "mcp"
TOOLS_SECTION = "environment.tools"
FORMS = {
    PYTHON: ({"kind"},),
    MCP: ({"kind", "command", "env", "only"}, {"kind", "url", "headers_env", "only"}),
}
"""Settings of the entries of each kind."""


@dataclass
class ToolConfig:
    """Entry of the config list `environment.tools`.

    kind: python (code in a sandbox, with variables that persist in an episode) or mcp (tools of an
        MCP server).
    command: for mcp, the command that starts a server which talks over stdin and stdout, as a list.
    env: for a command, names of the environment variables that the server inherits besides PATH,
        HOME, LANG, LOGNAME, SHELL, TERM and USER.
    url: for mcp, the address of a server with streamable HTTP, instead of a command.
    headers_env: for a url, HTTP headers, each with the name of the environment variable that has
        its value.
    only: for mcp, names of the tools to use; empty: all tools of the server.
    """

    kind: str = ""
    command: list[str] = field(default_factory=list)
    env: list[str] = field(default_factory=list)
    url: str = ""
    headers_env: dict[str, str] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    memory_mib: ClassVar[int] = 512
    """Memory of all processes of an episode's Python session together, MiB."""
    cpu_s: ClassVar[float] = 60.0
    """CPU time of a process of an episode's Python session, s."""

    def __post_init__(self) -> None:
        given = {key: value for key, value in vars(self).items() if value}
        has_server = bool(self.command) != bool(self.url) or self.kind == PYTHON
        if not (has_server and any(given.keys() <= form for form in FORMS.get(self.kind, ()))):
            shown = ", ".join(f"{key}={format_value(given[key])}" for key in sorted(given))
            raise ConfigError(
                f"{TOOLS_SECTION}: an entry is kind: python, or kind: mcp with command (and env,"
                " only) or url (and headers_env, only); this one has"
                f" {shown or 'nothing'}"
            )
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{TOOLS_SECTION}.url={self.url}: must begin with http:// or https://"
            )

    def make_command_absolute(self) -> None:
        """Make the parts of `command` that name files absolute, in place.

        The program itself stays as it is if it has no slash: it is looked up on PATH.
        """
        self.command = [
            str(Path(part).absolute()) if (number or "/" in part) and Path(part).is_file() else part
            for number, part in enumerate(self.command)
        ]

    @property
    def label(self) -> str:
        """Name of the entry, for errors."""
        if self.kind == PYTHON:
            return f"{TOOLS_SECTION}: python"
        return f"{TOOLS_SECTION}: MCP server {self.url or ' '.join(self.command)}"
