"""Checks of environments before a run, and episodes whose turns come from a function, no model.

    differences = check_template(TurnRenderer(tokenizer, template))
    differences["thoughts"]

`check_template` compares appended streams with whole renderings of the same conversations. A
template that rewrites earlier turns, by dropping thoughts or trimming whitespace, is no error: the
stream keeps what the policy sampled. The result names the first token of each difference.
"""

import ast
import asyncio
import math
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from streamrl.data.chat_template import decode_ids
from streamrl.data.config import DataConfig
from streamrl.environments.config import EnvironmentConfig, get_environment_section
from streamrl.environments.episodes.driver import (
    choose_call_format,
    load_turn_renderer,
    make_environment_seed,
    open_conversation,
    render_start,
    translate_template_errors,
    wait_before_retry,
)
from streamrl.environments.hosts.host_pool import EnvironmentHostPool, HostedSession
from streamrl.environments.hosts.host_protocol import EnvironmentDescription
from streamrl.environments.interface import (
    CallOutcome,
    EnvironmentStep,
    EpisodeSummary,
    Message,
    Reply,
    ResetResult,
    ToolSchema,
)
from streamrl.environments.rendering.turn_renderer import TurnRenderer, clean_observation
from streamrl.environments.tool_calls.call_formats import (
    REGEX_FORMAT,
    check_call,
    make_assistant_message,
)
from streamrl.environments.tool_calls.marked_turn import WrittenCall
from streamrl.environments.tool_calls.reply_text import make_call, make_call_id
from streamrl.environments.tool_calls.tool_schema import format_tool, get_parameters, get_tool_name
from streamrl.errors import ConfigError, EpisodeError
from streamrl.files.printable_text import format_quantity
from streamrl.messages import Array, FinishReason, Prompt, describe_prompt
from streamrl.user_code.checks import format_returned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SHOWN_TOKENS = 6
KEPT = "Differences are kept as sampled: the policy is trained on the tokens it saw."
REWRITTEN = "Where more than whitespace differs, the next turn begins a new sample of the episode."
USER_MESSAGES, TOOL_CALL = "user messages", "one tool call"
LOOK_UP: ToolSchema = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
"""Tool of the conversations with tool calls."""


def list_template_notes(renderer: TurnRenderer, max_samples: int) -> list[str]:
    """Return each difference, and what becomes of it, given the most samples of an episode."""
    treatment = KEPT
    if max_samples > 1:
        treatment = f"{REWRITTEN} After environment.max_samples={max_samples}, turns are appended."
    return [
        f"chat template, {kind}: {difference}. {treatment}"
        for kind, difference in check_template(renderer).items()
    ]


def check_template(renderer: TurnRenderer) -> dict[str, str]:
    """Compare stream and rendering of generated conversations of each kind.

    Returns the first different token of each kind whose stream is not the rendering. Raises
    ConfigError for a template that refuses, drops or reorders messages of the user and replies to
    them, or whose turns hold a token that ends turns. Other kinds may be refused; environments then
    must not use them.
    """
    name, tokenizer = renderer.template.name, renderer.tokenizer
    if renderer.early_ends:
        raise ConfigError(
            f"{name}: writes {', '.join(renderer.early_ends)} within a turn, a token that ends"
            " turns by eos_token_id of generation_config.json or eos_token of the tokenizer; remove"
            " it there, or choose the template of the model"
        )
    end_texts = [decode_ids(tokenizer, [token]) for token in sorted(renderer.end_token_ids)]
    conversations = make_conversations(" ".join(["see", *end_texts, "there"]))
    differences: dict[str, str] = {}
    for kind, messages in conversations.items():
        try:
            if difference := _compare(renderer, kind, messages):
                differences[kind] = difference
        except ConfigError:
            if kind == USER_MESSAGES:
                raise
    return differences


