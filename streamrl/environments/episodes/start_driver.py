"""Start of a driver: the model's template and tokenizer, the hosts of the environment."""

from streamrl.data.chat_template import load_chat_template, load_tokenizer
from streamrl.data.config import DataConfig
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.decode_slots import DecodeSlots
from streamrl.environments.episodes.driver import EpisodeDriver, EpisodeLimits, TurnSampler
from streamrl.environments.hosts.host_pool import EnvironmentHostPool, HostSettings
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.environments.tool_calls.call_formats import make_call_format


def make_host_settings(config: EnvironmentConfig) -> HostSettings:
    return HostSettings(
        path=config.path,
        processes=config.processes,
        turn_timeout_s=config.turn_timeout_s,
        call_timeout_s=config.call_timeout_s,
        max_reply_chars=config.max_reply_chars,
        max_malformed=config.max_malformed,
        parallel_calls=config.parallel_calls,
        memory_gib=config.memory_gib,
        isolate=config.isolate,
    )


def make_turn_renderer(data: DataConfig, model_path: str) -> TurnRenderer:
    """Derive the renderer from the template of the run's prompts. Raises ConfigError."""
    tokenizer = load_tokenizer(model_path)
    template = load_chat_template(
        data.shared_template, tokenizer, arguments=data.chat_template_kwargs
    )
    return TurnRenderer.from_template(tokenizer, template)


async def start_episode_driver(
    config: EnvironmentConfig,
    data: DataConfig,
    sampler: TurnSampler,
    *,
    model_path: str,
    max_turn_tokens: int,
    num_slots: int,
) -> EpisodeDriver:
    """Start the hosts of an environment and return a driver that runs its episodes.

    sampler: the engine. max_turn_tokens: most tokens of a turn. num_slots: turns that the engine
    samples at the same time. Raises ConfigError for an environment or template that cannot be used.
    """
    renderer = make_turn_renderer(data, model_path)
    hosts = EnvironmentHostPool(make_host_settings(config))
    await hosts.start()
    return EpisodeDriver(
        sampler,
        hosts,
        renderer,
        make_call_format(config.call_format, renderer, pattern=config.call_pattern),
        limits=EpisodeLimits(
            config.max_turns, max_turn_tokens, config.max_tokens, config.episode_timeout_s
        ),
        slots=DecodeSlots(num_slots),
        attempts=config.attempts,
    )
