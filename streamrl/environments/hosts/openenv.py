"""OpenEnv: a client of its WebSocket protocol (message types of OpenEnv 0.10).

    {"type": "reset", "data": {"seed": 1, ...}}  -->
        <--  {"type": "observation", "data": {"observation": {...}, "reward": 0, "done": false}}
    {"type": "step", "data": {...}}              -->
        <--  the same, or {"type": "error", "data": {"message": "...", "code": "...", ...}}
    {"type": "close"}                            -->

An environment with tools lists them for the action {"type": "list_tools"}, and answers the action
{"type": "call_tool", "tool_name": "...", "arguments": {...}} with `result` or `error`.

A server gives each connection an environment of its own. At capacity it ends a new connection,
with code 1000 and, in some releases, an error message before.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidMessage, WebSocketException

from streamrl.environments.interface import CallOutcome, Reply, ToolSchema, Turn
from streamrl.environments.tool_calls.call_formats import check_encodable, parse_json_at
from streamrl.environments.tool_calls.reply_text import replace_surrogates
from streamrl.environments.tool_calls.schema_check import check_tool_schema
from streamrl.environments.tool_sources.python_tools import ToolAnswer
from streamrl.errors import ConfigError, EpisodeError, EpisodeOutageError
from streamrl.files.bounded_read import MIB
from streamrl.files.typed_settings import format_value
from streamrl.messages import Prompt, describe_prompt
from streamrl.user_code.service_gate import describe_failure, is_outage

ROW_KEY = "environment_options"
"""Key of `extra_info` under which a row has options of its own."""
DEFAULT_PORTS = {"ws": 80, "wss": 443}
MAX_MESSAGE_BYTES = 16 * MIB
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
LONGEST_PAUSE_S = 0.5
"""Longest pause between connections to a server at capacity, s."""
NORMAL_CLOSURE = 1000
VALIDATION_ERROR, CAPACITY_REACHED = "VALIDATION_ERROR", "CAPACITY_REACHED"
NO_ACTION = (VALIDATION_ERROR, "EXECUTION_ERROR")
"""Errors of an environment that does not know an action."""
CALL_FIELDS = {"tool_name", "result", "error"}


class OpenEnvEnvironment:
    """Environment of an OpenEnv server, over a WebSocket of its own.

    url: WebSocket of the server, such as ws://127.0.0.1:8000/ws.
    action: {field: NAME}: the reply's text is the field NAME of the action. {json: true}: the first
        JSON object of the reply is the action. By default calls of the server's tools are the
        actions; without tools it is {field: message}.
    observation: {field: NAME}: the policy reads the field NAME of an observation. By default it
        reads the only field, if it has text, otherwise all fields as JSON; `metadata` is not for
        the policy.
    instructions: text before the first observation.
    reset: further data of the reset message, such as a task.
    seed: seed of the game; by default that of the group.
    wait_s: longest wait for a server at capacity, s. Below environment.turn_timeout_s.

    An action that the server finds invalid is answered by its reasons. Any other error of the
    server is a failure of the environment. A server that cannot be reached is waited for.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        url: str,
        action: Mapping[str, Any] | None = None,
        observation: Mapping[str, Any] | None = None,
        instructions: str = "",
        reset: Mapping[str, Any] | None = None,
        seed: int | None = None,
        wait_s: float = 50.0,
    ) -> None:
        self._url, self._host = url, ""
        with contextlib.suppress(ValueError):  # of a port that is no number
            address = urlsplit(str(url))
            if default_port := DEFAULT_PORTS.get(address.scheme):
                self._port, self._host = address.port or default_port, address.hostname or ""
        if not self._host:
            raise ConfigError(
                f"environment.options.url={url}: must be ws://HOST:PORT/PATH, or wss://"
            )
        action = {"field": "message"} if action is None else action
        self._action_field = "" if action == {"json": True} else _read_field("action", action)
        self._shown_field = _read_field("observation", observation) if observation else ""
        self._instructions = instructions
        self._reset_data, self._seed = reset or {}, seed
        self._wait_s = wait_s
        self._connection: Any = None
        self._num_unread, self._turn = 0, asyncio.Lock()
        self._is_done = False

    @classmethod
    async def list_tools(cls, **options: Any) -> Sequence[ToolSchema]:
        """Return the schemas of the server's tools; () if it has none, or the action is given."""
        if options.get("action") is not None:
            return ()
        environment = cls(**options)
        try:
            answer = await environment._open({"type": "step", "data": {"type": "list_tools"}})
        finally:
            await environment.close()
        if answer["data"].get("code") in NO_ACTION:
            return ()
        observation = environment._read_result(answer)["observation"]
        if observation.keys() - {"metadata"} != {"tools"}:
            return ()
        place = f"environment.options.url={options['url']}"
        if not observation["tools"]:
            raise ConfigError(f"{place}: lists no tools; mend the server, or set options.action")
        tools = list(map(_make_schema, observation["tools"]))
        for tool in tools:
            check_tool_schema(tool, place=place)
        return tools

    async def reset(self, row: Prompt, seed: int) -> str | None:
        own = row.extra_info.get(ROW_KEY, {})
        # Nothing that names a server: rows may come from elsewhere.
        if not (isinstance(own, Mapping) and own.keys() <= {"reset", "seed"}):
            raise ConfigError(
                f"{describe_prompt(row)}: extra_info.{ROW_KEY}={own!r:.100}: must map options to"
                " values; a row may have reset, seed"
            )
        seeds = (own.get("seed"), self._seed, seed)
        seed = next(given for given in seeds if given is not None)
        data = {"seed": seed, **self._reset_data, **(own.get("reset") or {})}
        result = self._read_result(await self._open({"type": "reset", "data": data}))
        texts = [self._instructions, self._format_observation(result["observation"])]
        return "\n\n".join(filter(None, texts)) or None

    async def step(self, reply: Reply) -> Turn:
        try:
            action = self._read_action(reply.text)
        except ValueError as error:
            return Turn(f"Reply with a JSON object: {error}.")
        answer = await self._take_step(action)
        return Turn(answer.text, answer.reward, answer.done)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool of the server; an error of the tool is a text for the policy."""
        if self._is_done:
            return ToolAnswer("error: the episode has ended", CallOutcome.TOOL_ERROR)
        return await self._take_step(
            {"type": "call_tool", "tool_name": name, "arguments": arguments}
        )

    async def _take_step(self, action: Mapping[str, Any]) -> ToolAnswer:
        answer = await self._exchange({"type": "step", "data": action})
        if answer["data"].get("code") == VALIDATION_ERROR:
            text = f"Invalid action: {_format_reasons(answer['data'])}"
            return ToolAnswer(text, CallOutcome.TOOL_ERROR)
        result = self._read_result(answer)
        observation, reward = result["observation"], float(result.get("reward") or 0.0)
        self._is_done = bool(result.get("done"))
        outcome, error = CallOutcome.OK, observation.get("error")
        if observation.keys() >= CALL_FIELDS and isinstance(error, dict):
            if error.get("error_type") == "transport_error":
                raise EpisodeError(f"{self._url}: {error.get('message')}")
            outcome, text = CallOutcome.TOOL_ERROR, f"error: {error.get('message')}"
        else:
            text = "" if self._is_done else self._format_observation(observation)
        return ToolAnswer(replace_surrogates(text), outcome, reward=reward, done=self._is_done)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(ConnectionClosed):
                await connection.send(json.dumps({"type": "close"}))
            await connection.close()

    async def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Connect and return the answer to the first message; wait while the server is full."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        while True:
            await self._connect()
            answer = await self._exchange(message, is_first=True)
            if answer["data"].get("code") != CAPACITY_REACHED:
                return answer
            await self.close()
            # Without chance, all that wait would come back at the same moment.
            pause_s = LONGEST_PAUSE_S * random.uniform(0.2, 1.0)
            if loop.time() + pause_s > deadline:
                raise EpisodeError(
                    f"{self._url}: at capacity for {self._wait_s:g} s (wait_s); raise the server's"
                    " max_concurrent_envs, or lower environment.open_episodes"
                )
            await asyncio.sleep(pause_s)

    async def _connect(self) -> None:
        try:
            self._connection = await connect(
                self._url,
                # As given: neither a proxy nor, with host and port set, a redirect elsewhere.
                host=self._host,
                port=self._port,
                proxy=None,
                open_timeout=CONNECT_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                # Pings keep a waiting connection open; a server that steps may answer them late.
                ping_timeout=None,
                max_size=MAX_MESSAGE_BYTES,
            )
            self._num_unread = 0
        except (OSError, ValueError, WebSocketException) as error:
            is_out = isinstance(error, OSError | InvalidMessage) or is_outage(error)
            kind = EpisodeOutageError if is_out else EpisodeError
            raise kind(f"{self._url}: no connection: {describe_failure(error)}") from error

    async def _exchange(
        self, message: Mapping[str, Any], *, is_first: bool = False
    ) -> dict[str, Any]:
        """Send a message and return the answer; its `data` is a mapping.

        is_first: the server may end the connection instead, which means that it is full.
        """
        try:
            async with self._turn:
                self._num_unread += 1
                with contextlib.suppress(ConnectionClosed):  # its last words may be there to read
                    await self._connection.send(json.dumps(message))
                # Answers to calls that were given up come first.
                while self._num_unread:
                    text = await self._connection.recv()
                    self._num_unread -= 1
        except ConnectionClosed as error:
            if is_first and error.rcvd is not None and error.rcvd.code == NORMAL_CLOSURE:
                return {"type": "error", "data": {"code": CAPACITY_REACHED}}
            # Without a closing frame the server, or the way to it, is gone.
            kind = EpisodeError if error.rcvd is not None else EpisodeOutageError
            raise kind(f"{self._url}: connection lost: {error.rcvd or 'no answer'}") from error
        answer: Any = None
        with contextlib.suppress(ValueError):
            answer = json.loads(text)
        if not (isinstance(answer, dict) and isinstance(answer.get("data"), dict)):
            raise EpisodeError(f"{self._url}: not OpenEnv's protocol: {text!r:.200}")
        return answer

    def _read_result(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return observation, reward and done of an answer. Raises EpisodeError for an error."""
        data = answer["data"]
        if answer.get("type") != "observation" or not isinstance(data.get("observation"), dict):
            reason = f"{data.get('code', answer.get('type'))}: {data.get('message', data)}"
            raise EpisodeError(f"{self._url}: {reason}")
        return data  # type: ignore[no-any-return]

    def _read_action(self, text: str) -> Mapping[str, Any]:
        """Return the action of a reply. Raises ValueError if it must be an object and is none."""
        if self._action_field:
            return {self._action_field: text}
        if "{" not in text:
            raise ValueError("there is none")
        action, _ = parse_json_at(text, text.find("{"))
        check_encodable(action)
        return action  # type: ignore[no-any-return]

    def _format_observation(self, observation: Mapping[str, Any]) -> str:
        """Return the chosen field, a tool's result, the only text, or all fields as JSON."""
        value: Any = {name: entry for name, entry in observation.items() if name != "metadata"}
        if self._shown_field:
            if self._shown_field not in observation:
                raise EpisodeError(
                    f"environment.options.observation={self._shown_field}: {self._url} sent"
                    f" {', '.join(observation) or 'no fields'}"
                )
            value = observation[self._shown_field]
        elif value.keys() == CALL_FIELDS:
            value = _read_content(value["result"])
        elif len(value) == 1 and isinstance(only := next(iter(value.values())), str):
            value = only
        return "" if value in ({}, None) else format_value(value)


def _make_schema(tool: Any) -> ToolSchema:
    tool = tool if isinstance(tool, dict) else {}
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _read_content(result: Any) -> Any:
    """Return the text of a tool's result in MCP's form; any other result as it is."""
    content = result.get("content") if isinstance(result, dict) else None
    if not isinstance(content, list):
        return result
    return "\n".join(block.get("text") or f"[{block.get('type')}]" for block in content)


def _read_field(option: str, value: Any) -> str:
    """Return NAME of an option {field: NAME}. Raises ConfigError for any other value."""
    forms = "{field: NAME} or {json: true}" if option == "action" else "{field: NAME}"
    if not isinstance(value, Mapping) or value.keys() != {"field"}:
        raise ConfigError(f"environment.options.{option}={format_value(value)}: must be {forms}")
    return str(value["field"])


def _format_reasons(data: Mapping[str, Any]) -> str:
    """Return the reasons of a validation error: place and message of each (pydantic)."""
    reasons = [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg', '')}"
        for error in data.get("errors") or ()
        if isinstance(error, Mapping)
    ]
    return "; ".join(reasons) or str(data.get("message", "no reason given"))
