"""Driver of episodes: one loop for training and evaluation.

    reset -> [ sample a turn -> parse -> step -> append the observation ] ... -> score

The policy's turns and the environment's answers alternate within an episode; episodes run side by
side as asyncio tasks. A turn holds a decode slot and the device lease while it is sampled; an
episode that waits for its environment holds neither, so other turns and, on shared devices, the
trainer use them.
"""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.data.chat_template import load_chat_template, load_tokenizer
from streamrl.data.config import DataConfig
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.host_pool import (
    EnvironmentHostPool,
    HostedSession,
    close_pools,
    start_pools,
)
from streamrl.environments.interface import (
    CallOutcome,
    EnvironmentStep,
    EpisodeSummary,
    Message,
    ResetResult,
    ToolSchema,
)
from streamrl.environments.rendering.turn_renderer import BridgeTokens, TurnRenderer
from streamrl.environments.tool_calls.call_formats import (
    TEXT_FORMAT,
    CallFormat,
    detect_call_format,
    make_assistant_message,
    make_call_format,
)
from streamrl.errors import ConfigError, EpisodeError, GenerationError
from streamrl.files.hf_config import read_eos_token_ids
from streamrl.messages import (
    EPISODE_COLUMN,
    ROLLOUT_TOKEN_COLUMNS,
    STATE_COLUMN,
    TRUNCATIONS,
    Array,
    Columns,
    FinishReason,
    Prompt,
    Rollout,
    TokenSource,
    TurnOutcome,
    derive_continuation_seed,
    derive_seed,
    describe_prompt,
    extend_wide,
    make_empty_rollout,
    rollouts_to_columns,
)
from streamrl.rewards.interface.completion import encode_conversations
from streamrl.rewards.metric_means import MetricSums
from streamrl.user_code.concurrent_calls import map_concurrently
from streamrl.user_code.service_gate import ServiceGate, get_gate, request_service, wait_out_outages

if TYPE_CHECKING:
    from streamrl.engines.generation.generation_engine import GenerationEngine


_TURN_OUTCOMES = {
    CallOutcome.OK: TurnOutcome.CALLED,
    CallOutcome.MALFORMED: TurnOutcome.MALFORMED,
    CallOutcome.UNKNOWN_TOOL: TurnOutcome.MALFORMED,
    CallOutcome.WRONG_ARGUMENTS: TurnOutcome.MALFORMED,
    CallOutcome.TOOL_ERROR: TurnOutcome.TOOL_ERROR,
    CallOutcome.TIMED_OUT: TurnOutcome.TIMED_OUT,
}


SHOWN_TOKENS = 8
"""Tokens shown from the first difference of two prefixes."""


@dataclass(frozen=True, eq=False)
class EpisodeSample:
    """Training sample of an episode: all of its turns, or those after a rewritten conversation.

    rollout: all tokens, [T]. token_source: code of TokenSource, int8 [T].
    turn_ends: end of each turn's sampled tokens, ascending offsets in [1, T], one per turn of the
        sample.
    """

    rollout: Rollout
    token_source: Array
    turn_ends: Sequence[int]


@dataclass(eq=False)
class Episode:
    """Episode as it is filled turn by turn.

    messages: the whole conversation, the row's messages included.
    turn_rewards, turn_outcomes, turn_states: one entry per turn.
    call_outcomes: one entry per tool call.
    score: the environment's score, at the end.
    samples: at the end at least one, in the order of their turns; all have the episode's finish
        reason.
    state: number of the environment's state before the next turn; 0: unknown.
    """

    messages: list[Message]
    turn_rewards: list[float] = field(default_factory=list)
    turn_outcomes: list[TurnOutcome] = field(default_factory=list)
    call_outcomes: list[CallOutcome] = field(default_factory=list)
    score: float = 0.0
    samples: Sequence[EpisodeSample] = ()
    turn_states: list[int] = field(default_factory=list)
    state: int = 0

    def add_turn(self, result: EnvironmentStep) -> None:
        """Add what the environment gave for a turn; its outcome is the worst of its calls."""
        self.turn_states.append(self.state)
        self.state = result.state
        outcomes = [_TURN_OUTCOMES[outcome] for outcome in result.outcomes]
        self.turn_rewards.append(result.reward)
        self.turn_outcomes.append(max(outcomes, default=TurnOutcome.SPOKE))
        self.call_outcomes += result.outcomes

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].rollout.finish_reason

    @property
    def num_invalid_calls(self) -> int:
        """Number of calls that could not be parsed, name no tool, or do not fit its schema."""
        return sum(
            _TURN_OUTCOMES[outcome] is TurnOutcome.MALFORMED for outcome in self.call_outcomes
        )


