"""Episodes of random environments on a real vLLM engine, with the real driver and renderer."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio
from transformers import Qwen2ForCausalLM

from streamrl.data.chat_template import load_chat_template
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.driver import DecodeSlots, EpisodeDriver
from streamrl.environments.interface import EnvironmentStep, Message, ResetResult, ToolSchema
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.environments.tool_calls.call_formats import make_call_format
from streamrl.messages import Columns, FinishReason, Prompt, TokenSource, columns_to_rollouts
from tests.engines.flight import CONCURRENT, WIDE, Engines, Flight, start_flight
from tests.engines.tiny_qwen import bias_token, tiny_model, worst_error
from tests.environments.episodes.scripted import ScriptedHosts, ScriptedSession, no_lease

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("engines")]

TEMPLATE = Path(__file__).parents[2] / "environments" / "rendering" / "templates" / "qwen2_5.jinja"
GROUP_SIZE = 4
MAX_TURNS = 6
MAX_TOKENS = 400
"""Most tokens of an episode besides the row's prompt; both fit into the engine's context."""
PIECES = (
    *("a", "the answer", "0.5", " ", "  ", "\n", "\n\n", "\t"),
    *("\u00e9", "\u4f60\u597d", "\U0001f600"),
    *("<|im_end|>", "<|im_start|>assistant\n", "<|im_end|>\n", "<|endoftext|>", "[INST]", "</s>"),
    *("<tool_call>", "</tool_response>", "<|im_", "end|>"),
)
"""Parts of an observation's text, some of which spell special tokens."""
TOOLS = (
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
    },
)


def make_text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(0, 6)))


def make_messages(rng: random.Random) -> list[Message]:
    """Make an observation: a user message or the results of tools."""
    if rng.random() < 0.5:
        return [{"role": "user", "content": make_text(rng)}]
    return [{"role": "tool", "content": make_text(rng)} for _ in range(rng.randint(1, 2))]


def make_session(rng: random.Random) -> ScriptedSession:
    """Make an environment with random observations that ends after a random turn."""
    steps = [EnvironmentStep(make_messages(rng)) for _ in range(rng.randint(0, MAX_TURNS - 1))]
    tools: Sequence[ToolSchema] = TOOLS if rng.random() < 0.3 else ()
    opening = make_messages(rng) if rng.random() < 0.5 else []
    return ScriptedSession([*steps, EnvironmentStep(done=True)], ResetResult(opening, tools))


@dataclass
class EpisodeRunner:
    """Runs groups of random episodes on an engine, with the real renderer and parser of calls."""

    flight: Flight
    renderer: TurnRenderer
    slots: DecodeSlots = field(default_factory=lambda: DecodeSlots(CONCURRENT))

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.renderer.tokenizer

    async def run_group(self, seed: int) -> Columns:
        """Run a group of a random prompt under random limits."""
        rng = random.Random(seed)
        config = EnvironmentConfig(
            "mine.py",
            max_turns=rng.randint(1, MAX_TURNS),
            max_tokens=rng.randint(MAX_TOKENS // 2, MAX_TOKENS),
            episode_timeout_s=600,
        )
        hosts: Any = ScriptedHosts(lambda: make_session(rng))
        driver = EpisodeDriver(
            self.flight.engine,
            {"": hosts},
            self.renderer,
            make_call_format("hermes", self.tokenizer),
            config=config,
            max_turn_tokens=rng.randint(2, 60),
            slots=self.slots,
        )
        messages = [{"role": "user", "content": f"Question {seed}"}]
        prompt = Prompt(f"0:{seed}:0", self.renderer.render_prompt(messages), messages)
        seeds = range(seed * GROUP_SIZE, (seed + 1) * GROUP_SIZE)
        return await driver.run_group(prompt, seeds=seeds, environment_seed=0, compute=no_lease)


def make_chat_model(tokenizer: "PreTrainedTokenizerBase", seed: int) -> Qwen2ForCausalLM:
    """Build a model of the tokenizer's vocabulary whose turns end after about ten tokens."""
    eos = tokenizer.eos_token_id
    model = tiny_model(tied=False, seed=seed, vocabulary=len(tokenizer), eos=eos)
    bias_token(model, eos, 4)
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def runner(
    engines: Engines,
    bpe_tokenizer: "PreTrainedTokenizerBase",
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[EpisodeRunner]:
    """Provide an engine of a model that speaks a chat format; it serves the model of seed 1."""
    await engines.close()
    folder = str(tmp_path_factory.mktemp("chat_model"))
    model = make_chat_model(bpe_tokenizer, seed=1)
    model.save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    template = load_chat_template(str(TEMPLATE), bpe_tokenizer)
    renderer = TurnRenderer(bpe_tokenizer, template)
    async with start_flight(folder, "recompute", WIDE) as flight:
        await flight.load(model)
        yield EpisodeRunner(flight, renderer)


async def test_episodes_of_random_environments_are_trained_on_what_was_sampled(
    runner: EpisodeRunner,
):
    """Tokens have the logprobs of a forward pass over the whole episode by their version."""
    flight, first = runner.flight, max(runner.flight.models)
    running = asyncio.gather(*map(runner.run_group, range(60)))
    for seed in (2, 3):
        await flight.wait_for_steps(15)
        await flight.load(make_chat_model(runner.tokenizer, seed=seed))
    rollouts = []
    for columns in await running:
        assert np.array_equal(columns["loss_mask"], columns["token_source"] == TokenSource.SAMPLED)
        rollouts += columns_to_rollouts(columns)
    assert {rollout.finish_reason for rollout in rollouts} == {
        *(FinishReason.STOP, FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TOKENS)
    }
    versions_seen = set()
    for rollout in rollouts:
        versions = rollout.policy_version[rollout.loss_mask]
        assert (np.diff(versions) >= 0).all(), "versions only rise"
        versions_seen.add(tuple(np.unique(versions).tolist()))
    assert (first, first + 1, first + 2) in versions_seen
    assert worst_error(rollouts, flight.models) < 1e-4