def make_conversations(special_text: str) -> dict[str, list[Message]]:
    """Return a conversation of each kind, ending with an observation."""

    def user(content: str) -> Message:
        return {"role": "user", "content": content}

    def assistant(content: str) -> Message:
        return {"role": "assistant", "content": content}

    call, results = _make_call, _make_results
    thought = "<think>\nLet me see.\n</think>\n\n"
    ask = [user("Find the words.")]
    plain = [assistant("I know the first."), user("Go on."), assistant("And the second.")]
    return {
        USER_MESSAGES: [*ask, *plain, user("Done?")],
        TOOL_CALL: [*ask, call("one"), *results("1"), call("two"), *results("2\n3")],
        "several tool calls": [*ask, call("one", "two"), *results("1", "2")],
        "user message after a tool": [*ask, call("one"), *results("1"), *plain, user("Done?")],
        "thoughts": [
            *(*ask, assistant(thought + "The first."), user("Go on.")),
            *(assistant(thought + "The second."), user("Done?")),
        ],
        "thoughts before tool calls": [
            *(*ask, call("one", content=thought), *results("1")),
            *(call("two", content=thought), *results("2")),
        ],
        "text beyond ASCII": [*ask, assistant("\u00dcber \u4f60\u597d"), user("\u00e9\U0001f600")],
        "whitespace around a text": [
            *(*ask, assistant("The first. \n"), user("  Go on.\n\n")),
            *(assistant("The second."), user("\nDone? ")),
        ],
        "empty observation": [*ask, assistant("The first."), user("")],
        "empty tool result": [*ask, call("one"), *results("")],
        "special tokens as text": [*ask, assistant("The first."), user(special_text)],
        "system message": [
            *(*ask, assistant("The first."), {"role": "system", "content": "Time is short."})
        ],
    }