def episodes_to_columns(
    episodes: Sequence[Episode], *, may_split: bool = False
) -> dict[str, Array]:
    """Concatenate the episodes of a group into ROLLOUT_COLUMNS, EPISODE_COLUMNS and STATE_COLUMN.

    may_split: with EPISODE_COLUMN, as an episode may have several samples. Columns with an entry
    per rollout repeat those of an episode for each of its samples, except for lengths and turns.
    """
    counts = [len(episode.samples) for episode in episodes]
    samples = [sample for episode in episodes for sample in episode.samples]
    turns = [end for sample in samples for end in sample.turn_ends]
    rewards = [reward for episode in episodes for reward in episode.turn_rewards]
    states = [state for episode in episodes for state in episode.turn_states]
    outcomes = [outcome for episode in episodes for outcome in episode.turn_outcomes]
    calls = np.array([len(episode.call_outcomes) for episode in episodes], np.int32)
    invalid = np.array([episode.num_invalid_calls for episode in episodes], np.int32)
    scores = np.array([episode.score for episode in episodes], np.float32)
    columns = rollouts_to_columns([sample.rollout for sample in samples]) | {
        "token_source": np.concatenate([sample.token_source for sample in samples]),
        "num_turns": np.array([len(sample.turn_ends) for sample in samples], np.int32),
        "turn_ends": np.array(turns, np.int32),
        "turn_rewards": np.array(rewards, np.float32),
        STATE_COLUMN: np.array(states, np.int64),
        "turn_outcomes": np.array(outcomes, np.int8),
        "num_calls": np.repeat(calls, counts),
        "num_invalid_calls": np.repeat(invalid, counts),
        "environment_scores": np.repeat(scores, counts),
        "conversations": encode_conversations([episode.messages for episode in episodes]),
    }
    if may_split:
        columns[EPISODE_COLUMN] = np.repeat(np.arange(len(episodes), dtype=np.int32), counts)
    return columns


