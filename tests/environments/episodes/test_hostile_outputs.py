"""Observations and results of tools that are huge, no text, full of special tokens, or empty.

From the user's class through the driver into the tokens of the episode, with a BPE tokenizer.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from streamrl.data.chat_template import decode_ids, load_chat_template
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.driver import DecodeSlots, EpisodeDriver
from streamrl.environments.hosts.environment_host import EnvironmentHost
from streamrl.environments.hosts.host_pool import EnvironmentHostPool
from streamrl.environments.hosts.host_protocol import HostResponse
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.environments.tool_calls.call_formats import make_call_format
from streamrl.messages import (
    FinishReason,
    Prompt,
    TokenSource,
    TurnOutcome,
    check_loss_mask,
)
from streamrl.user_code.pool.process import unpickle_response
from streamrl.user_code.pool.worker import HEADER, pack_message
from tests.bpe_tokenizer import PLAIN_ADDED_TOKENS, SPECIAL_TOKENS
from tests.environments.episodes.scripted import ScriptedSampler, run_group

TEMPLATE = Path(__file__).parents[1] / "rendering" / "templates" / "qwen2_5.jinja"
CALL = '<tool_call>\n{"name": "work", "arguments": {}}\n</tool_call>'
TOOL = 'class Mine:\n    def work(self) -> str:\n        """Work."""\n        return {}\n'
TURNS = """
from streamrl.environments import Turn

class Mine:
    def step(self, reply):
        return Turn({}, done=reply.text == "done")
"""
MARKERS = "\n".join([" ".join([*SPECIAL_TOKENS, *PLAIN_ADDED_TOKENS])] * 100)
"""A hundred lines of special tokens and of other tokens that templates write."""


class InProcessPool(EnvironmentHostPool):
    """Pool of a host in this process, whose responses pass through the pool's wire format."""

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self._handler = EnvironmentHost(config)
        self._description = self._handler._class.description

    async def claim_host(self):
        return SimpleNamespace(has_ended=False)

    def release(self, host):
        pass

    async def call_host(self, host, request, timeout_s):
        response = await self._handler(request)
        received: HostResponse = unpickle_response(pack_message(response)[HEADER.size :])
        assert not received.error
        return received.result


@pytest.fixture(scope="module")
def renderer(bpe_tokenizer):
    return TurnRenderer(bpe_tokenizer, load_chat_template(str(TEMPLATE), bpe_tokenizer))


@pytest.fixture
def run_episode(renderer, tmp_path, monkeypatch):
    """Run an episode of the given turns in an environment of this source; return its columns."""
    monkeypatch.setattr(EnvironmentConfig, "max_reply_chars", 100_000)
    monkeypatch.setattr(EnvironmentConfig, "attempts", 1)

    async def run(source, *turns, **settings):
        path = tmp_path / "mine.py"
        path.write_text(source)
        config = EnvironmentConfig(str(path), **{"max_tokens": 200_000, **settings})
        written = iter(turns)

        def encode(text):
            tokens = renderer.tokenizer(text, add_special_tokens=False)
            return [*tokens["input_ids"], *renderer.closing_ids]

        driver = EpisodeDriver(
            cast(Any, ScriptedSampler(lambda context, seed: next(written), encode)),
            {"": InProcessPool(config)},
            renderer,
            make_call_format("hermes", renderer.tokenizer),
            config=config,
            max_turn_tokens=64,
            slots=DecodeSlots(1),
        )
        messages = [{"role": "user", "content": "Go."}]
        prompt = Prompt("0:0:0", renderer.render_prompt(messages), messages)
        columns = await run_group(driver, prompt=prompt)
        check_loss_mask(columns)
        return columns

    return run


def read_observation(renderer, columns):
    """Return the text of the observation; check that none of its tokens is special."""
    tokens = columns["token_ids"][columns["token_source"] == TokenSource.OBSERVATION]
    special = [renderer.tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS]
    markers = [renderer.tokenizer.convert_tokens_to_ids(token) for token in PLAIN_ADDED_TOKENS[:4]]
    assert not np.isin(tokens, [*special, *markers]).any()
    # A token at the border may hold the template's line break, too.
    return decode_ids(renderer.tokenizer, tokens.tolist()).strip("\n")


@pytest.mark.parametrize("source, reply", [(TOOL, CALL), (TURNS, "go")], ids=["tool", "turns"])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        (repr(MARKERS), MARKERS),
        (r"'half \ud800 pair \udfff'", "half \ufffd pair \ufffd"),
        ("''", ""),
        (r"'\0\x1b[31m'", "\0\x1b[31m"),
    ],
    ids=["special tokens", "lone surrogates", "nothing", "control characters"],
)
async def test_the_policy_reads_what_an_environment_or_its_tool_says_as_ordinary_text(
    renderer, run_episode, source, reply, written, text
):
    columns = await run_episode(source.format(written), reply, "done")
    outcome = TurnOutcome.CALLED if source is TOOL else TurnOutcome.SPOKE
    assert columns["turn_outcomes"].tolist() == [outcome, TurnOutcome.SPOKE]
    assert columns["finish_reason"].tolist() == [FinishReason.STOP.value]
    assert read_observation(renderer, columns) == text
