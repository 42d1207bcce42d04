"""Start of a driver: the model's tokenizer and template, and the hosts of the environments."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamrl.data.chat_template import load_chat_template, load_tokenizer
from streamrl.data.config import DataConfig
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.decode_slots import DecodeSlots
from streamrl.environments.episodes.driver import EpisodeDriver, EpisodeLimits, TurnSampler
from streamrl.environments.hosts.host_pool import EnvironmentHostPool, HostedSession
from streamrl.environments.hosts.host_protocol import EnvironmentDescription
from streamrl.environments.interface import ToolSchema
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.environments.tool_calls.call_formats import (
    TEXT_FORMAT,
    CallFormat,
    detect_call_format,
    make_call_format,
)
from streamrl.errors import ConfigError, EpisodeError
from streamrl.files.hf_config import read_eos_token_ids
from streamrl.messages import Prompt
from streamrl.user_code.service_gate import request_service


class EnvironmentPools:
    """A pool of host processes per environment (`EnvironmentHosts`)."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._pools = {name: EnvironmentHostPool(config.select(name)) for name in config.specs}

    async def start(self) -> None:
        """Start all pools at the same time.

        Raises ConfigError if a class cannot be used, and EpisodeError if a process does not start;
        then all pools are closed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for pool in self._pools.values():
                    tasks.create_task(pool.start())
        except ExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None

    @property
    def descriptions(self) -> Mapping[str, EnvironmentDescription]:
        """Description of each environment by name."""
        return {name: pool.description for name, pool in self._pools.items()}

    def open_session(self, prompt: Prompt, *, seed: int) -> HostedSession:
        return self._pools[prompt.environment].open_session(prompt, seed=seed)

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()


AUTO = "auto"


def load_turn_renderer(data: DataConfig, model_path: str) -> TurnRenderer:
    """Derive the renderer from the template that all prompts of a run share.

    Raises ConfigError for a tokenizer or template that cannot render episodes.
    """
    tokenizer = load_tokenizer(model_path)
    template = load_chat_template(
        data.shared_template, tokenizer, arguments=data.chat_template_kwargs
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
    sampler: TurnSampler,
    *,
    model_path: str,
    max_turn_tokens: int,
    num_slots: int,
) -> EpisodeDriver:
    """Start the hosts of a run's environments and return a driver that runs their episodes.

    sampler: the engine. max_turn_tokens: most tokens of a turn. num_slots: turns that the engine
    samples at the same time. Raises ConfigError for an environment or template that cannot be used.
    """
    renderer = load_turn_renderer(data, model_path)

    async def start_hosts() -> EnvironmentPools:
        hosts = EnvironmentPools(config)
        await hosts.start()
        return hosts

    hosts = await request_service("environments", start_hosts, EpisodeError)
    tools = [tool for found in hosts.descriptions.values() for tool in found.tools]
    try:
        call_format = choose_call_format(config, renderer, tools)
    except ConfigError:
        await hosts.close()
        raise
    return EpisodeDriver(
        sampler,
        hosts,
        renderer,
        call_format,
        limits=EpisodeLimits(
            config.max_turns,
            max_turn_tokens,
            config.max_tokens,
            config.episode_timeout_s,
            config.max_samples,
        ),
        slots=DecodeSlots(num_slots),
        attempts=config.attempts,
    )
