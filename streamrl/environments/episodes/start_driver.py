"""Start of a driver: the model's tokenizer and template, and the hosts of the environments."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from streamrl.data.chat_template import load_chat_template, load_tokenizer
from streamrl.data.config import DataConfig
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.decode_slots import DecodeSlots
from streamrl.environments.episodes.driver import EpisodeDriver, TurnSampler
from streamrl.environments.hosts.host_pool import close_pools, start_pools
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
from streamrl.user_code.service_gate import request_service

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
        max_turn_tokens=max_turn_tokens,
        slots=DecodeSlots(num_slots),
    )