class EpisodeTokens:
    """Tokens of a running episode: appended turn by turn, never made again.

    prompt_ids: int32 [P]. num_appended: length of the episode if all its turns were appended, in
        one sample.
    """

    def __init__(self, prompt_ids: Array) -> None:
        self._num_prompt = self.num_appended = len(prompt_ids)
        self._finished: list[EpisodeSample] = []
        self._open_sample(prompt_ids)

    def _open_sample(self, prompt_ids: Array) -> None:
        self._rollout = make_empty_rollout(prompt_ids)
        self._source = np.full(len(prompt_ids), TokenSource.PROMPT, np.int8)
        self._turn_ends: list[int] = []

    @property
    def token_ids(self) -> Array:
        """Tokens of the current sample, which the next turn continues."""
        return self._rollout.token_ids

    @property
    def num_samples(self) -> int:
        return len(self._finished) + 1

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens after the prompt: sampled, scaffold and observations."""
        return self.num_appended - self._num_prompt

    def start_sample(self, prompt_ids: Array, bridge: BridgeTokens) -> None:
        """Begin a new sample with a rewritten conversation; its tokens are not trained.

        prompt_ids: int32 [P]. bridge: tokens that would follow the last turn in the current sample.
            Where the rewritten conversation ends with them, they are no repetition, but the words
            of the environment that this sample has to show.
        """
        self._finished.append(EpisodeSample(self._rollout, self._source, self._turn_ends))
        self._open_sample(prompt_ids)
        self.num_appended += len(bridge.token_ids)
        count = _count_common_tail(prompt_ids, bridge.token_ids)
        start = len(prompt_ids) - count
        self._source[start:] = TokenSource.SCAFFOLD
        is_observation = bridge.is_observation[len(bridge.token_ids) - count :]
        self._source[start:][is_observation] = TokenSource.OBSERVATION

    def append_turn(self, sampled: Rollout) -> Array:
        """Append a sampled turn; return its tokens, int32 [N].

        sampled: rollout whose prompt are all tokens of the current sample so far. Raises
            EpisodeError if it does not begin with them.
        """
        start = len(self.token_ids)
        if not np.array_equal(sampled.token_ids[:start], self.token_ids):
            sent, got = self.token_ids.tolist(), sampled.token_ids[:start].tolist()
            pairs = enumerate(zip(sent, got, strict=False))
            first = next((i for i, (one, other) in pairs if one != other), len(got))
            shown = slice(first, first + SHOWN_TOKENS)
            raise EpisodeError(
                f"the sampled turn does not continue the episode: token {first} of {start} differs;"
                f" sent {sent[shown]}, got {got[shown]}"
            )
        self._append(sampled, start, TokenSource.SAMPLED)
        self._turn_ends.append(len(self.token_ids))
        return self.token_ids[start:]

    def append_bridge(self, bridge: BridgeTokens) -> None:
        """Append what lies between two turns: scaffold and observation."""
        count = len(bridge.token_ids)
        self._append(make_empty_rollout(bridge.token_ids), 0, TokenSource.SCAFFOLD)
        self._source[-count:][bridge.is_observation] = TokenSource.OBSERVATION

    def _append(self, rollout: Rollout, start: int, source: TokenSource) -> None:
        self._rollout = replace(
            self._rollout,
            **{
                name: np.concatenate([getattr(self._rollout, name), getattr(rollout, name)[start:]])
                for name in ROLLOUT_TOKEN_COLUMNS
            },
        )
        num_tokens = len(self._rollout.token_ids)
        wide = extend_wide(self._rollout.wide, rollout.wide, num_tokens)
        self._rollout = replace(self._rollout, wide=wide)
        added = np.full(len(rollout.token_ids) - start, source, np.int8)
        self._source = np.concatenate([self._source, added])
        self.num_appended += len(added)

    def finish(self, reason: FinishReason) -> list[EpisodeSample]:
        """Return the samples of the episode, which ended for this reason."""
        samples = [*self._finished, EpisodeSample(self._rollout, self._source, self._turn_ends)]
        return [
            replace(sample, rollout=replace(sample.rollout, finish_reason=reason))
            for sample in samples
        ]


def _count_common_tail(first: Array, second: Array) -> int:
    """Return the number of equal tokens at the end of both."""
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[len(first) - size :] != second[len(second) - size :])
    return size - 1 - int(differs.max(initial=-1))


class DecodeSlots:
    """Grants at most `count` slots; a free slot goes to the waiting turn of the lowest priority.

    An episode holds a slot while the engine samples its turn, and none while its environment works.
    """

    def __init__(self, count: int) -> None:
        self._num_free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def hold(self, priority: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it within the context.

        priority: number of the group, ascending by admission; equal numbers are served in order.
            The wait has no deadline of its own: deadlines bound the turns that hold the slots.
        """
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._num_free += 1


ComputeContext = Callable[..., AbstractAsyncContextManager[MutableMapping[str, Any]]]
"""Returns a context that holds the device lease and records a span with facts, as
`StageContext.hold_devices` does."""


