"""Probe of an environment: episodes of scripted policies, seeds, deadlines, crash, memory."""

import asyncio
import json
import math
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

import psutil

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.driver import make_environment_seed
from streamrl.environments.hosts.host_pool import EnvironmentHostPool
from streamrl.environments.hosts.host_protocol import EnvironmentDescription, EnvironmentShape
from streamrl.environments.hosts.shared_state import VARIABLE
from streamrl.environments.interface import Message, ToolSchema
from streamrl.environments.probing.episode_record import EpisodeRecord, find_first_difference
from streamrl.environments.probing.finding import (
    Finding,
    report_failure,
    report_ok,
    report_warning,
)
from streamrl.environments.scripted.observed_hosts import ObservedHosts
from streamrl.environments.scripted.text_episode import Policy, PolicyReply, make_text_driver
from streamrl.environments.tool_calls.tool_schema import get_tool_name
from streamrl.environments.tool_calls.tool_signature import format_tool
from streamrl.errors import ConfigError, EpisodeError
from streamrl.files.bounded_read import MIB
from streamrl.messages import Prompt, describe_prompt
from streamrl.user_code.checks import format_value
from streamrl.user_code.pool.proc_stats import ProcessTable

CALL_RATE = 0.8
"""Share of a random policy's turns with calls, in an environment with tools."""
VALID_RATE = 0.6
"""Share of these turns whose call is meant to match the schema."""
FRAGMENTS = (
    *("", "0", "-1", "3.5", "1e999", "nan", "yes", "A", "the", "\n", "\t", "\\", '"', "'", "%s"),
    *(
        "<|im_end|>",
        "</tool_call>",
        "{",
        "]",
        "()",
        "```",
        "$$",
        "\\boxed{}",
        "\u4f60",
        "\U0001f600",
    ),
)
"""Pieces of random text: what parsers of replies stumble over."""
MAX_FRAGMENTS = 12
NUMBER_RATE = 0.25
"""Share of random texts that are a number, as games of numbers expect."""
LONG_TEXT_RATE = 0.1
LONG_TEXT_REPEATS = 500
MAX_DEPTH = 3
"""Depth below which random arguments are empty lists and objects."""


