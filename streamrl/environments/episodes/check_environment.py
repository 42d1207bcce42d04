"""Checks of a run's environments before the run: class, chat template, room for the first turn."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from streamrl.data.config import DataConfig
from streamrl.environments.config import EnvironmentConfig, get_environment_section
from streamrl.environments.episodes.driver import make_environment_seed, render_start
from streamrl.environments.episodes.start_driver import choose_call_format, load_turn_renderer
from streamrl.environments.hosts.host_pool import EnvironmentHostPool
from streamrl.environments.hosts.host_protocol import EnvironmentDescription
from streamrl.environments.interface import ToolSchema
from streamrl.environments.rendering.conformance import check_template
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.environments.tool_calls.call_formats import REGEX_FORMAT
from streamrl.environments.tool_calls.tool_schema import get_tool_name
from streamrl.errors import ConfigError, EpisodeError
from streamrl.messages import Prompt, describe_prompt


def check_environments(
    config: EnvironmentConfig, data: DataConfig, prompts: Sequence[Prompt], *, model_path: str
) -> list[str]:
    """Check environments and template, and reset an episode of each prompt; return notes.

    Raises ConfigError for a class, template or call format that cannot be used, an environment that
    fails at its reset, and a prompt that leaves no room for a turn.
    """
    renderer = load_turn_renderer(data, model_path)
    report = check_template(renderer)
    notes = [
        f"chat template, {kind}: {difference}; kept as sampled: the policy is trained on the"
        " tokens that it saw"
        for kind, difference in report.differences.items()
    ]
    return [*notes, *asyncio.run(_check_classes(config, renderer, prompts))]


async def _check_classes(
    config: EnvironmentConfig, renderer: TurnRenderer, prompts: Sequence[Prompt]
) -> list[str]:
    """Check each environment with the prompts that name it."""
    notes: list[str] = []
    tools: list[ToolSchema] = []
    for name in config.specs:
        own_prompts = [prompt for prompt in prompts if prompt.environment == name]
        description = await _check_class(config.select(name), renderer, own_prompts)
        notes.append(description.note)
        if not own_prompts:
            notes.append(f"{get_environment_section(name)}: no row that was checked names it")
        tools += description.tools
    if config.call_format == REGEX_FORMAT and not tools:
        raise ConfigError(f"environment.call_format={REGEX_FORMAT}: no environment has tools")
    if tools and not renderer.can_render_tools:
        notes.append(
            f"{renderer.template.name} shows no tools to the model, which must know them:"
            f" {', '.join(map(get_tool_name, tools))}"
        )
    return [note for note in notes if note]


async def _check_class(
    config: EnvironmentConfig, renderer: TurnRenderer, prompts: Sequence[Prompt]
) -> EnvironmentDescription:
    """Check a single environment."""
    name, spec = config.single
    hosts = EnvironmentHostPool(replace(config, processes=1))
    try:
        await hosts.start()
        tools = hosts.description.tools
        # Parsing checks that the format can name each of the tools.
        choose_call_format(config, renderer, tools).parse([], tools)
        for prompt in prompts:
            await _check_reset(config, hosts, renderer, prompt)
        return hosts.description
    except EpisodeError as error:
        setting = spec.format_setting(get_environment_section(name))
        raise ConfigError(f"{setting}: {error}") from error
    finally:
        await hosts.close()


async def _check_reset(
    config: EnvironmentConfig, hosts: EnvironmentHostPool, renderer: TurnRenderer, prompt: Prompt
) -> None:
    session = hosts.open_session(prompt, seed=make_environment_seed(0, prompt.uid))
    try:
        start = await session.reset()
    finally:
        await session.close()
    _, token_ids = render_start(renderer, prompt, start)
    added = len(token_ids) - len(prompt.token_ids)
    if added >= config.max_tokens:
        raise ConfigError(
            f"environment.max_tokens={config.max_tokens}: leaves no room for a turn:"
            f" tools and first observation add {added} tokens to {describe_prompt(prompt)}"
        )
