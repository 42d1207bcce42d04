"""Scripted engine, renderer and environment: tokens are code points, every turn ends with END."""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.driver import DecodeSlots, EpisodeDriver
from streamrl.environments.interface import EnvironmentStep, Reply, ResetResult
from streamrl.environments.rendering.turn_renderer import BridgeTokens
from streamrl.messages import FinishReason, Prompt
from tests.rollouts import make_rollout

END = ord(";")
DONE = EnvironmentStep(reward=1.0, done=True)
PROMPT = Prompt(
    "0:0:0", np.array([ord("?")], np.int32), messages=[{"role": "user", "content": "?"}]
)


class CodePointRenderer:
    """Renders `[content]`; the brackets are scaffold. A rendering drops thoughts in braces."""

    end_token_ids = (END,)

    can_render_tools = True

    def render_prompt(self, messages, tools=(), arguments=None, *, observation=()):
        texts = [message["content"] for message in (*messages, *observation)]
        return np.array([ord(c) for text in texts for c in text], np.int32)

    def render_bridge(self, sampled_ids, messages, *, is_cut, has_tools=False, arguments=None):
        text = "".join(f"[{message['content']}]" for message in messages)
        tokens = np.array([ord(c) for c in text], np.int32)
        return BridgeTokens(tokens, ~np.isin(tokens, [ord("["), ord("]")]))

    def render_rewritten(self, stream_ids, row, later, tools=(), arguments=None):
        text = "".join(message["content"] for message in row)
        for message in later:
            is_turn = message["role"] == "assistant"
            content = message["content"]
            text += re.sub("{.*?}", "", content) + ";" if is_turn else f"[{content}]"
        tokens = np.array([ord(c) for c in text], np.int32)
        return None if np.array_equal(tokens, stream_ids) else tokens


class TextFormat:
    """A turn is its text."""

    def parse(self, token_ids, tools, *, is_cut=False):
        return Reply("".join(map(chr, token_ids)).rstrip(";"), is_cut=is_cut)


@dataclass
class ScriptedSampler:
    """Samples `write(context, seed)`, encoded, a token per `token_s`, with the version of then."""

    write: Callable[[str, int], str] = lambda context, seed: "a;"
    encode: Callable[[str], list[int]] = lambda text: [ord(c) for c in text]
    token_s: float = 0.0
    paused_s: float = 0.0
    version: int = 0
    num_running: int = 0
    max_running: int = 0
    contexts: list[str] = field(default_factory=list)

    async def generate(
        self, prompt_ids, *, seeds, sampling=None, max_new_tokens=None, stop_token_ids=()
    ):
        (seed,) = seeds
        context = "".join(map(chr, prompt_ids))
        self.contexts.append(context)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        turn, versions = self.encode(self.write(context, seed))[:max_new_tokens], []
        try:
            for _ in turn:
                await asyncio.sleep(self.token_s)
                versions.append(self.version)
        finally:
            self.num_running -= 1
        has_ended = bool(turn) and turn[-1] in stop_token_ids
        reason = FinishReason.STOP if has_ended else FinishReason.LENGTH
        return [
            make_rollout(prompt_ids, turn, versions=versions, logprob=-0.5, finish_reason=reason)
        ]


@dataclass
class ScriptedSession:
    """Answers the n-th reply with `steps[n]`: an answer, an error, or a delay and an answer."""

    steps: Sequence[object]
    reset_result: ResetResult = field(default_factory=ResetResult)
    final_score: float = 1.0
    replies: list[str] = field(default_factory=list)
    is_closed: bool = False
    summary: Any = None

    async def reset(self):
        return self.reset_result

    async def step(self, reply):
        answer = self.steps[len(self.replies)]
        self.replies.append(reply.text)
        if isinstance(answer, tuple):
            delay_s, answer = answer
            await asyncio.sleep(delay_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def score(self, episode):
        self.summary = episode
        return self.final_score

    async def close(self):
        self.is_closed = True


class ScriptedHosts:
    """Opens the given sessions in order, or the result of `open_next`; keeps the seeds."""

    def __init__(self, open_next: Callable[[], ScriptedSession]) -> None:
        self._open_next = open_next
        self.sessions: list[ScriptedSession] = []
        self.seeds: list[int] = []

    def open_session(self, prompt, *, seed):
        self.seeds.append(seed)
        self.sessions.append(self._open_next())
        return self.sessions[-1]

    async def close(self):
        pass


def to_text(tokens):
    return "".join(map(chr, tokens))


@asynccontextmanager
async def no_lease(**facts):
    yield facts


def say(text: str, **values: Any) -> EnvironmentStep:
    """Return a step whose observation is a user message."""
    return EnvironmentStep(messages=[{"role": "user", "content": text}], **values)


def make_driver(sampler, hosts, *, slots=64, attempts=3, max_turn_tokens=16, **limits):
    """Make a driver; `hosts` may be the steps of every episode."""
    if isinstance(hosts, list):
        steps, hosts = hosts, ScriptedHosts(lambda: ScriptedSession(steps))
    values = {"max_tokens": 256, "episode_timeout_s": 100.0, **limits}
    config: Any = EnvironmentConfig("mine.py", **values)
    config.attempts = attempts
    return EpisodeDriver(
        sampler,
        {"": hosts},
        cast(Any, CodePointRenderer()),
        cast(Any, TextFormat()),
        config=config,
        max_turn_tokens=max_turn_tokens,
        slots=DecodeSlots(slots),
    )


async def run_group(driver, *, seeds=(0,), compute=no_lease, prompt=PROMPT, **options):
    return await driver.run_group(
        prompt, seeds=seeds, environment_seed=7, compute=compute, **options
    )