async def stay_silent(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PolicyReply:
    """Return an empty turn."""
    return ""


def make_random_policy(seed: int) -> Policy:
    """Return a policy whose turns depend on `seed` and the number of the turn only."""

    async def policy(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PolicyReply:
        rng = random.Random(f"{seed}/{len(messages)}")
        if tools and rng.random() < CALL_RATE:
            is_valid = rng.random() < VALID_RATE
            return make_call_message([sample_call(rng.choice(tools), rng, is_valid=is_valid)])
        return sample_text(rng)

    return policy


def sample_text(rng: random.Random) -> str:
    if rng.random() < NUMBER_RATE:
        return str(rng.randrange(100))
    text = " ".join(rng.choices(FRAGMENTS, k=rng.randint(1, MAX_FRAGMENTS)))
    return text * LONG_TEXT_REPEATS if rng.random() < LONG_TEXT_RATE else text


def make_call_message(calls: Sequence[tuple[str, Any]]) -> Message:
    """Return an assistant message with calls, as (name, arguments)."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {"content": "", "tool_calls": [{"function": function} for function in functions]}


def sample_call(tool: ToolSchema, rng: random.Random, *, is_valid: bool) -> tuple[str, Any]:
    """Return name and arguments of a call.

    is_valid: the arguments match the schema, as far as its types tell; otherwise the name is
    unknown, an argument is missing or unknown, or the arguments are no JSON.
    """
    parameters = tool["function"].get("parameters") or {}
    properties, required = parameters.get("properties", {}), parameters.get("required", ())
    definitions = parameters.get("$defs", {})
    arguments = {
        name: sample_value(schema, rng, definitions)
        for name, schema in properties.items()
        if name in required or rng.random() < VALID_RATE
    }
    name = get_tool_name(tool)
    if is_valid:
        return name, arguments
    fault = rng.randrange(3)
    if fault == 0:
        return f"{name}_{rng.randrange(10)}", arguments
    if fault == 1:
        return name, {"unknown": sample_text(rng)}
    return name, json.dumps(arguments)[: rng.randint(0, 8)] + "{"


def sample_value(
    schema: Any, rng: random.Random, definitions: Mapping[str, Any], depth: int = 0
) -> Any:
    """Return a random value of a JSON schema's type, or one of its enumerated values."""
    schema = schema if isinstance(schema, Mapping) else {}
    if branches := schema.get("anyOf"):
        return sample_value(rng.choice(branches), rng, definitions, depth + 1)
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return sample_value(definitions.get(name), rng, definitions, depth + 1)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum") or [schema.get("const")])
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "array":
        count = rng.randrange(3) if depth < MAX_DEPTH else 0
        items = schema.get("items")
        return [sample_value(items, rng, definitions, depth + 1) for _ in range(count)]
    if kind == "object":
        inner = schema.get("properties", {}) if depth < MAX_DEPTH else {}
        return {key: sample_value(part, rng, definitions, depth + 1) for key, part in inner.items()}
    scalars = {
        "integer": rng.choice((0, 1, -1, rng.randrange(100), 2**63)),
        "number": rng.choice((0.0, -1.5, rng.random(), 1e300)),
        "boolean": rng.random() < 1 / 2,
        "null": None,
    }
    return scalars.get(kind, sample_text(rng))


SILENT, RANDOM, ORACLE = "silent", "random", "oracle"
FULL_SCORE = 1.0
"""Score of a solved episode, where no oracle shows it."""
NUM_OPEN_SESSIONS = 50
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
        self._open_episodes = open_episodes
        self._hosts = EnvironmentHostPool(replace(config, processes=1))
        self._is_reproducible = True
        self._changes: list[set[str]] = []
        """Parts of the shared state that each episode changed which was played alone."""
        self._others: list[EpisodeRecord] = []
        """Episodes with other seeds, played alone."""
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
            for finding in judge_scores(self.records, self.description):
                yield finding
            for finding in judge_closing(self.records):
                yield finding
            yield await self._compare_same_seed(policies)
            yield await self._compare_seeds(policies[::-1])
            yield await self._compare_together()
            for finding in judge_seconds(self.records, self._config):
                yield finding
            yield await self._probe_crash()
            yield await self._probe_memory()
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
        record = EpisodeRecord(prompt, policy, seed=seed)
        hosts = ObservedHosts(self._hosts, record, is_alone and not self._config.isolate)

        async def ask_oracle(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
            assert hosts.session is not None
            return await hosts.session.ask_oracle(messages)

        functions: dict[str, Policy] = {
            SILENT: stay_silent,
            RANDOM: make_random_policy(make_environment_seed(1, prompt.uid)),
            ORACLE: ask_oracle,
        }
        driver = make_text_driver(
            self._config, hosts, functions[policy], timeout_s=self._config.episode_timeout_s
        )
        try:
            await driver.run_group(
                prompt,
                seeds=[0],
                environment_seed=seed,
                compute=lambda **facts: nullcontext({}),
            )
        # ConfigError: an observation that no chat template could show.
        except (EpisodeError, ConfigError) as error:
            record.error = str(error)
        if hosts.session is not None:
            record.close_error = hosts.session.close_error
            if is_alone:
                self._changes.append({*hosts.session.changes})
        return record

    async def _compare_same_seed(self, policies: Sequence[str]) -> Finding:
        subject = "same seed"
        complete = [record for record in self.records if not record.error]
        for first in complete:
            second = await self.play(first.policy, first.prompt)
            difference = second.error or find_first_difference(first, second)
            if difference:
                self._is_reproducible = False
                return report_failure(
                    subject,
                    f"{first.policy} policy, {describe_prompt(first.prompt)}: two episodes differ:"
                    f" {difference}{format_changes(set().union(*self._changes))}; take all"
                    " randomness from random.Random(seed) of reset(row, seed), or a group compares"
                    " different tasks",
                )
        if not complete:
            return report_warning(subject, "not compared: no episode came to its end")
        return report_ok(subject, f"{len(complete)} episodes are equal when they are repeated")

    async def _compare_seeds(self, policies: Sequence[str]) -> Finding:
        """Repeat an episode of each policy with other seeds, until one differs."""
        subject = "other seed"
        if not self.description.takes_seed:
            return report_ok(subject, "reset takes no seed: the row is the whole task")
        firsts = [
            next((r for r in self.records if r.policy == policy and not r.error), None)
            for policy in policies
        ]
        known = [first for first in firsts if first is not None]
        if not known:
            return report_warning(subject, "not compared: no episode came to its end")
        for first in known:
            for offset in range(1, NUM_OTHER_SEEDS + 1):
                second = await self.play(first.policy, first.prompt, seed_offset=offset)
                self._others.append(second)
                difference = second.error or find_first_difference(first, second)
                if difference:
                    if first.start == second.start:
                        difference += "; two seeds gave the same first observation"
                    return report_ok(subject, f"changes the episode: {difference}")
        return report_warning(
            subject,
            f"{NUM_OTHER_SEEDS + 1} seeds gave the same episode of each policy; right if the row"
            " is the whole task: otherwise draw the task from the seed of reset(row, seed)",
        )

    async def _compare_together(self) -> Finding:
        """Play episodes side by side, several of each, and compare them with those played alone."""
        subject = "together"
        alone = [record for record in (*self.records, *self._others) if not record.error]
        if not alone:
            return report_warning(subject, "not compared: no episode came to its end")
        count = min(NUM_ISOLATED if self._config.isolate else NUM_TOGETHER, self._open_episodes)
        chosen = alone[:: math.ceil(2 * len(alone) / count)]
        firsts = chosen * max(1, count // len(chosen))
        records = await asyncio.gather(*(self._play(r.policy, r.prompt, r.seed) for r in firsts))
        differences = [
            (first, difference)
            for first, second in zip(firsts, records, strict=True)
            if (difference := second.error or find_first_difference(first, second))
            and (second.error or self._is_reproducible)
        ]
        if not (differences or self._is_reproducible):
            return report_warning(
                subject, f"{len(firsts)} side by side: none fails; not compared: two alone differ"
            )
        return judge_together(len(firsts), differences, self._changes, self._config)

    async def _probe_crash(self) -> Finding:
        """Kill the process of an open session, and run the next episode."""
        subject = "crash"
        before = next((record for record in self.records if not record.error), None)
        if before is None:
            return report_warning(subject, "not tried: no episode came to its end")
        session = self._hosts.open_session(before.prompt, seed=0)
        try:
            await session.reset()
            await session.kill_host()
        finally:
            await session.close()
        after = await self.play(before.policy, before.prompt)
        happened = "after its process was killed in an episode, the next one"
        advice = "keep no state outside of the object (files, ports, locks), or clear it in reset"
        if after.error:
            return report_failure(subject, f"{happened} fails: {after.error}; {advice}")
        difference = find_first_difference(before, after) if self._is_reproducible else ""
        if difference:
            return report_failure(subject, f"{happened} differs: {difference}; {advice}")
        return report_ok(subject, f"{happened} works")

    async def _probe_memory(self) -> Finding:
        """Measure the memory of a process with many open sessions."""
        subject = "memory"
        count = 1 if self._config.isolate else NUM_OPEN_SESSIONS
        table = ProcessTable()
        async with AsyncExitStack() as stack:
            sizes = []
            for number in (1, count):
                sessions = []
                for _ in range(number):
                    sessions.append(self._hosts.open_session(self._prompts[0], seed=0))
                    stack.push_async_callback(sessions[-1].close)
                try:
                    await asyncio.gather(*(session.reset() for session in sessions))
                except EpisodeError as error:
                    return report_failure(subject, f"{count} open episodes: {error}")
                sizes.append(table.measure_tree_memory(sessions[-1].host_pid))
        per_episode = max(0, sizes[1] - sizes[0]) / count
        num_processes = 1 if self._config.isolate else self._config.processes
        num_open = math.ceil(self._open_episodes / num_processes)
        return judge_memory(sizes[0], per_episode, num_open, self._config)


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
            f" {first.place}: {first.error}; {first.advice}: a run repeats such episodes, then"
            " drops their group",
        )
    turns = sum(len(record.steps) for record in records) / len(records)
    scores = [record.score for record in records if record.score is not None]
    reasons = ", ".join(sorted({record.finish_reason or "timeout" for record in records}))
    raised = [text for record in records for text in record.list_tool_errors()]
    errors = f"; {len(raised)} calls raised, the first {format_value(raised[0])}" if raised else ""
    shown = f"scores {min(scores):g} to {max(scores):g}" if scores else "no score"
    return report_ok(
        policy, f"{len(records)} episodes, {turns:.1f} turns, {shown}, ends: {reasons}{errors}"
    )


def judge_scores(
    records: Sequence[EpisodeRecord], description: EnvironmentDescription
) -> Iterator[Finding]:
    """Yield a warning for each policy without sense that gets the full score, and a weak oracle."""

    def list_scores(policy: str) -> list[float]:
        return [r.score for r in records if r.policy == policy and r.score is not None]

    means = {p: fmean(list_scores(p)) for p in (SILENT, RANDOM, ORACLE) if list_scores(p)}
    full = max(list_scores(ORACLE), default=FULL_SCORE)
    for policy in (SILENT, RANDOM):
        # Luck solves a task now and then: means are compared, not the best episode.
        if (mean := means.get(policy, -math.inf)) >= full:
            yield report_warning(
                "score",
                f"gives {mean:g} to nonsense: the {policy} policy gets it on average; a run would"
                " teach this",
            )
    most = max(means.get(SILENT, 0.0), means.get(RANDOM, 0.0))
    if means.get(ORACLE, math.inf) <= most:
        yield report_warning(
            "score",
            f"the oracle's mean is {means[ORACLE]:g}, no more than the mean of a policy without"
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


def judge_closing(records: Sequence[EpisodeRecord]) -> Iterator[Finding]:
    """Yield a failure if `close` raised, or did not return in time."""
    failed = [record for record in records if record.close_error]
    if failed:
        yield report_failure(
            "close",
            f"{len(failed)} of {len(records)} episodes: {failed[0].close_error}; a close that hangs"
            " costs its process, with all episodes in it",
        )


def judge_seconds(records: Sequence[EpisodeRecord], config: EnvironmentConfig) -> Iterator[Finding]:
    """Yield the slowest answers, compared with the deadline."""
    slowest: dict[str, float] = {}
    for record in records:
        for name, seconds in record.seconds.items():
            slowest[name] = max(seconds, slowest.get(name, 0.0))
    if not slowest:
        return
    limit_s = config.turn_timeout_s
    text = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in slowest.items())
    report: Callable[[str, str], Finding] = report_ok
    advice = ""
    if max(slowest.values()) > SLOW_SHARE * limit_s:
        report, advice = report_warning, "; a busy machine will miss it: raise it"
    yield report("time", f"slowest {text}; environment.turn_timeout_s={limit_s:g}{advice}")


def judge_memory(
    first_bytes: float, per_episode: float, num_open: int, config: EnvironmentConfig
) -> Finding:
    """Compare the memory that a process will need with its limit, or with `isolate` the machine's.

    first_bytes: memory of a process with one open episode. per_episode: memory of each further one,
    bytes. num_open: open episodes of a process in a run, with `isolate` those of a generator.
    """
    text = f"a process with an open episode has {first_bytes / MIB:.0f} MiB"
    if config.isolate:
        needed, limit = first_bytes * num_open, float(psutil.virtual_memory().total)
        text += (
            f", and a generator's {num_open} open episodes are as many processes:"
            f" {needed / MIB:.0f} MiB of this machine's {limit / MIB:.0f}"
        )
    else:
        needed, limit = first_bytes + per_episode * num_open, float(config.memory_bytes)
        text += (
            f", each further episode {per_episode / MIB:.3f} MiB; a run's {num_open} per process"
            f" need {needed / MIB:.0f} MiB"
        )
    text += f"; environment.memory_gib={config.memory_gib:g}"
    if first_bytes > config.memory_bytes:
        return report_failure("memory", f"{text}: not even one episode fits: raise it")
    if needed > limit:
        raised = "" if config.isolate else "raise it, or "
        return report_warning("memory", f"{text}: {raised}lower environment.open_episodes")
    return report_ok("memory", text)