def _make_call(*words: str, content: str = "") -> Message:
    calls = [make_call(number, "look_up", {"word": word}) for number, word in enumerate(words)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _make_results(*contents: str) -> list[Message]:
    return [
        {"role": "tool", "name": "look_up", "tool_call_id": make_call_id(number), "content": text}
        for number, text in enumerate(contents)
    ]


def describe_difference(
    tokenizer: "PreTrainedTokenizerBase", rendered: Sequence[int], appended: Sequence[int]
) -> str:
    """Describe the first different token of a template's rendering and a stream; "" if equal."""
    for index, (one, other) in enumerate(zip_longest(rendered, appended)):
        if one != other:
            ids = (tokens[index : index + SHOWN_TOKENS] for tokens in (rendered, appended))
            left, right = (repr(decode_ids(tokenizer, i)) if len(i) else "nothing" for i in ids)
            return f"token {index}: the template renders {left}, the stream has {right}"
    return ""


def _compare(renderer: TurnRenderer, kind: str, messages: Sequence[Message]) -> str:
    has_tools = any(message["role"] == "tool" for message in messages)
    # Without a place for tools in the prompt, a template may have tool results all the same.
    tools = [LOOK_UP] if has_tools and renderer.template.can_render_tools else []
    rendered = renderer.get_writer(has_tools=has_tools).render(messages, tools)
    tokenizer = renderer.tokenizer
    appended = append_turns(renderer, messages, tools)
    difference = describe_difference(tokenizer, renderer.encoder.encode(rendered), appended)
    in_order = ".*".join(re.escape(message["content"]) for message in messages)
    if kind == USER_MESSAGES and not re.search(in_order, rendered, re.DOTALL):
        raise ConfigError(
            f"{renderer.template.name}: does not render all messages of user and assistant, in"
            f" their order ({kind}; {difference})"
        )
    return difference


def append_turns(
    renderer: TurnRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> list[int]:
    """Return the stream of a conversation whose replies the policy samples.

    The policy closes every other turn; the others are cut.
    """
    has_tools = any(message["role"] == "tool" for message in messages)
    writer = renderer.get_writer(has_tools=has_tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    stream = renderer.render_prompt(messages[: turns[0]], tools).tolist()
    for number, (turn, end) in enumerate(zip(turns, [*turns[1:], len(messages)], strict=True)):
        observation = messages[turn + 1 : end]
        text = writer.write_turn(messages[:turn], messages[turn], observation, tools)
        sampled = renderer.encoder.encode(text)
        # Turns with calls may close by another token than `closing_ids`.
        is_cut = "tool_calls" in messages[turn] or number % 2 == 1 or not renderer.closing_ids
        sampled += [] if is_cut else renderer.closing_ids
        bridge = renderer.render_bridge(sampled, observation, is_cut=is_cut, has_tools=has_tools)
        stream += [*sampled, *bridge.token_ids.tolist()]
    return stream


PolicyReply = str | WrittenCall
"""Text of a turn, or a tool call."""
Policy = Callable[[Sequence[Message], Sequence[ToolSchema]], Awaitable[PolicyReply]]
"""Function that returns the next turn of a conversation."""
CALL_RULE = "write calls as name(argument=value), ..., with Python literals as values"
_CALL_START = re.compile(r"\s*[A-Za-z_][\w.]*\s*\(")


def render_messages(messages: Sequence[Message], *_: Any, **__: Any) -> Array:
    """Return a token per message, int32 [M]."""
    return np.zeros(len(messages), np.int32)


class TextEnd(NamedTuple):
    """End of an episode without a model; the score is the sum of the rewards at a timeout."""

    reason: FinishReason
    rewards: Sequence[float]
    score: float


class EpisodeObserver(Protocol):
    """Observer of an episode."""

    def see_start(self, prompt: Prompt, start: ResetResult) -> None: ...

    def see_turn(self, reply: Reply, step: EnvironmentStep) -> None: ...


async def play_text_episode(
    config: EnvironmentConfig,
    session: HostedSession,
    prompt: Prompt,
    policy: Policy,
    *,
    observer: EpisodeObserver,
    timeout_s: float | None,
) -> TextEnd:
    """Run an episode whose turns a policy writes, without limits of tokens.

    timeout_s: longest time from the reset to the last turn, s; None: any. Raises EpisodeError, also
    for an observation that no chat template could show.
    """
    start = await session.reset()
    observer.see_start(prompt, start)
    rewards: list[float] = []
    with translate_template_errors(prompt):
        shown = clean_observation(start.messages) if start.messages else []
    row, opened = open_conversation(prompt.messages, shown)
    messages, reason = [*row, *opened], None
    try:
        async with asyncio.timeout(timeout_s):
            while reason is None:
                reply = parse_turn(await policy(messages, start.tools), start.tools)
                messages.append(make_assistant_message(reply))
                step = await session.step(reply)
                observer.see_turn(reply, step)
                rewards.append(step.reward)
                if step.done:
                    reason = FinishReason.STOP
                elif len(rewards) == config.max_turns:
                    reason = FinishReason.TURNS
                else:
                    with translate_template_errors(prompt):
                        messages += clean_observation(step.messages)
    except TimeoutError:
        return TextEnd(FinishReason.TIMEOUT, rewards, sum(rewards))
    summary = EpisodeSummary(messages, rewards, reason.name.lower())
    return TextEnd(reason, rewards, await session.score(summary))


def parse_turn(turn: PolicyReply, tools: Sequence[ToolSchema]) -> Reply:
    """Split a turn into text and tool calls, each with its outcome.

    In an environment with tools, text that begins with `name(` is a call, or several that are
    separated by commas: add(a=1, b=2), stop().
    """
    text, written = ("", [turn]) if isinstance(turn, WrittenCall) else (turn, [])
    if tools and _CALL_START.match(text):
        written = _read_text_calls(text)
        text = text if written[0].error else ""
    by_name = {get_tool_name(tool): tool for tool in tools}
    return Reply(text, [check_call(call, by_name) for call in written])


def _read_text_calls(text: str) -> list[WrittenCall]:
    """Parse calls such as add(a=1, b=2), stop() without evaluating anything."""
    try:
        listed: Any = ast.parse(f"[{text}]", mode="eval").body
        return [
            WrittenCall(0, len(text), ast.unparse(call.func), _read_keywords(call))
            for call in listed.elts
        ]
    except (SyntaxError, ValueError, MemoryError, RecursionError, AttributeError):
        return [WrittenCall(0, len(text), error=CALL_RULE)]


def _read_keywords(call: Any) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def check_environments(
    config: EnvironmentConfig,
    data: DataConfig,
    prompts: Sequence[Prompt],
    *,
    model_path: str,
    state_reader: str = "",
) -> list[str]:
    """Check environments and template, and reset an episode of each prompt; return notes.

    `state_reader`: name of the algorithm if it compares states. Raises ConfigError for a class,
    template or call format that cannot be used, an environment that fails at its reset `attempts`
    times or does not name its states to a reader, and a prompt that leaves no room for a turn.
    """
    renderer = load_turn_renderer(data, model_path)
    notes = list_template_notes(renderer, config.max_samples)
    return [*notes, *asyncio.run(_check_classes(config, renderer, prompts, state_reader))]


async def _check_classes(
    config: EnvironmentConfig, renderer: TurnRenderer, prompts: Sequence[Prompt], state_reader: str
) -> list[str]:
    """Check each environment with the prompts that name it."""
    notes: list[str] = []
    tools: list[ToolSchema] = []
    for name in config.specs:
        own_prompts = [prompt for prompt in prompts if prompt.environment == name]
        description = await check_class(config.select(name), renderer, own_prompts)
        if state_reader and not description.has_state:
            raise ConfigError(
                f"algorithm.name={state_reader}: compares turns in equal states, and"
                f" {description.place} has no state_key(), which returns a text or an int"
            )
        notes.append(description.note)
        if not own_prompts:
            notes.append(f"{get_environment_section(name)}: no row that was checked names it")
        tools += description.tools
    if config.call_format == REGEX_FORMAT and not tools:
        raise ConfigError(f"environment.call_format={REGEX_FORMAT}: no environment has tools")
    if tools and not renderer.can_render_tools:
        notes.append(
            f"{renderer.template.name} shows no tools to the model, which must know them:"
            f" {', '.join(map(get_tool_name, tools))}"
        )
    return [note for note in notes if note]


async def check_class(
    config: EnvironmentConfig, renderer: TurnRenderer, prompts: Sequence[Prompt]
) -> EnvironmentDescription:
    """Check a single environment with a model's template. Raises ConfigError."""
    name, spec = config.single
    hosts = EnvironmentHostPool(replace(config, processes=1))
    try:
        await hosts.start()
        tools = hosts.description.tools
        # Parsing checks that the format can name each of the tools.
        choose_call_format(config, renderer, tools).parse([], tools)
        if tools:
            # Raises for a template in which the result of a call cannot follow a turn.
            renderer.render_bridge([], [{"role": "tool", "content": "result"}], is_cut=True)
        for prompt in prompts:
            await _check_reset(config, hosts, renderer, prompt)
        return hosts.description
    except EpisodeError as error:
        setting = spec.format_setting(get_environment_section(name))
        raise ConfigError(f"{setting}: {error}") from error
    finally:
        await hosts.close()


async def _check_reset(
    config: EnvironmentConfig, hosts: EnvironmentHostPool, renderer: TurnRenderer, prompt: Prompt
) -> None:
    """Reset an episode, as often as a run would, and check that it leaves room for a turn."""
    start = None
    for attempt in range(1, config.attempts + 1):
        session = hosts.open_session(prompt, seed=make_environment_seed(0, prompt.uid))
        try:
            start = await session.reset()
            break
        except EpisodeError:
            if attempt == config.attempts:
                raise
        finally:
            await session.close()
        await wait_before_retry(attempt)
    assert start is not None
    _, token_ids = render_start(renderer, prompt, start)
    added = len(token_ids) - len(prompt.token_ids)
    if added >= config.max_tokens:
        raise ConfigError(
            f"environment.max_tokens={config.max_tokens}: leaves no room for a turn:"
            f" tools and first observation add {added} tokens to {describe_prompt(prompt)}"
        )


class Finding(NamedTuple):
    """Result of one check of an environment.

    status: "ok", "warn", or "fail": a run with this environment would drop groups or train wrongly.
    subject: aspect that was checked. text: what was found and, unless it is ok, what to do.
    """

    status: str
    subject: str
    text: str


SILENT, RANDOM, ORACLE = "silent", "random", "oracle"
FRAGMENTS = (
    *("0", "-1", "3.5", "1e999", "nan", "yes", "the", "\n", "\\", '"', "%s", "<|im_end|>"),
    *("</tool_call>", "{", "]", "```", "\\boxed{}", "\u4f60", "\U0001f600"),
)
"""Pieces of random text: what parsers of replies stumble over."""
MAX_FRAGMENTS = 12
CALL_RATE = 0.8
"""Share of a random policy's turns with calls, in an environment with tools."""
NUMBER_RATE = 0.25
"""Share of random texts that are a number, as games of numbers expect."""


async def stay_silent(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PolicyReply:
    """Return an empty turn."""
    return ""


def make_random_policy(seed: int) -> Policy:
    """Return a policy whose turns depend on `seed` and the number of the turn only."""

    async def policy(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PolicyReply:
        rng = random.Random(f"{seed}/{len(messages)}")
        if tools and rng.random() < CALL_RATE:
            tool = rng.choice(tools)
            return WrittenCall(0, 0, get_tool_name(tool), sample_arguments(tool, rng))
        return sample_text(rng)

    return policy


def sample_text(rng: random.Random) -> str:
    if rng.random() < NUMBER_RATE:
        return str(rng.randrange(100))
    return " ".join(rng.choices(FRAGMENTS, k=rng.randint(1, MAX_FRAGMENTS)))


def sample_arguments(tool: ToolSchema, rng: random.Random) -> dict[str, Any]:
    """Return random arguments, which match a tool's schema as far as its types tell."""
    parameters = get_parameters(tool)
    return {
        name: sample_value(schema, rng)
        for name, schema in parameters.get("properties", {}).items()
        if name in parameters.get("required", ()) or rng.random() < 1 / 2
    }


def sample_value(schema: Any, rng: random.Random) -> Any:
    """Return a random value of a JSON schema's type, or one of its enumerated values."""
    schema = rng.choice(schema["anyOf"]) if "anyOf" in schema else schema
    if "enum" in schema:
        return rng.choice(schema["enum"])
    scalars: dict[str, Any] = {
        "integer": rng.choice((0, 1, -1, rng.randrange(100), 2**63)),
        "number": rng.choice((0.0, -1.5, rng.random(), 1e300)),
        "boolean": rng.random() < 1 / 2,
        "null": None,
        "array": [],
        "object": {},
    }
    return scalars.get(str(schema.get("type")), sample_text(rng))


@dataclass
class EpisodeRecord:
    """Record of an episode, filled while it runs (`EpisodeObserver`).

    seed: that of the environment. events: all that the episode showed, by name. num_raised: calls
    of tools that raised. late_calls: tools whose calls timed out. end: None without one. error:
    failure of the environment; "" without one.
    """

    prompt: Prompt
    policy: str
    seed: int
    events: list[tuple[str, Any]] = field(default_factory=list)
    num_turns: int = 0
    num_raised: int = 0
    late_calls: list[str] = field(default_factory=list)
    end: TextEnd | None = None
    error: str = ""

    def see_start(self, prompt: Prompt, start: ResetResult) -> None:
        self.events.append(("first observation", list(start.messages)))
        self.events.append(("first state", start.state))

    def see_turn(self, reply: Reply, step: EnvironmentStep) -> None:
        self.num_turns += 1
        self.num_raised += list(step.outcomes).count(CallOutcome.TOOL_ERROR)
        outcomes = zip(reply.calls, step.outcomes, strict=False)  # turns of text have none
        self.late_calls += [call.name for call, how in outcomes if how is CallOutcome.TIMED_OUT]
        seen = {
            "reply": (reply.text, list(reply.calls)),
            "observation": list(step.messages),
            "reward": step.reward,
            "end": step.done,
            "state": step.state,
            "outcomes of calls": list(step.outcomes),
        }
        self.events += [(f"turn {self.num_turns}: {name}", seen[name]) for name in seen]

    @property
    def counts(self) -> bool:
        """False after a failure or past episode_timeout_s: a run would leave the episode out."""
        is_whole = self.end is not None and self.end.reason is not FinishReason.TIMEOUT
        return is_whole and not self.error


def find_first_difference(first: EpisodeRecord, second: EpisodeRecord) -> str:
    """Return how the second episode failed or first differs, with its turn from 1; else ""."""
    if second.error:
        return second.error
    for one, other in zip_longest(first.events, second.events, fillvalue=("end", None)):
        if one != other:
            return f"{one[0]}: {format_returned(one[1])}, then {format_returned(other[1])}"
    return ""


FULL_SCORE = 1.0
"""Score of a solved episode, where no oracle shows it."""
NUM_TOGETHER, NUM_ISOLATED = 32, 8
"""Episodes that are played side by side; with a process each, fewer."""


class EnvironmentProbe:
    """Checks of an environment against its hosts; `run` yields findings as they come.

    prompts: rows of the episodes. open_episodes: episodes that a generator keeps open.
    """

    def __init__(
        self, config: EnvironmentConfig, prompts: Sequence[Prompt], *, open_episodes: int
    ) -> None:
        self._config = config
        self._prompts = prompts
        most = NUM_ISOLATED if config.isolate else NUM_TOGETHER
        self._num_together = min(most, open_episodes)
        self._hosts = EnvironmentHostPool(replace(config, processes=1))

    async def run(self) -> AsyncGenerator[Finding, None]:
        """Yield findings. Raises ConfigError for a class that cannot be used, and EpisodeError if
        its process does not start."""
        try:
            await self._hosts.start()
            description = self._hosts.description
            for finding in describe_class(description):
                yield finding
            records = []
            for policy in (SILENT, RANDOM, *([ORACLE] if description.has_oracle else [])):
                played = [
                    await self._play(policy, prompt, make_environment_seed(0, prompt.uid))
                    for prompt in self._prompts
                ]
                yield describe_episodes(policy, played)
                records += [record for record in played if record.counts]
            for finding in judge_scores(records):
                yield finding
            if not records:
                yield Finding("warn", "repeat", "not compared: no episode came to its end")
                return
            repeated = await self._compare_repeated(records)
            yield repeated
            if repeated.status == "ok":
                yield await self._compare_together(records)
        finally:
            await self._hosts.close()

    async def _play(self, policy: str, prompt: Prompt, seed: int) -> EpisodeRecord:
        """Run an episode to its end; a failure of the environment is part of the record."""
        record = EpisodeRecord(prompt, policy, seed)
        session = self._hosts.open_session(prompt, seed=seed)

        async def ask_oracle(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
            return await session.ask_oracle(messages)

        functions: dict[str, Policy] = {
            SILENT: stay_silent,
            RANDOM: make_random_policy(make_environment_seed(1, prompt.uid)),
            ORACLE: ask_oracle,
        }
        try:
            record.end = await play_text_episode(
                self._config,
                session,
                prompt,
                functions[policy],
                observer=record,
                timeout_s=self._config.episode_timeout_s,
            )
            record.events.append(("score", record.end.score))
        except EpisodeError as error:
            record.error = str(error)
        finally:
            await session.close()
        record.error = record.error or session.close_error
        return record

    async def _compare_repeated(self, records: Sequence[EpisodeRecord]) -> Finding:
        """Play each episode a second time, alone."""
        for first in records:
            second = await self._play(first.policy, first.prompt, first.seed)
            if difference := find_first_difference(first, second):
                return Finding(
                    "fail",
                    "same seed",
                    f"{first.policy} policy, {describe_prompt(first.prompt)}: two episodes differ:"
                    f" {difference}; take all randomness from random.Random(seed) of"
                    " reset(row, seed), or a group compares different tasks",
                )
        return Finding(
            "ok", "same seed", f"{format_quantity(len(records), 'episode')}: equal when repeated"
        )

    async def _compare_together(self, alone: Sequence[EpisodeRecord]) -> Finding:
        """Play episodes side by side, several of each, and compare them with those played alone."""
        chosen = alone[:: math.ceil(2 * len(alone) / self._num_together)]
        firsts = [*chosen] * max(1, self._num_together // len(chosen))
        seconds = await asyncio.gather(*(self._play(r.policy, r.prompt, r.seed) for r in firsts))
        pairs = zip(firsts, map(find_first_difference, firsts, seconds), strict=True)
        different = [(first, difference) for first, difference in pairs if difference]
        if not different:
            return Finding("ok", "together", f"{len(firsts)} episodes side by side are as alone")
        advice = (
            "a process shares global variables, attributes of classes, the generators of random and"
            " numpy.random, os.environ and the working directory among its episodes: keep all state"
            " in the object, draw from random.Random(seed), or set environment.isolate"
        )
        if self._config.isolate:
            advice = "each has a process: they share files, ports or a service; give each its own"
        advice = describe_late_calls(seconds) or advice
        first, difference = different[0]
        return Finding(
            "fail",
            "together",
            f"{len(different)} of {len(firsts)} episodes side by side are not as alone:"
            f" {first.policy} policy, {describe_prompt(first.prompt)}: {difference}; {advice}",
        )


def describe_class(description: EnvironmentDescription) -> Iterator[Finding]:
    """Yield the shape of the class, its tools, and advice if it can score nothing."""
    score = "score(episode)" if description.has_score else "the sum of the turns' rewards"
    shape = "tools" if description.tools else "step(reply)"
    yield Finding("ok", "class", f"{description.place}: {shape}, scored by {score}")
    for tool in description.tools:
        yield Finding("ok", "tool", format_tool(tool))
    if description.note:
        yield Finding("warn", "score", description.note)


def describe_episodes(policy: str, records: Sequence[EpisodeRecord]) -> Finding:
    """Report a policy's episodes: turns, scores and ends, or the first failure."""
    late = describe_late_calls(records)
    if failed := [record for record in records if record.error]:
        first = failed[0]
        return Finding(
            "fail",
            policy,
            f"{len(failed)} of {len(records)} episodes failed, {describe_prompt(first.prompt)}"
            f" after {format_quantity(first.num_turns, 'turn')}: {first.error}; a run repeats such"
            " episodes, then drops their group:"
            f" {late or 'answer a bad reply by an observation or a low reward'}",
        )
    turns = fmean(record.num_turns for record in records)
    ends = [record.end for record in records if record.end]
    scores = [end.score for end in ends]
    reasons = ", ".join(sorted({end.reason.name.lower() for end in ends}))
    num_raised = sum(record.num_raised for record in records)
    raised = f"{format_quantity(num_raised, 'call')} raised"
    facts = [f"ends: {reasons}", raised if num_raised else "", late]
    return Finding(
        "warn" if late else "ok",
        policy,
        f"{format_quantity(len(records), 'episode')}, {turns:.1f} turns,"
        f" scores {min(scores):g} to {max(scores):g}, {'; '.join(filter(None, facts))}",
    )


def describe_late_calls(records: Sequence[EpisodeRecord]) -> str:
    """Return the tools whose calls timed out, with how often; "" without any."""
    late = Counter(name for record in records for name in record.late_calls)
    names = ", ".join(f"{name} ({count})" for name, count in late.items())
    reason = "calls past half of environment.turn_timeout_s time out; many that go on end a process"
    return names and f"{reason}: {names}"


def judge_scores(records: Sequence[EpisodeRecord]) -> Iterator[Finding]:
    """Yield a warning for each policy without sense that gets the full score, and a weak oracle."""
    scores: dict[str, list[float]] = {}
    for record in records:
        if record.end:
            scores.setdefault(record.policy, []).append(record.end.score)
    # Luck solves a task now and then: means are compared, not the best episode.
    means = {policy: fmean(given) for policy, given in scores.items()}
    full = max(scores.get(ORACLE, [FULL_SCORE]))
    oracle = means.pop(ORACLE, math.inf)
    for policy, mean in means.items():
        if mean >= full:
            yield Finding(
                "warn",
                "score",
                f"gives {mean:g} to nonsense: the {policy} policy gets it on average; a run would"
                " teach this",
            )
    if oracle <= (most := max(means.values(), default=0.0)):
        yield Finding(
            "warn",
            "score",
            f"the oracle's mean is {oracle:g}, no more than the mean of a policy without"
            f" sense, {most:g}; check oracle and score",
        )


async def check_model(
    config: EnvironmentConfig, renderer: TurnRenderer, prompts: Sequence[Prompt]
) -> AsyncGenerator[Finding, None]:
    """Yield what a run with the model's chat template would refuse or note."""
    try:
        for note in list_template_notes(renderer, config.max_samples):
            yield Finding("ok", "template", note)
        await check_class(config, renderer, prompts)
        yield Finding(
            "ok", "model", f"{renderer.template.name}: turns, calls and rows can be rendered"
        )
    except ConfigError as error:
        yield Finding("fail", "model", str(error))