class EpisodeMeter:
    """Sums over episodes since the last `drain_counts`, named as in the metrics contract."""

    def __init__(self) -> None:
        self._sums = MetricSums()
        self._seconds: Counter[str] = Counter()
        self._num_infra_errors = 0
        self._num_open = 0
        self._waits_since: dict[object, float] = {}
        """Start of each wait for an environment that goes on, event loop time."""

    @contextmanager
    def track_open(self) -> Iterator[None]:
        """Count an episode as open within the context."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def count_infra_error(self) -> None:
        self._num_infra_errors += 1

    def add_seconds(self, *, decode: float, wait: float) -> None:
        """Add time in which the engine sampled a turn, and in which the turn waited for it."""
        self._seconds.update({"decode": decode, "wait": wait})

    @contextmanager
    def measure_environment(self) -> Iterator[None]:
        """Measure the time in which an episode waits for its environment."""
        clock, wait = asyncio.get_running_loop().time, object()
        self._waits_since[wait] = clock()
        try:
            yield
        finally:
            self._seconds.update({"environment": clock() - self._waits_since.pop(wait)})

    def describe_waits(self) -> str:
        """Return how many open episodes wait for their environment, and how long; "" if none."""
        if not self._waits_since:
            return ""
        longest_s = asyncio.get_running_loop().time() - min(self._waits_since.values())
        return (
            f"{len(self._waits_since)} of {self._num_open} open episodes wait for their"
            f" environment, the longest for {longest_s:.0f} s"
        )

    def add_episode(self, episode: Episode, *, environment_s: float) -> None:
        """Add a finished episode and the time in which it waited for its environment, s."""
        all_sources = np.concatenate([sample.token_source for sample in episode.samples])
        sources = np.bincount(all_sources, minlength=len(TokenSource))
        reason = episode.finish_reason
        for name, value in {
            "turns": len(episode.turn_rewards),
            "samples": len(episode.samples),
            "sampled_tokens": sources[TokenSource.SAMPLED],
            "observed_tokens": sources[TokenSource.OBSERVATION],
            "calls": len(episode.call_outcomes),
            "environment_s": environment_s,
            "timeout_frac": reason is FinishReason.TIMEOUT,
            "truncated_frac": reason in TRUNCATIONS,
        }.items():
            self._sums.add(f"episode/{name}", float(value))
        num_by_outcome = Counter(episode.call_outcomes)
        num_calls = num_by_outcome.total()
        for name, count in (
            {
                "malformed_frac": episode.num_invalid_calls,
                "tool_error_frac": num_by_outcome[CallOutcome.TOOL_ERROR],
                "tool_timeout_frac": num_by_outcome[CallOutcome.TIMED_OUT],
            }.items()
            if num_calls
            else ()
        ):
            self._sums.add(f"episode/{name}", count, weight=num_calls)

    def drain_counts(self) -> dict[str, float]:
        """Return sums and counts since the last call by metric name, and reset them."""
        total_s = sum(self._seconds.values())
        for part in ("decode", "wait", "environment") if total_s else ():
            self._sums.add(f"episode/{part}_frac", self._seconds[part], weight=total_s)
        counts = self._sums.drain_sums()
        counts["episode/infra_errors"] = float(self._num_infra_errors)
        counts["episode/open"] = float(self._num_open)
        self._seconds, self._num_infra_errors = Counter(), 0
        return counts


MAX_CHARS_PER_TOKEN = 128
"""Observations with more characters per free token are not encoded; text has about 4."""
RETRY_DELAY_S = 0.5
"""Delay before an episode whose environment failed is tried again, s; doubles per attempt."""


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class EpisodeRequest:
    """Episode to run: the row's prompt, seeds of policy and environment, and how to sample.

    index: number of the episode within its group.
    priority: number of the group by admission; lower numbers get decode slots first.
    compute: context in which turns are sampled.
    meter: receives the counts of the episode.
    sampling: settings of the engine; None: those of the run.
    """

    prompt: Prompt
    index: int
    seed: int
    environment_seed: int
    priority: int
    compute: ComputeContext
    meter: EpisodeMeter
    sampling: Any = None


@dataclass
class EpisodeState:
    """Running episode: what was said, sampled and earned so far, and the time that it took.

    num_row_messages: number of the episode's messages that are the data row's.
    elapsed_s: time in engine and environment, s; environment_s: of it, time in the environment.
    """

    request: EpisodeRequest
    session: HostedSession
    episode: Episode
    tools: Sequence[ToolSchema]
    tokens: EpisodeTokens
    num_row_messages: int
    elapsed_s: float
    environment_s: float

    @contextmanager
    def measure_environment(self) -> Iterator[None]:
        """Measure the time in which the episode waits for its environment."""
        started = _now()
        try:
            with self.request.meter.measure_environment():
                yield
        finally:
            self.elapsed_s += _now() - started
            self.environment_s += _now() - started


def make_environment_seed(seed: int, uid: str) -> int:
    """Return the environment's seed, 0 to 2^31 - 1: equal for all episodes of the prompt `uid`."""
    return derive_seed(f"{seed}/environment/{uid}")


