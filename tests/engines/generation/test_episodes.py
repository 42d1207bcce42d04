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
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.environments.episodes.decode_slots import DecodeSlots
from streamrl.environments.episodes.driver import EpisodeDriver, EpisodeLimits
from streamrl.environments.interface import EnvironmentStep, Message, ResetResult, ToolSchema
from streamrl.environments.rendering.bridge_text import decode
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.environments.tool_calls.call_formats import make_call_format
from streamrl.messages import (
    Array,
    FinishReason,
    Prompt,
    Rollout,
    TokenSource,
    columns_to_rollouts,
    derive_continuation_seed,
    split_token_column,
)
from tests.engines.flight import CONCURRENT, WIDE, Engines, Flight, fingerprint_of, start_flight
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


@dataclass
class SampledTurn:
    """Turn as the engine returned it. number: number of its request in the engine."""

    number: int
    rollout: Rollout


class RecordingSampler:
    """Samples with an engine and keeps each turn by the tokens before it and its seed."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self.turns: dict[tuple[bytes, int], SampledTurn] = {}

    @property
    def paused_s(self) -> float:
        return self._engine.paused_s

    async def generate(
        self, prompt_ids: Array, *, seeds: Sequence[int], **options: Any
    ) -> list[Rollout]:
        number = self._engine._last_request_id + 1
        (rollout,) = await self._engine.generate(prompt_ids, seeds=seeds, **options)
        self.turns[prompt_ids.tobytes(), seeds[0]] = SampledTurn(number, rollout)
        return [rollout]

    def pop_turns(self, token_ids: Array, source: Array, seed: int) -> list[SampledTurn]:
        """Return the turns of an episode as the engine returned them, and forget them."""
        starts = [turn.start for turn in find_turns(source)]
        seeds = [derive_continuation_seed(seed, start - starts[0]) for start in starts]
        keys = zip(starts, seeds, strict=True)
        return [self.turns.pop((token_ids[:start].tobytes(), key_seed)) for start, key_seed in keys]


@dataclass
class EpisodeRecord:
    """Finished episode with its turns as sampled. source: code of TokenSource, int8 [T]."""

    rollout: Rollout
    source: Array
    sampled: Sequence[SampledTurn]

    @property
    def turns(self) -> list[slice]:
        return find_turns(self.source)


def find_turns(source: Array) -> list[slice]:
    """Return where the sampled tokens of each turn are."""
    is_sampled = np.concatenate([[False], source == TokenSource.SAMPLED, [False]])
    edges = np.flatnonzero(is_sampled[1:] != is_sampled[:-1]).tolist()
    return [slice(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


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

    async def run_group(self, seed: int) -> list[EpisodeRecord]:
        """Run a group of a random prompt under random limits."""
        rng = random.Random(seed)
        limits = EpisodeLimits(
            max_turns=rng.randint(1, MAX_TURNS),
            max_turn_tokens=rng.randint(2, 60),
            max_tokens=rng.randint(MAX_TOKENS // 2, MAX_TOKENS),
            timeout_s=600,
        )
        sampler = RecordingSampler(self.flight.engine)
        driver = EpisodeDriver(
            sampler,
            ScriptedHosts(lambda: make_session(rng)),
            self.renderer,
            make_call_format("hermes", self.tokenizer),
            limits=limits,
            slots=self.slots,
            attempts=1,
        )
        messages = [{"role": "user", "content": f"Question {seed}"}]
        prompt = Prompt(f"0:{seed}:0", self.renderer.render_prompt(messages), messages)
        seeds = range(seed * GROUP_SIZE, (seed + 1) * GROUP_SIZE)
        columns = await driver.run_group(prompt, seeds=seeds, environment_seed=0, compute=no_lease)
        sources = split_token_column(columns["token_source"], columns["lengths"])
        rows = zip(columns_to_rollouts(columns), sources, seeds, strict=True)
        episodes = [
            EpisodeRecord(rollout, source, sampler.pop_turns(rollout.token_ids, source, row_seed))
            for rollout, source, row_seed in rows
        ]
        assert not sampler.turns, "every turn that was sampled is in an episode"
        return episodes

    async def run_groups(self, seeds: Sequence[int]) -> list[EpisodeRecord]:
        groups = await asyncio.gather(*(self.run_group(seed) for seed in seeds))
        return [episode for group in groups for episode in group]


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
    renderer = TurnRenderer.from_template(bpe_tokenizer, template)
    async with start_flight(folder, "recompute", WIDE) as flight:
        await flight.load(model)
        yield EpisodeRunner(flight, renderer)


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[200, pytest.param(1000, marks=pytest.mark.slow)]
)
async def episodes(runner: EpisodeRunner, request: pytest.FixtureRequest) -> list[EpisodeRecord]:
    """Run episodes of random environments with the same weights."""
    return await runner.run_groups(range(request.param // GROUP_SIZE))


async def test_random_environments_end_episodes_in_every_way(episodes: list[EpisodeRecord]):
    reasons = {episode.rollout.finish_reason for episode in episodes}
    assert reasons == {
        *(FinishReason.STOP, FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TOKENS)
    }


async def test_trained_tokens_are_the_tokens_that_the_engine_sampled(
    episodes: list[EpisodeRecord],
):
    for episode in episodes:
        rollout = episode.rollout
        assert np.array_equal(rollout.loss_mask, episode.source == TokenSource.SAMPLED)
        for turn, sampled in zip(episode.turns, episode.sampled, strict=True):
            for name in ("token_ids", "generator_logprobs", "policy_version"):
                expected = getattr(sampled.rollout, name)[turn.start :]
                assert np.array_equal(getattr(rollout, name)[turn], expected), name


async def test_logprobs_equal_a_forward_pass_over_the_whole_episode(
    runner: EpisodeRunner, episodes: list[EpisodeRecord]
):
    rollouts = [episode.rollout for episode in episodes]
    assert worst_error(rollouts, runner.flight.models) < 1e-4


async def test_observations_contain_no_special_token(
    runner: EpisodeRunner, episodes: list[EpisodeRecord]
):
    added = runner.tokenizer.added_tokens_decoder.items()
    special = [token_id for token_id, token in added if token.special]
    observed = [e.rollout.token_ids[e.source == TokenSource.OBSERVATION] for e in episodes]
    texts = [decode(runner.tokenizer, token_ids.tolist()) for token_ids in observed]
    assert any("<|im_start|>" in text for text in texts), "environments try to write them"
    assert not np.isin(np.concatenate(observed), special).any()


async def test_encoding_decoded_turns_again_would_change_sampled_tokens(
    runner: EpisodeRunner, episodes: list[EpisodeRecord]
):
    turns = [e.rollout.token_ids[turn].tolist() for e in episodes for turn in e.turns]
    changed = [
        t
        for t in turns
        if runner.tokenizer.encode(decode(runner.tokenizer, t), add_special_tokens=False) != t
    ]
    # Measured: 62 % of the turns. If this were 0, the tests above could not show a driver that
    # encodes the conversation again before each turn.
    assert changed


async def test_weight_loads_within_episodes_leave_each_token_the_version_that_sampled_it(
    runner: EpisodeRunner,
):
    flight, first = runner.flight, max(runner.flight.models)
    new_models = [make_chat_model(runner.tokenizer, seed=seed) for seed in (2, 3)]
    running = asyncio.create_task(runner.run_groups(range(1000, 1060)))
    for model in new_models:
        await flight.wait_for_steps(15)
        await flight.load(model)
    episodes = await running
    served = {fingerprint_of(model): version for version, model in flight.models.items()}
    versions_seen = set()
    for episode in episodes:
        versions = episode.rollout.policy_version[episode.rollout.loss_mask]
        logs = [flight.log.tokens[f"{sampled.number}:0"] for sampled in episode.sampled]
        assert versions.tolist() == [served[fingerprint] for log in logs for fingerprint in log]
        assert (np.diff(versions) >= 0).all(), "versions only rise"
        versions_seen.add(tuple(np.unique(versions).tolist()))
    assert (first, first + 1, first + 2) in versions_seen
    assert worst_error([episode.rollout for episode in episodes], flight.models) < 1e-4


async def test_a_turn_prefills_its_new_tokens_and_the_last_block_before_them(
    runner: EpisodeRunner,
):
    log, num_cached = runner.flight.log, 0
    for episode in await runner.run_groups(range(2000, 2030)):
        answers = zip(episode.turns[1:], episode.sampled[1:], strict=True)
        for before, (turn, sampled) in zip(episode.turns, answers, strict=False):
            # vLLM caches full blocks, and has not computed the last token that it sampled.
            cached = (before.stop - 1) // log.block_size * log.block_size
            assert log.prefilled[f"{sampled.number}:0"] == turn.start - cached
            num_cached += cached
    assert num_cached > 0
