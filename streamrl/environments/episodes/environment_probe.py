"""Probe of an environment: episodes of policies that are no model, before a model meets it."""

import asyncio
import json
import math
import random
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import zip_longest
from statistics import fmean
from typing import Any

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.driver import make_environment_seed
from streamrl.environments.episodes.text_episode import (
    Policy,
    PolicyReply,
    play_text_episode,
)
from streamrl.environments.hosts.host_pool import EnvironmentHostPool
from streamrl.environments.hosts.host_protocol import (
    EnvironmentDescription,
    EnvironmentShape,
    HostOperation,
)
from streamrl.environments.hosts.shared_state import VARIABLE
from streamrl.environments.interface import (
    CallOutcome,
    EnvironmentStep,
    Message,
    ResetResult,
    ToolSchema,
)
from streamrl.environments.tool_calls.tool_schema import format_tool, get_tool_name
from streamrl.errors import EpisodeError
from streamrl.messages import Prompt, describe_prompt
from streamrl.user_code.checks import format_value


class FindingStatus(StrEnum):
    """Status of a finding; FAIL: a run with this environment would drop groups or train wrongly."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """Result of one check of an environment.

    subject: aspect that was checked. text: what was found and, unless it is OK, what to do.
    """

    status: FindingStatus
    subject: str
    text: str


report_ok = partial(Finding, FindingStatus.OK)
report_warning = partial(Finding, FindingStatus.WARN)
report_failure = partial(Finding, FindingStatus.FAIL)

CALL_RATE = 0.8
"""Share of a random policy's turns with calls, in an environment with tools."""
VALID_RATE = 0.6
"""Share of these turns whose call is meant to match the schema."""
FRAGMENTS = (
    *("", "0", "-1", "3.5", "1e999", "nan", "yes", "A", "the", "\n", "\t", "\\", '"', "'", "%s"),
    *("<|im_end|>", "</tool_call>", "{", "]", "()", "```", "$$", "\\boxed{}"),
    *("\u4f60", "\U0001f600"),
)
"""Pieces of random text: what parsers of replies stumble over."""
MAX_FRAGMENTS = 12
NUMBER_RATE = 0.25
"""Share of random texts that are a number, as games of numbers expect."""
LONG_TEXT_RATE, LONG_TEXT_REPEATS = 0.1, 500


