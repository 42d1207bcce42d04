"""`streamrl environment check`: check an environment with scripted policies before a run."""

import argparse
import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict

from streamrl.cli.arguments.environment_args import (
    RenderPrompt,
    add_environment_arguments,
    choose_data_file,
    choose_environment,
    load_recipe,
    make_text_prompt,
    read_prompts,
)
from streamrl.config.run_config import ConfigSections
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.start_driver import load_turn_renderer
from streamrl.environments.probing.environment_probe import EnvironmentProbe
from streamrl.environments.probing.finding import Finding, FindingStatus
from streamrl.environments.probing.token_probe import probe_template, probe_tokens
from streamrl.environments.scripted.text_episode import render_messages
from streamrl.errors import ConfigError
from streamrl.messages import Prompt
from streamrl.telemetry.progress_line import ProgressLine, show_progress

EXIT_FAILED = 1
DEFAULT_ROWS = 4
STATUS_WIDTH, SUBJECT_WIDTH = 4, 11


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "streamrl environment check ENVIRONMENT [--data FILE] [--config CONFIG] [options]"
    )
    parser.add_argument(
        "action", choices=["check"], help="check: run episodes of policies that are no model"
    )
    add_environment_arguments(parser)
    parser.add_argument(
        "--rows",
        type=int,
        default=DEFAULT_ROWS,
        metavar="N",
        help=f"number of rows to use; without a file, rows without text (default: {DEFAULT_ROWS})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return exit code 1 if a check failed, else 0."""
    if arguments.rows < 1:
        raise ConfigError(f"--rows={arguments.rows}: must be at least 1")
    # The pool warns of the process that the probe kills.
    logging.getLogger("streamrl.environments").setLevel(logging.ERROR)
    with show_progress("checking the environment") as progress:
        findings = asyncio.run(_collect_findings(arguments, progress))
    if arguments.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    has_failed = any(finding.status is FindingStatus.FAIL for finding in findings)
    return EXIT_FAILED if has_failed else 0


async def _collect_findings(arguments: argparse.Namespace, progress: ProgressLine) -> list[Finding]:
    """Check an environment; print each finding as it comes, unless all are printed as JSON."""
    findings = []
    async with aclosing(check(arguments, load_recipe(arguments.config))) as found:
        async for finding in found:
            findings.append(finding)
            if not arguments.json:
                progress.print_line(format_finding(finding))
    return findings


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
        for finding in probe_tokens(probe.records, config, renderer):
            yield finding


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
