"""`streamrl play --check`: check an environment with scripted policies before a run."""

import argparse
import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from streamrl.cli.arguments.environment_args import (
    RenderPrompt,
    choose_data_file,
    choose_environment,
    load_recipe,
    make_text_prompt,
    read_prompts,
)
from streamrl.config.run_config import ConfigSections
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.driver import render_start
from streamrl.environments.episodes.environment_probe import (
    RANDOM,
    EnvironmentProbe,
    EpisodeRecord,
    Finding,
    FindingStatus,
    report_failure,
    report_ok,
    report_warning,
)
from streamrl.environments.episodes.start_driver import choose_call_format, load_turn_renderer
from streamrl.environments.episodes.text_episode import render_messages
from streamrl.environments.hosts.host_protocol import EnvironmentDescription
from streamrl.environments.rendering.conformance import (
    TOOL_CALL,
    check_template,
    describe_treatment,
)
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.errors import ConfigError
from streamrl.messages import Prompt, describe_prompt
from streamrl.telemetry.progress_line import ProgressLine, show_progress

LARGE_SHARE = 0.5
"""Share of environment.max_tokens from which observations leave the policy little room."""


def probe_template(
    config: EnvironmentConfig, description: EnvironmentDescription, renderer: TurnRenderer
) -> Iterator[Finding]:
    """Yield what the chat template does with turns, and the format of the policy's calls.

    Raises ConfigError for a template in which a user's messages cannot follow turns.
    """
    report = check_template(renderer)
    num_other = len(report.differences) + len(report.unsupported)
    yield report_ok(
        "template",
        f"{renderer.template.name}: {len(report.kinds) - num_other} of {len(report.kinds)} kinds of"
        " conversation are identical to a whole rendering",
    )
    for kind, difference in report.differences.items():
        treatment = describe_treatment(config.max_samples)
        yield report_ok("template", f"{kind}: differs at {difference}. {treatment}")
    for kind, reason in report.unsupported.items():
        needs_it = kind == TOOL_CALL and description.tools
        report_kind = report_failure if needs_it else report_ok
        yield report_kind("template", f"{kind}: not supported: {reason}")
    if description.tools:
        try:
            # Parsing checks that the format can name each of the tools.
            choose_call_format(config, renderer, description.tools).parse([], description.tools)
            yield report_ok("call format", config.call_format)
        except ConfigError as error:
            yield report_failure("call format", str(error))


def probe_tokens(
    records: Sequence[EpisodeRecord], config: EnvironmentConfig, renderer: TurnRenderer
) -> Finding:
    """Compare the tokens of tools and observations with environment.max_tokens."""
    try:
        sizes = [(count_observed_tokens(record, renderer), record) for record in records]
    except ConfigError as error:
        return report_failure("tokens", str(error))
    (start, answers), record = max(sizes, key=lambda size: sum(size[0]))
    limit = config.max_tokens
    text = (
        f"longest episode, {describe_prompt(record.prompt)}, {record.policy} policy: tools and"
        f" first observation {start} tokens, answers to {len(record.steps)} turns {answers};"
        f" environment.max_tokens={limit}"
    )
    if start >= limit:
        return report_failure("tokens", f"{text}: no room for a turn: raise it")
    # Random text and calls may be answered by more than a model's.
    if start + answers > LARGE_SHARE * limit and record.policy != RANDOM:
        return report_warning("tokens", f"{text} leaves the policy little: raise it")
    return report_ok("tokens", text)


def count_observed_tokens(record: EpisodeRecord, renderer: TurnRenderer) -> tuple[int, int]:
    """Return the tokens of tools and first observation, and those of all later observations."""
    row, has_tools = record.prompt.messages, bool(record.start.tools)
    _, with_start = render_start(renderer, record.prompt, record.start)
    bridges = [
        renderer.render_bridge([], step.messages, is_cut=True, has_tools=has_tools)
        for step in record.steps
        if step.messages
    ]
    answers = sum(len(bridge.token_ids) for bridge in bridges)
    return len(with_start) - len(renderer.render_prompt(row)), answers


EXIT_FAILED = 1
STATUS_WIDTH, SUBJECT_WIDTH = 4, 11


def run_check(arguments: argparse.Namespace) -> int:
    """Print each finding as it comes; return exit code 1 if a check failed, else 0."""
    if arguments.rows < 1:
        raise ConfigError(f"--rows={arguments.rows}: must be at least 1")
    # The pool warns of the process that the probe kills.
    logging.getLogger("streamrl.environments").setLevel(logging.ERROR)
    with show_progress("checking the environment") as progress:
        return EXIT_FAILED if asyncio.run(_print_findings(arguments, progress)) else 0


async def _print_findings(arguments: argparse.Namespace, progress: ProgressLine) -> bool:
    """Check an environment; print the findings, and return whether one is a failure."""
    has_failed = False
    async with aclosing(check(arguments, load_recipe(arguments.config))) as found:
        async for finding in found:
            progress.print_line(format_finding(finding))
            has_failed |= finding.status is FindingStatus.FAIL
    return has_failed


async def check(
    arguments: argparse.Namespace, recipe: ConfigSections | None
) -> AsyncGenerator[Finding, None]:
    """Yield the findings on the environment and, with a recipe's model, on the texts for it."""
    settings = recipe.environment if recipe else EnvironmentConfig()
    has_model = recipe is not None and bool(recipe.model.path)
    renderer = load_turn_renderer(recipe.data, recipe.model.path) if recipe and has_model else None
    config, prompts = _choose_rows(
        arguments, recipe, settings, renderer.render_prompt if renderer else render_messages
    )
    generator = recipe.generator if recipe else GeneratorConfig()
    probe = EnvironmentProbe(
        config,
        prompts,
        open_episodes=config.open_episodes or generator.max_concurrent_rollouts,
    )
    async with aclosing(probe.run()) as found:
        async for finding in found:
            yield finding
    if renderer:
        for finding in probe_template(config, probe.description, renderer):
            yield finding
        yield probe_tokens(probe.records, config, renderer)


def _choose_rows(
    arguments: argparse.Namespace,
    recipe: ConfigSections | None,
    settings: EnvironmentConfig,
    render_prompt: RenderPrompt,
) -> tuple[EnvironmentConfig, list[Prompt]]:
    """Return the environment to check, by default that of the file's first row, and its rows."""
    file = choose_data_file(arguments, recipe)
    if not file:
        prompts = [
            make_text_prompt("", None, render_prompt, index=i) for i in range(arguments.rows)
        ]
        return choose_environment(arguments, settings, prompts[0]), prompts
    (first,) = read_prompts(file, render_prompt, first=0, count=1)
    config = choose_environment(arguments, settings, first)
    name, _ = config.single
    prompts = read_prompts(
        file, render_prompt, first=0, count=arguments.rows, environment=name or None
    )
    return config, prompts


def format_finding(finding: Finding) -> str:
    return f"{finding.status:<{STATUS_WIDTH}}  {finding.subject:<{SUBJECT_WIDTH}}  {finding.text}"