def derive_attempt_seed(seed: int, attempt: int) -> int:
    """Return the policy's seed of an attempt at an episode, from 1; the first has `seed` itself.

    With the same seed the policy would write the words again at which its environment has failed.
    """
    return seed if attempt == 1 else derive_seed(f"{seed}/attempt/{attempt}")


async def wait_before_retry(attempt: int) -> None:
    """Wait after a failed attempt, from 1, before the next one."""
    await asyncio.sleep(RETRY_DELAY_S * 2 ** (attempt - 1))


def open_conversation(
    row: Sequence[Message], reset: Sequence[Message]
) -> tuple[list[Message], list[Message]]:
    """Return the messages of the row, and those that the environment adds at its reset.

    A user message of the row that one of the environment follows becomes part of it, before an
    empty line: many chat templates refuse consecutive messages of one role.
    """
    if row and reset and row[-1]["role"] == reset[0]["role"] == "user":
        joined = {**row[-1], "content": f"{row[-1]['content']}\n\n{reset[0]['content']}"}
        return [*row[:-1]], [joined, *reset[1:]]
    return [*row], [*reset]


def count_characters(messages: Sequence[Message]) -> int:
    return sum(len(str(message["content"])) for message in messages)


def get_template_arguments(prompt: Prompt) -> Mapping[str, Any] | None:
    """Return the row's own arguments of the chat template; None without any."""
    return prompt.extra_info.get("chat_template_kwargs")


def render_start(
    renderer: TurnRenderer, prompt: Prompt, start: ResetResult
) -> tuple[list[Message], Array]:
    """Return the messages before the first turn of an episode, and their tokens, int32 [P].

    The environment's words cannot write special tokens. Raises ConfigError if the chat template
    does not take them.
    """
    row, observation = open_conversation(prompt.messages, start.messages)
    token_ids = renderer.render_prompt(
        row,
        start.tools if renderer.can_render_tools else (),
        get_template_arguments(prompt),
        observation=observation,
    )
    return [*row, *observation], token_ids


@contextmanager
def translate_template_errors(prompt: Prompt) -> Iterator[None]:
    """Raise EpisodeError for an observation that the chat template does not take."""
    try:
        yield
    except ConfigError as error:
        raise EpisodeError(f"{describe_prompt(prompt)}: {error}") from error