async def stay_silent(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PolicyReply:
    """Return an empty turn."""
    return ""


def make_random_policy(seed: int) -> Policy:
    """Return a policy whose turns depend on `seed` and the number of the turn only."""

    async def policy(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PolicyReply:
        rng = random.Random(f"{seed}/{len(messages)}")
        if tools and rng.random() < CALL_RATE:
            name, arguments = sample_call(rng.choice(tools), rng)
            function = {"name": name, "arguments": arguments}
            return {"content": "", "tool_calls": [{"function": function}]}
        return sample_text(rng)

    return policy


def sample_text(rng: random.Random) -> str:
    if rng.random() < NUMBER_RATE:
        return str(rng.randrange(100))
    text = " ".join(rng.choices(FRAGMENTS, k=rng.randint(1, MAX_FRAGMENTS)))
    return text * LONG_TEXT_REPEATS if rng.random() < LONG_TEXT_RATE else text


def sample_call(tool: ToolSchema, rng: random.Random) -> tuple[str, Any]:
    """Return name and arguments of a call, which match the schema as far as its types tell.

    In others the name is unknown, an argument is unknown, or the arguments are no JSON.
    """
    parameters = tool["function"].get("parameters") or {}
    arguments = {
        name: sample_value(schema, rng)
        for name, schema in parameters.get("properties", {}).items()
        if name in parameters.get("required", ()) or rng.random() < VALID_RATE
    }
    name = get_tool_name(tool)
    if rng.random() < VALID_RATE:
        return name, arguments
    return rng.choice(
        [(f"{name}_", arguments), (name, {"unknown": 1}), (name, json.dumps(arguments)[:-1])]
    )


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

    seed: that of the environment. events: all that the episode showed, by name. score: None without
    an end. error: failure that ended it; "" if none did. close_error: failure of `close` after its
    end. seconds: longest time of each operation.
    """

    prompt: Prompt
    policy: str
    seed: int = 0
    start: ResetResult = field(default_factory=ResetResult)
    steps: list[EnvironmentStep] = field(default_factory=list)
    events: list[tuple[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    score: float | None = None
    error: str = ""
    close_error: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def see(self, operation: HostOperation, arguments: Any, result: Any, seconds: float) -> None:
        if operation is HostOperation.RESET:
            self.start = result
            self.events.append(("first observation", list(result.messages)))
        elif operation is HostOperation.STEP:
            (reply,) = arguments
            self.steps.append(result)
            turn = f"turn {len(self.steps)}"
            self.events += [
                (f"{turn}: reply", (reply.text, list(reply.calls))),
                (f"{turn}: observation", list(result.messages)),
                (f"{turn}: reward", result.reward),
                (f"{turn}: end", result.done),
                (f"{turn}: outcomes of calls", list(result.outcomes)),
            ]
        elif operation is HostOperation.SCORE:
            self.finish_reason, self.score = arguments[0].finish_reason, result
            self.events.append(("score", result))
        else:
            return
        name = operation.value
        self.seconds[name] = max(seconds, self.seconds.get(name, 0.0))

    @property
    def place(self) -> str:
        """Where an episode stopped, in words."""
        if "reset" not in self.seconds:
            return "at its reset"
        is_over = bool(self.steps) and self.steps[-1].done
        return "at its score" if is_over else f"at turn {len(self.steps) + 1}"


def find_first_difference(first: EpisodeRecord, second: EpisodeRecord) -> str:
    """Return the first difference of two episodes, with its turn from 1; "" if they are equal."""
    for one, other in zip_longest(first.events, second.events, fillvalue=("end", None)):
        if one != other:
            return f"{one[0]}: {format_value(one[1])}, then {format_value(other[1])}"
    return ""


SILENT, RANDOM, ORACLE = "silent", "random", "oracle"
FULL_SCORE = 1.0
"""Score of a solved episode, where no oracle shows it."""
NUM_TOGETHER, NUM_ISOLATED = 32, 8
"""Episodes that are played side by side; with a process each, fewer."""
NUM_OTHER_SEEDS = 3
"""Seeds with which an episode is repeated, until it differs."""
SLOW_SHARE = 0.5
"""Share of a deadline from which an operation counts as slow: machines of a run are busier."""


class EnvironmentProbe:
    """Checks of an environment against its hosts; `run` yields findings as they come.

    prompts: rows of the episodes. open_episodes: episodes that a generator keeps open.
    records: episodes so far.
    """

    def __init__(
        self, config: EnvironmentConfig, prompts: Sequence[Prompt], *, open_episodes: int
    ) -> None:
        self._config = config
        self._prompts = prompts
        most = NUM_ISOLATED if config.isolate else NUM_TOGETHER
        self._num_together = min(most, open_episodes)
        self._hosts = EnvironmentHostPool(replace(config, processes=1))
        self._is_reproducible = True
        self._changes: list[set[str]] = []
        """Parts of the shared state that each episode changed which was played alone."""
        self.records: list[EpisodeRecord] = []

    async def run(self) -> AsyncGenerator[Finding, None]:
        """Yield findings. Raises ConfigError for a class that cannot be used, and EpisodeError if
        its process does not start."""
        try:
            await self._hosts.start()
            for finding in describe_class(self.description):
                yield finding
            policies = [SILENT, RANDOM, *([ORACLE] if self.description.has_oracle else [])]
            for policy in policies:
                records = [await self.play(policy, prompt) for prompt in self._prompts]
                self.records += records
                yield describe_episodes(policy, records)
            for finding in judge_records(self.records, self._config):
                yield finding
            complete = [record for record in self.records if not record.error]
            if not complete:
                yield report_warning("repeat", "not compared: no episode came to its end")
                return
            yield await self._compare_same_seed(complete)
            yield await self._compare_seeds(complete)
            if self._is_reproducible:
                yield await self._compare_together(complete)
            yield await self._probe_crash(complete[0])
        finally:
            await self._hosts.close()

    @property
    def description(self) -> EnvironmentDescription:
        return self._hosts.description

    async def play(self, policy: str, prompt: Prompt, *, seed_offset: int = 0) -> EpisodeRecord:
        """Run an episode alone to its end; a failure of the environment is part of the record."""
        seed = make_environment_seed(0, prompt.uid) + seed_offset
        return await self._play(policy, prompt, seed, is_alone=True)

    async def _play(
        self, policy: str, prompt: Prompt, seed: int, *, is_alone: bool = False
    ) -> EpisodeRecord:
        record = EpisodeRecord(prompt, policy, seed)
        session = self._hosts.open_session(prompt, seed=seed)
        session.observer, session.is_watched = record, is_alone and not self._config.isolate

        async def ask_oracle(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
            return await session.ask_oracle(messages)

        functions: dict[str, Policy] = {
            SILENT: stay_silent,
            RANDOM: make_random_policy(make_environment_seed(1, prompt.uid)),
            ORACLE: ask_oracle,
        }
        timeout_s = self._config.episode_timeout_s
        try:
            await play_text_episode(
                self._config, session, prompt, functions[policy], timeout_s=timeout_s
            )
        except EpisodeError as error:
            record.error = str(error)
        finally:
            await session.close()
        record.close_error = session.close_error
        if is_alone:
            self._changes.append({*session.changes})
        return record

    async def _compare_same_seed(self, complete: Sequence[EpisodeRecord]) -> Finding:
        subject = "same seed"
        for first in complete:
            second = await self.play(first.policy, first.prompt)
            if difference := second.error or find_first_difference(first, second):
                self._is_reproducible = False
                return report_failure(
                    subject,
                    f"{first.policy} policy, {describe_prompt(first.prompt)}: two episodes differ:"
                    f" {difference}{format_changes(set().union(*self._changes))}; take all"
                    " randomness from random.Random(seed) of reset(row, seed), or a group compares"
                    " different tasks",
                )
        return report_ok(subject, f"{len(complete)} episodes are equal when they are repeated")

    async def _compare_seeds(self, complete: list[EpisodeRecord]) -> Finding:
        """Repeat the last episode with other seeds, until one differs; add them to the others."""
        subject = "other seed"
        if not self.description.takes_seed:
            return report_ok(subject, "reset takes no seed: the row is the whole task")
        first = complete[-1]
        for offset in range(1, NUM_OTHER_SEEDS + 1):
            second = await self.play(first.policy, first.prompt, seed_offset=offset)
            complete += [] if second.error else [second]
            if difference := second.error or find_first_difference(first, second):
                return report_ok(subject, f"changes the episode: {difference}")
        return report_warning(
            subject,
            f"{NUM_OTHER_SEEDS + 1} seeds gave the same episode; right if the row is the whole"
            " task: otherwise draw the task from the seed of reset(row, seed)",
        )

    async def _compare_together(self, alone: Sequence[EpisodeRecord]) -> Finding:
        """Play episodes side by side, several of each, and compare them with those played alone."""
        chosen = alone[:: math.ceil(2 * len(alone) / self._num_together)]
        firsts = [*chosen] * max(1, self._num_together // len(chosen))
        records = await asyncio.gather(*(self._play(r.policy, r.prompt, r.seed) for r in firsts))
        differences = [
            (first, difference)
            for first, second in zip(firsts, records, strict=True)
            if (difference := second.error or find_first_difference(first, second))
        ]
        return judge_together(len(firsts), differences, self._changes, self._config)

    async def _probe_crash(self, before: EpisodeRecord) -> Finding:
        """Kill the process of an open session, and run the next episode."""
        session = self._hosts.open_session(before.prompt, seed=0)
        try:
            await session.reset()
            await session.kill_host()
        finally:
            await session.close()
        after = await self.play(before.policy, before.prompt)
        happened = "after its process was killed in an episode, the next one"
        difference = find_first_difference(before, after) if self._is_reproducible else ""
        if problem := after.error or difference:
            return report_failure(
                "crash",
                f"{happened} fails or differs: {problem}; keep no state outside of the object"
                " (files, ports, locks), or clear it in reset",
            )
        return report_ok("crash", f"{happened} works")


def describe_class(description: EnvironmentDescription) -> Iterator[Finding]:
    """Yield the shape of the class, its tools, and advice if it can score nothing."""
    is_tools = description.shape is EnvironmentShape.TOOLS
    score = "score(episode)" if description.has_score else "the sum of the turns' rewards"
    shape = "tools" if is_tools else "step(reply)"
    yield report_ok("class", f"{description.place}: {shape}, scored by {score}")
    for tool in description.tools:
        yield report_ok("tool", format_tool(tool))
    if description.note:
        yield report_warning("score", description.note)


def describe_episodes(policy: str, records: Sequence[EpisodeRecord]) -> Finding:
    """Report a policy's episodes: turns, scores and ends, or the first failure."""
    failed = [record for record in records if record.error]
    if failed:
        first = failed[0]
        return report_failure(
            policy,
            f"{len(failed)} of {len(records)} episodes failed, {describe_prompt(first.prompt)}"
            f" {first.place}: {first.error}; answer a bad reply by an observation or a low reward:"
            " a run repeats such episodes, then drops their group",
        )
    turns = fmean(len(record.steps) for record in records)
    scores = [record.score for record in records if record.score is not None]
    shown = f"scores {min(scores):g} to {max(scores):g}" if scores else "no score"
    reasons = ", ".join(sorted({record.finish_reason or "timeout" for record in records}))
    steps = [step for record in records for step in record.steps]
    raised = sum(list(step.outcomes).count(CallOutcome.TOOL_ERROR) for step in steps)
    errors = f"; {raised} calls raised" if raised else ""
    return report_ok(
        policy, f"{len(records)} episodes, {turns:.1f} turns, {shown}, ends: {reasons}{errors}"
    )


def judge_records(records: Sequence[EpisodeRecord], config: EnvironmentConfig) -> Iterator[Finding]:
    """Yield findings on scores, failures of `close`, and the slowest answers."""
    yield from judge_scores(records)
    failed = [record for record in records if record.close_error]
    if failed:
        yield report_failure(
            "close",
            f"{len(failed)} of {len(records)} episodes: {failed[0].close_error}; a close that hangs"
            " costs its process, with all episodes in it",
        )
    slowest: dict[str, float] = {}
    for record in records:
        for name, seconds in record.seconds.items():
            slowest[name] = max(seconds, slowest.get(name, 0.0))
    limit_s = config.turn_timeout_s
    text = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in slowest.items())
    text = f"slowest {text}; environment.turn_timeout_s={limit_s:g}"
    if max(slowest.values(), default=0.0) > SLOW_SHARE * limit_s:
        yield report_warning("time", f"{text}; a busy machine will miss it: raise it")
    elif slowest:
        yield report_ok("time", text)


def judge_scores(records: Sequence[EpisodeRecord]) -> Iterator[Finding]:
    """Yield a warning for each policy without sense that gets the full score, and a weak oracle."""
    scores = {
        policy: [r.score for r in records if r.policy == policy and r.score is not None]
        for policy in (SILENT, RANDOM, ORACLE)
    }
    # Luck solves a task now and then: means are compared, not the best episode.
    means = {policy: fmean(given) for policy, given in scores.items() if given}
    full = max(scores[ORACLE], default=FULL_SCORE)
    oracle = means.pop(ORACLE, math.inf)
    for policy, mean in means.items():
        if mean >= full:
            yield report_warning(
                "score",
                f"gives {mean:g} to nonsense: the {policy} policy gets it on average; a run would"
                " teach this",
            )
    most = max(means.values(), default=0.0)
    if oracle <= most:
        yield report_warning(
            "score",
            f"the oracle's mean is {oracle:g}, no more than the mean of a policy without"
            f" sense, {most:g}; check oracle and score",
        )


def judge_together(
    num_played: int,
    differences: Sequence[tuple[EpisodeRecord, str]],
    changes: Sequence[set[str]],
    config: EnvironmentConfig,
) -> Finding:
    """Report the episodes that differ side by side, and what they share.

    differences: episodes as played alone, and how the ones side by side differ. changes: parts of
    the process's state that each episode changed which was played alone.
    """
    subject, advice = "together", "keep all state in the object, draw from random.Random(seed)"
    advice += ", or set environment.isolate"
    if config.isolate:
        advice = "each has a process: they share files, ports or a service; give each its own"
    if differences:
        first, difference = differences[0]
        return report_failure(
            subject,
            f"{len(differences)} of {num_played} episodes side by side are not as alone:"
            f" {first.policy} policy, {describe_prompt(first.prompt)}: {difference}"
            f"{format_changes(set().union(*changes))}; {advice}",
        )
    # An import may change settings in the first episode.
    settings = {name for name in set().union(*changes[1:]) if not name.startswith(VARIABLE)}
    text = f"{num_played} episodes side by side are as alone"
    if settings:
        return report_warning(subject, f"{text}, by chance{format_changes(settings)}; {advice}")
    return report_ok(subject, text)


def format_changes(names: Collection[str]) -> str:
    """Return what episodes change of the state that they share, as a clause; "" without any."""
    return f"; a process shares {', '.join(sorted(names))} among its episodes" if names else ""
