"""Config section `environment`: environments of a run's episodes, their tools and limits."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import above, at_least, format_value, one_of

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


CLASS_KIND, OPENENV_KIND = "class", "openenv"
"""Kinds of environments: a class in a file of the user; a server of OpenEnv."""

SECTION = "environment"
_NAME = re.compile(r"[\w-]+")


@dataclass
class EnvironmentSpec:
    """Class of an environment, the options of its constructor, and further tools.

    path: file of the environment, as file.py or file.py:Class.
    kind: class (that of `path`), or openenv, a server of OpenEnv.
    options: keyword arguments of the class's constructor.
    tools: tools besides the methods of a class without `step`, or without any class; as in
        environment.tools.
    """

    path: str = ""
    kind: Annotated[str, one_of(CLASS_KIND, OPENENV_KIND)] = CLASS_KIND
    options: dict[str, Any] = field(default_factory=dict)
    tools: list[ToolConfig] = field(default_factory=list)

    @property
    def has_class(self) -> bool:
        return bool(self.path) or self.kind != CLASS_KIND

    @property
    def is_given(self) -> bool:
        """True if the settings name an environment."""
        return self.has_class or bool(self.tools)

    def format_setting(self, section: str) -> str:
        """Return the setting that names the environment as key=value, for errors."""
        if not self.has_class:
            return f"{section}.tools={', '.join(tool.kind for tool in self.tools)}"
        if self.kind == CLASS_KIND:
            return f"{section}.path={self.path}"
        return f"{section}.kind={self.kind}"

    def make_paths_absolute(self) -> None:
        if self.path:
            self.path = str(Path(self.path).absolute())
        for tool in self.tools:
            tool.make_command_absolute()

    def check(self, section: str) -> None:
        """Raise ConfigError for settings that do not suit the kind.

        section: config section of the spec, for errors.
        """
        if self.path and self.kind != CLASS_KIND:
            raise ConfigError(
                f"{section}.path={self.path}: needs {section}.kind={CLASS_KIND}, not {self.kind}"
            )
        if self.options and not self.has_class:
            raise ConfigError(f"{section}.options: needs {section}.path, the file of the class")


@dataclass
class EnvironmentConfig(EnvironmentSpec):
    """Environments of a run. Without any, every rollout is a single turn.

    named: several environments by name, each with path, kind and options, in place of those above.
        Each row names its environment in the column `environment`. All other settings are shared.
    max_turns: most turns of an episode.
    max_tokens: most tokens of an episode besides the row's prompt: sampled tokens, observations,
        what the chat template writes between turns, and the schemas of tools.
    max_samples: most training samples of an episode. Where the chat template rewrites the
        conversation before a turn, such as by dropping thoughts, the turn begins a new sample with
        the rendering as its prompt. After the last sample, and with 1, tokens are appended.
    turn_timeout_s: deadline of `reset`, of `step` and of `score`, each, s; a tool call has half of
        it, and the policy reads that the call timed out. Starting a process has a deadline of its
        own, because the file may import torch.
    episode_timeout_s: most time of an episode in the engine and in its environment, s. Waits for a
        decode slot or for shared devices do not count. Below pipeline.stall_s. A longer episode
        counts nowhere.
    open_episodes: episodes that a generator keeps open, those that wait for their environment
        included; with `isolate` also its most processes of environments. null:
        generator.max_concurrent_rollouts.
    processes: processes of each generator that run the environment's code and share the open
        episodes. With `isolate`, processes kept ready for the next episodes.
    isolate: run each episode in a new process, which is killed with the episode: it shares neither
        random generators nor environment variables, working directory or global variables.
    memory_gib: memory limit of a host process including its children, GiB.
    call_format: format of the policy's tool calls; auto: that of the model's chat template.
    call_pattern: regular expression of a call, for call_format: regex.
    """

    named: dict[str, EnvironmentSpec] = field(default_factory=dict)
    max_turns: Annotated[int, at_least(1)] = 8
    max_tokens: Annotated[int, at_least(1)] = 1024
    max_samples: Annotated[int, at_least(1)] = 1
    turn_timeout_s: Annotated[float, above(0)] = 60.0
    episode_timeout_s: Annotated[float, above(0)] = 240.0
    open_episodes: Annotated[int | None, at_least(1)] = None
    processes: Annotated[int, at_least(1)] = 2
    isolate: bool = False
    memory_gib: Annotated[float, above(0)] = 4.0
    call_format: str = "auto"
    call_pattern: str = ""
    max_reply_chars: ClassVar[int] = 2000
    """Longest reply of a tool; the middle of a longer one is cut out."""
    max_malformed: ClassVar[int] = 3
    """Turns in a row whose calls are all invalid, after which an episode ends."""
    attempts: ClassVar[int] = 3
    """Attempts at an episode whose environment fails.

    The environment keeps its seed, the policy gets another one, or the words at which the
    environment failed would return.
    """

    def __post_init__(self) -> None:
        if self.call_pattern and self.call_format != "regex":
            raise ConfigError(
                f"environment.call_pattern: needs environment.call_format=regex, not"
                f" {self.call_format}"
            )
        self._check_specs()

    def _check_specs(self) -> None:
        if self.named and self.is_given:
            raise ConfigError(
                f"{SECTION}.named: has environments, and {SECTION}.path, kind or tools names"
                " another; give that one a name, too"
            )
        for name, spec in self.named.items():
            section = get_environment_section(name)
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{section}: a name consists of letters, digits, _ and -")
            if not spec.is_given:
                raise ConfigError(
                    f"{section}.path: missing; it names the file of the environment, unless it has"
                    " only tools"
                )
            spec.check(section)
        self.check(SECTION)

    @property
    def call_timeout_s(self) -> float:
        """Deadline of a tool call, s."""
        return self.turn_timeout_s / 2

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def is_enabled(self) -> bool:
        return bool(self.specs)

    @property
    def max_rollouts_per_episode(self) -> int:
        """Most rollouts of a group that are samples of the same episode."""
        return self.max_samples if self.is_enabled else 1

    @property
    def specs(self) -> Mapping[str, EnvironmentSpec]:
        """Environments by name; a single one without a name has the name ""."""
        return self.named or ({"": self} if self.is_given else {})

    @property
    def single(self) -> tuple[str, EnvironmentSpec]:
        """Name and spec of the environment of a config that has exactly one (`select`)."""
        (entry,) = self.specs.items()
        return entry

    @property
    def settings_text(self) -> str:
        """Settings that name the environments, as key=value, for errors."""
        settings = [
            spec.format_setting(get_environment_section(name)) for name, spec in self.specs.items()
        ]
        return ", ".join(settings) or f"{SECTION}={{}}"

    def select(self, name: str) -> "EnvironmentConfig":
        """Return the config of one environment alone, with the shared settings."""
        return replace(self, named={name: self.named[name]}) if self.named else self


def get_environment_section(name: str) -> str:
    """Return the config section that names an environment; "" is the one without a name."""
    return f"{SECTION}.named.{name}" if name else SECTION