class EpisodeDriver:
    """Runs episodes against an engine and the hosts of environments.

    Use it only on the engine's event loop. pools: hosts of each environment by name, which `close`
    ends. max_turn_tokens: most tokens of a turn. meter: counts of the episodes of groups without
    a meter of their own.
    """

    def __init__(  # noqa: PLR0913
        self,
        sampler: "GenerationEngine",
        pools: Mapping[str, EnvironmentHostPool],
        renderer: TurnRenderer,
        call_format: CallFormat,
        *,
        config: EnvironmentConfig,
        max_turn_tokens: int,
        slots: DecodeSlots,
    ) -> None:
        self._sampler = sampler
        self._pools = pools
        self._renderer = renderer
        self._call_format = call_format
        self._config = config
        self._max_turn_tokens = max_turn_tokens
        self._slots = slots
        self._stop_token_ids = tuple(sorted(renderer.end_token_ids))
        self._num_groups = 0
        self._is_closed = False
        self.meter = EpisodeMeter()

    async def run_group(
        self,
        prompt: Prompt,
        *,
        seeds: Sequence[int],
        environment_seed: int,
        compute: ComputeContext,
        on_finished: Callable[[], None] = lambda: None,
    ) -> Columns:
        """Run an episode per seed, side by side; return ROLLOUT_COLUMNS and EPISODE_COLUMNS.

        If an episode may have several samples, EPISODE_COLUMN is among the columns.

        environment_seed: seed of the environment, equal for all episodes of the group.
        on_finished: called once for each episode that ended.

        An episode whose environment fails is run again, with the environment's seed and another one
        of the policy; an outage of a server costs no attempt. Raises EpisodeError if the last
        attempt at an episode fails, GenerationError if the driver is closed meanwhile, and the
        errors of the engine.
        """
        self._num_groups += 1
        group = environment_seed, self._num_groups, compute, self.meter
        requests = [EpisodeRequest(prompt, index, seed, *group) for index, seed in enumerate(seeds)]
        episodes, failures = await self._run_all(requests, on_finished)
        if failures:
            raise failures[0]
        return episodes_to_columns(episodes, may_split=self._config.max_samples > 1)

    async def run_evaluation(
        self,
        prompt: Prompt,
        *,
        seeds: Sequence[int],
        environment_seed: int,
        compute: ComputeContext,
        sampling: Any,
    ) -> tuple[Columns, str]:
        """Run the episodes of an evaluation, which do not count in `self.meter`.

        Returns the columns of those whose environment did not fail, and the first failure, "" if
        there is none. sampling: settings of the engine; None: those of the run. Raises as
        `run_group` does, EpisodeError if all fail.
        """
        self._num_groups += 1
        group = environment_seed, self._num_groups, compute, EpisodeMeter(), sampling
        requests = [EpisodeRequest(prompt, index, seed, *group) for index, seed in enumerate(seeds)]
        episodes, failures = await self._run_all(requests)
        if not episodes:
            raise failures[0]
        columns = episodes_to_columns(episodes, may_split=self._config.max_samples > 1)
        return columns, str(failures[0]) if failures else ""

    async def _run_all(
        self, requests: Sequence[EpisodeRequest], on_finished: Callable[[], None] = lambda: None
    ) -> tuple[list[Episode], list[EpisodeError]]:
        """Run episodes side by side; return those that ended, and the failures of the others."""

        async def run(request: EpisodeRequest) -> Episode | EpisodeError:
            try:
                return await self._run_with_retries(request)
            except EpisodeError as error:
                return error
            finally:
                on_finished()

        results = await map_concurrently(run, requests, most=len(requests))
        episodes = [result for result in results if isinstance(result, Episode)]
        return episodes, [result for result in results if isinstance(result, EpisodeError)]

    async def _run_with_retries(self, request: EpisodeRequest) -> Episode:
        gate = get_gate(f"environment {request.prompt.environment}")
        for attempt in range(1, self._config.attempts + 1):
            seeded = replace(request, seed=derive_attempt_seed(request.seed, attempt))
            try:
                run = partial(self._run_episode, seeded, gate)
                return await wait_out_outages(gate, run, EpisodeError)
            except EpisodeError as error:
                if self._is_closed:
                    # Not a failure of this episode: another generator can run it.
                    raise GenerationError(f"the driver of episodes was closed: {error}") from error
                request.meter.count_infra_error()
                if attempt == self._config.attempts:
                    raise
            await wait_before_retry(attempt)
        raise AssertionError("attempts is at least 1")

    async def _run_episode(self, request: EpisodeRequest, gate: ServiceGate) -> Episode:
        """Run an episode in a session of its own. Raises EpisodeError.

        gate: that of the servers of the environment, which a reset finds open or opens.
        """
        pool = self._pools[request.prompt.environment]
        session = pool.open_session(request.prompt, seed=request.environment_seed)
        try:
            with request.meter.track_open():
                async with gate.admit():
                    started = _now()
                    with request.meter.measure_environment():
                        start = await session.reset()
                return await self._play_session(request, session, start, _now() - started)
        finally:
            await session.close()

    async def _play_session(
        self, request: EpisodeRequest, session: HostedSession, start: ResetResult, age_s: float
    ) -> Episode:
        """Run an episode from its reset, which took `age_s`, to its score. Raises EpisodeError."""
        no_room = (
            f"{describe_prompt(request.prompt)}: with the environment's tools and first observation"
            f" environment.max_tokens={self._config.max_tokens} leaves no room for a turn"
        )
        if count_characters(start.messages) > MAX_CHARS_PER_TOKEN * self._config.max_tokens:
            raise EpisodeError(no_room)
        with translate_template_errors(request.prompt):
            messages, prompt_ids = render_start(self._renderer, request.prompt, start)
        row, _ = open_conversation(request.prompt.messages, start.messages)
        tokens = EpisodeTokens(prompt_ids)
        episode = Episode(messages, state=start.state)
        state = EpisodeState(request, session, episode, start.tools, tokens, len(row), age_s, age_s)
        if self._count_free_tokens(state) < 1:
            raise EpisodeError(no_room)
        reason = None
        while reason is None:
            reason = await self._take_turn(state)
        # An environment that did not answer in time may still be busy: its score cannot be asked.
        episode.score = sum(episode.turn_rewards)
        if reason is not FinishReason.TIMEOUT:
            summary = EpisodeSummary(messages, episode.turn_rewards, reason.name.lower())
            with state.measure_environment():
                episode.score = await session.score(summary)
        episode.samples = tokens.finish(reason)
        request.meter.add_episode(episode, environment_s=state.environment_s)
        return episode

    async def _take_turn(self, state: EpisodeState) -> FinishReason | None:
        """Sample a turn, have the environment answer and append the answer.

        Returns the reason if the episode has ended.
        """
        sampled = await self._sample_turn(state)
        turn_ids = state.tokens.append_turn(sampled).tolist()
        is_cut = sampled.finish_reason is FinishReason.LENGTH
        reply = self._call_format.parse(turn_ids, state.tools, is_cut=is_cut)
        state.episode.messages.append(make_assistant_message(reply))
        if is_cut:
            state.episode.add_turn(EnvironmentStep())
            was_full = len(turn_ids) == self._max_turn_tokens
            return FinishReason.LENGTH if was_full else FinishReason.TOKENS
        try:
            async with asyncio.timeout(max(0.0, self._config.episode_timeout_s - state.elapsed_s)):
                with state.measure_environment():
                    result = await state.session.step(reply)
        except TimeoutError:
            state.episode.add_turn(EnvironmentStep(outcomes=[CallOutcome.TIMED_OUT]))
            return FinishReason.TIMEOUT
        state.episode.add_turn(result)
        if result.done:
            return FinishReason.STOP
        if len(state.episode.turn_rewards) == self._config.max_turns:
            return FinishReason.TURNS
        return self._append_observation(state, turn_ids, result.messages)

    def _append_observation(
        self, state: EpisodeState, turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> FinishReason | None:
        """Append what the environment says after a turn; return TOKENS if it leaves no room.

        Where the chat template rewrites the conversation, the next turn begins a new sample.
        """
        # Encoding megabytes that cannot fit would block the event loop for seconds.
        if count_characters(messages) > MAX_CHARS_PER_TOKEN * self._count_free_tokens(state):
            return FinishReason.TOKENS
        prompt = state.request.prompt
        with translate_template_errors(prompt):
            bridge = self._renderer.render_bridge(
                turn_ids,
                messages,
                is_cut=False,
                has_tools=bool(state.tools) and self._renderer.can_render_tools,
                arguments=get_template_arguments(prompt),
            )
        if self._count_free_tokens(state) <= len(bridge.token_ids):
            return FinishReason.TOKENS
        rewritten = self._render_rewritten(state, bridge, messages)
        if rewritten is None:
            state.tokens.append_bridge(bridge)
        elif len(rewritten) < self._get_most_tokens(state):
            state.tokens.start_sample(rewritten, bridge)
        else:
            return FinishReason.TOKENS
        state.episode.messages += messages
        return None

    def _render_rewritten(
        self, state: EpisodeState, bridge: BridgeTokens, messages: Sequence[Message]
    ) -> Array | None:
        """Return the prompt of a new sample; None if the next turn continues the current one.

        messages: what the environment says after the last turn. bridge: their tokens.
        """
        tokens, said, count = state.tokens, state.episode.messages, state.num_row_messages
        if tokens.num_samples >= self._config.max_samples:
            return None
        with translate_template_errors(state.request.prompt):
            return self._renderer.render_rewritten(
                np.concatenate([tokens.token_ids, bridge.token_ids]),
                said[:count],
                [*said[count:], *messages],
                state.tools if self._renderer.can_render_tools else (),
                get_template_arguments(state.request.prompt),
            )

    def _get_most_tokens(self, state: EpisodeState) -> int:
        """Return the most tokens of a sample, the row's prompt included."""
        return len(state.request.prompt.token_ids) + self._config.max_tokens

    def _count_free_tokens(self, state: EpisodeState) -> int:
        """Return how many tokens the episode may still grow by."""
        tokens = state.tokens
        used = max(tokens.num_appended, len(tokens.token_ids))
        return self._get_most_tokens(state) - used

    async def _sample_turn(self, state: EpisodeState) -> Rollout:
        """Sample the next turn of an episode, holding a decode slot and the device lease."""
        request, tokens = state.request, state.tokens
        waiting_since = _now()
        async with (
            self._slots.hold(request.priority),
            request.compute(
                uid=request.prompt.uid,
                episode=request.index,
                turn=len(state.episode.turn_rewards),
                context=len(tokens.token_ids),
                environment_s=state.environment_s,
            ) as span_facts,
        ):
            started, paused_before = _now(), self._sampler.paused_s
            (rollout,) = await self._sampler.generate(
                tokens.token_ids,
                seeds=[derive_continuation_seed(request.seed, tokens.num_new_tokens)],
                sampling=request.sampling,
                max_new_tokens=min(self._max_turn_tokens, self._count_free_tokens(state)),
                stop_token_ids=self._stop_token_ids,
            )
            # On shared devices the engine is suspended while others compute: a wait as well.
            paused_s = self._sampler.paused_s - paused_before
            decode_s = _now() - started - paused_s
            span_facts["tokens"] = int(rollout.loss_mask.sum())
        state.elapsed_s += decode_s
        request.meter.add_seconds(wait=started - waiting_since + paused_s, decode=decode_s)
        return rollout

    async def close(self) -> None:
        """End the hosts of the environment; `run_group` raises GenerationError from then on."""
        self._is_closed = True
        await close_pools(self._pools)


AUTO = "auto"


def load_turn_renderer(data: DataConfig, model_path: str) -> TurnRenderer:
    """Derive the renderer from the template that all prompts of a run share.

    Raises ConfigError for a tokenizer or template that cannot render episodes.
    """
    tokenizer = load_tokenizer(model_path)
    template = load_chat_template(
        data.check_shared_template(), tokenizer, arguments=data.chat_template_kwargs
    )
    end_token_ids = read_eos_token_ids(Path(model_path))
    return TurnRenderer(tokenizer, template, end_token_ids=end_token_ids)


def choose_call_format(
    config: EnvironmentConfig, renderer: TurnRenderer, tools: Sequence[ToolSchema]
) -> CallFormat:
    """Return the format of the policy's calls; without tools every turn is text.

    tools: those of all environments; where one has none, its own turns are text. Raises ConfigError
    for an unknown format, or if `auto` finds none.
    """
    name, tokenizer = config.call_format, renderer.tokenizer
    shown = renderer.get_writer(has_tools=True).show_call() if tools else None
    if name == AUTO:
        name = detect_call_format(tokenizer, shown) if tools else TEXT_FORMAT
    return make_call_format(name, tokenizer, pattern=config.call_pattern, shown=shown)


async def start_episode_driver(
    config: EnvironmentConfig,
    data: DataConfig,
    generator: GeneratorConfig,
    sampler: "GenerationEngine",
    model_path: str,
) -> EpisodeDriver:
    """Start the hosts of a run's environments and return a driver that runs their episodes.

    generator: settings of the engine, `sampler`: limits of a turn's tokens and of the turns that it
    samples at a time. Raises ConfigError for an environment or template that cannot be used.
    """
    renderer = load_turn_renderer(data, model_path)
    start = partial(start_pools, config)
    pools = await request_service("environments", start, EpisodeError)
    tools = [tool for pool in pools.values() for tool in pool.description.tools]
    try:
        call_format = choose_call_format(config, renderer, tools)
    except ConfigError:
        await close_pools(pools)
        raise
    return EpisodeDriver(
        sampler,
        pools,
        renderer,
        call_format,
        config=config,
        max_turn_tokens=generator.max_new_tokens,
        slots=DecodeSlots(generator.max_concurrent_rollouts),
    )
