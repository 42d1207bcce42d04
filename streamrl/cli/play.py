"""`streamrl play`: play an episode of an environment in the terminal, or check it."""

import argparse
import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_whole_number
from streamrl.cli.arguments.config_args import (
    ROW_OPTIONS,
    add_file_options,
    add_recipe_argument,
    read_file_options,
)
from streamrl.config.run_config import ConfigSections, load_sections
from streamrl.data.config import DataFile
from streamrl.data.prompt_file import check_row_environment, load_data_rows, make_prompt
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.environments.config import CLASS_KIND, EnvironmentConfig
from streamrl.environments.episodes.check_environment import (
    EnvironmentProbe,
    TextEnd,
    check_model,
    play_text_episode,
    render_messages,
)
from streamrl.environments.episodes.driver import load_turn_renderer
from streamrl.environments.hosts.host_pool import EnvironmentHostPool
from streamrl.environments.interface import (
    EnvironmentStep,
    Message,
    Reply,
    ResetResult,
    ToolSchema,
)
from streamrl.environments.tool_calls.tool_schema import format_tool
from streamrl.errors import ConfigError
from streamrl.files.printable_text import make_printable
from streamrl.files.typed_settings import suggest_nearest
from streamrl.messages import Array, Prompt, make_uid
from streamrl.telemetry.progress import ProgressLine, show_progress

RenderPrompt = Callable[..., Array]
"""Function that returns the tokens of a row's messages."""


def add_environment_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ENVIRONMENT, --config, --data and the reading options of rows."""
    parser.add_argument(
        "environment",
        nargs="?",
        type=parse_nonempty,
        metavar="ENVIRONMENT",
        help="file.py or file.py:Class, as in environment.path (default: the config's)",
    )
    parser.add_argument(
        "--environment",
        dest="environment_name",
        type=parse_nonempty,
        metavar="NAME",
        help="environment among environment.named of --config (default: the row's)",
    )
    add_recipe_argument(parser, "the environment and, if given, model and data")
    parser.add_argument(
        "--data", type=parse_nonempty, metavar="FILE", help="prompt file with the rows of episodes"
    )
    add_file_options(parser, ROW_OPTIONS)


def choose_environment(
    arguments: argparse.Namespace, recipe: EnvironmentConfig, prompt: Prompt
) -> EnvironmentConfig:
    """Return settings of the environment of ENVIRONMENT, else of --environment, else of the prompt.

    Raises ConfigError if no environment is named, or the recipe lacks it.
    """
    path, name = arguments.environment, arguments.environment_name
    if path is not None:
        if name is not None:
            raise ConfigError(f"--environment={name} has no effect: ENVIRONMENT={path} is given")
        return replace(recipe, path=path, kind=CLASS_KIND, options={}, tools=[], named={})
    if not recipe.is_enabled:
        raise ConfigError("give ENVIRONMENT, as file.py:Class, or a --config with environment.path")
    names = tuple(recipe.specs)
    if name is not None and name not in recipe.named:
        hint = suggest_nearest(name, recipe.named, noun="environment")
        raise ConfigError(f"--environment={name}: not in environment.named of --config; {hint}")
    if name is None and recipe.named and not prompt.row_location:
        raise ConfigError(f"give --environment NAME, one of {', '.join(names)}")
    if name is None:
        check_row_environment(prompt, names)
        name = prompt.environment
    return recipe.select(name)


def choose_data_file(
    arguments: argparse.Namespace, recipe: ConfigSections | None
) -> DataFile | None:
    """Return the prompt file of --data, else the first of the recipe, else None.

    Raises ConfigError for a reading option without a file.
    """
    files = (*recipe.data.train_files, *recipe.data.eval_files) if recipe else ()
    if arguments.data is not None:
        files = (DataFile(arguments.data),)
    options = read_file_options(arguments, has_file=bool(files))
    return replace(files[0], **options) if files else None


def read_prompts(
    file: DataFile,
    render_prompt: RenderPrompt,
    *,
    first: int,
    count: int,
    environment: str | None = None,
) -> list[Prompt]:
    """Return `count` prompts of a file from row `first` on, fewer at its end.

    environment: name that the rows must have; None: any. Raises ConfigError for a bad row, and for
    a file without such rows.
    """
    rows = load_data_rows(file)
    if environment is not None:
        rows = (row for row in rows if row.environment == environment)
    chosen = list(islice(rows, first, first + count))
    if not chosen and environment is not None:
        raise ConfigError(f"{file.path}: no row names the environment {environment}")
    if not chosen:
        raise ConfigError(f"{file.path}: has no row {first}; rows count from 0")
    return [make_prompt(row, render_prompt(row.messages).tolist()) for row in chosen]


def make_text_prompt(
    text: str, ground_truth: str | None, render_prompt: RenderPrompt, *, index: int = 0
) -> Prompt:
    """Return a prompt of one user message, as of row `index` with {"prompt": text}."""
    messages = [{"role": "user", "content": text}]
    return Prompt(
        make_uid(0, index),
        render_prompt(messages),
        messages=messages,
        ground_truth=ground_truth,
        is_chat=False,
    )


CALL_HINT = 'Call a tool as name(argument="value"); any other text answers and ends the episode.'


class EpisodeTranscript:
    """Printer of what an episode's environment says to a person (`EpisodeObserver`)."""

    def see_start(self, prompt: Prompt, start: ResetResult) -> None:
        if start.tools:
            _print_line("tools:")
            for tool in start.tools:
                _print_line(f"  {format_tool(tool)}")
            _print_line(CALL_HINT)
        _print_messages([m for m in prompt.messages if m["content"]])
        _print_messages(start.messages)

    def see_turn(self, reply: Reply, step: EnvironmentStep) -> None:
        for call, outcome in zip_longest(reply.calls, step.outcomes):
            _print_line(f"  call {call.name or '?'}: {outcome or call.outcome}")
        if step.reward:
            _print_line(f"  reward {step.reward:g}")
        _print_messages(() if step.done else step.messages)


def _print_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        label, content = str(message["role"]), message["content"]
        if label == "tool" and message.get("name"):
            label += f" {message['name']}"
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        _print_line(f"{label}> {text}")


def _print_line(text: str) -> None:
    print(make_printable(text))


DEFAULT_ROWS = 4
PLAY_OPTIONS = {"row": None, "prompt": None, "truth": None, "seed": 0}
"""Options, with their defaults, that `--check` does not use."""
CHECK_OPTIONS = {"rows": None}
PERSON_PROMPT = "you> "
HINT = "One line is one turn; a backslash at its end continues it. Ctrl-D ends the episode."


class TurnInterruptedError(Exception):
    """Ctrl-C while a person types. asyncio reports a KeyboardInterrupt in a task as unhandled."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "streamrl play ENVIRONMENT [--data FILE --row N | --prompt TEXT --truth TEXT]"
        " [options]\n"
        "       streamrl play ENVIRONMENT --check [--data FILE] [--config CONFIG] [--rows N]"
    )
    add_environment_arguments(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the environment before a run: episodes of policies that are no model",
    )
    parser.add_argument(
        "--rows",
        type=partial(parse_whole_number, least=1),
        metavar="N",
        help=f"rows of --check; without a file, rows without text (default: {DEFAULT_ROWS})",
    )
    row_type = partial(parse_whole_number, least=0)
    parser.add_argument(
        "--row", type=row_type, metavar="N", help="row of the file, from 0 (default: 0)"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="user message of a row, without a file")
    parser.add_argument("--truth", metavar="TEXT", help="ground truth of the row of --prompt")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the environment (default 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    with_check = "with" if arguments.check else "without"
    for name, default in (PLAY_OPTIONS if arguments.check else CHECK_OPTIONS).items():
        if vars(arguments)[name] != default:
            raise ConfigError(f"--{name}: has no effect {with_check} --check")
    recipe = load_sections(arguments.config) if arguments.config else None
    if arguments.check:
        return _run_check(arguments, recipe)
    _check_row_arguments(arguments)
    try:
        end = asyncio.run(_play(arguments, recipe))
    except EOFError:
        print("\nended before the environment did: no score")
        return 0
    except TurnInterruptedError:
        print()
        raise KeyboardInterrupt from None
    rewards = ", ".join(f"{reward:g}" for reward in end.rewards)
    reason = end.reason.name.lower()
    print(f"end: {reason} after turn {len(end.rewards)}; rewards {rewards}; score {end.score:g}")
    return 0


def _check_row_arguments(arguments: argparse.Namespace) -> None:
    if arguments.prompt is not None and (arguments.data is not None or arguments.row is not None):
        raise ConfigError("--prompt: gives the row itself; remove --data and --row")
    if arguments.truth is not None and arguments.prompt is None:
        raise ConfigError(f"--truth={arguments.truth}: needs --prompt")


async def _play(arguments: argparse.Namespace, recipe: ConfigSections | None) -> TextEnd:
    """Play an episode in a process of the environment, and print it."""
    settings = recipe.environment if recipe else EnvironmentConfig()
    prompt = _read_row(arguments, recipe)
    config = choose_environment(arguments, settings, prompt)
    hosts = EnvironmentHostPool(replace(config, processes=1))
    try:
        with show_progress("starting the environment"):
            await hosts.start()
        print(HINT)
        session = hosts.open_session(prompt, seed=arguments.seed)
        try:
            # A person may think for as long as they like.
            return await play_text_episode(
                config, session, prompt, ask_person, observer=EpisodeTranscript(), timeout_s=None
            )
        finally:
            await session.close()
    finally:
        await hosts.close()


def _read_row(arguments: argparse.Namespace, recipe: ConfigSections | None) -> Prompt:
    """Return the row of --prompt, else that of the prompt file, else one without text."""
    if arguments.prompt is None and (file := choose_data_file(arguments, recipe)):
        (prompt,) = read_prompts(file, render_messages, first=arguments.row or 0, count=1)
        return prompt
    if arguments.row is not None:
        raise ConfigError(f"--row={arguments.row}: needs a prompt file; give --data")
    return make_text_prompt(arguments.prompt or "", arguments.truth, render_messages)


async def ask_person(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
    """Read the turn of the person at the terminal. Raises EOFError and TurnInterruptedError.

    Blocks the event loop: only one episode is open, and it waits for this turn. In a thread, the
    read could not be given up at Ctrl-C.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and arrow keys
    lines = [_read_line(PERSON_PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_read_line(" " * len(PERSON_PROMPT)))
    return "\n".join(lines)


def _read_line(label: str) -> str:
    try:
        line = input(label)
    except KeyboardInterrupt:
        raise TurnInterruptedError from None
    if not sys.stdin.isatty():
        print(line)  # no terminal has shown it
    return line


def _run_check(arguments: argparse.Namespace, recipe: ConfigSections | None) -> int:
    """Print each finding as it comes; return exit code 1 if a check failed, else 0."""
    arguments.rows = DEFAULT_ROWS if arguments.rows is None else arguments.rows
    # A failing close is a finding.
    logging.getLogger("streamrl.environments").setLevel(logging.ERROR)
    with show_progress("checking the environment") as progress:
        return int(asyncio.run(_print_findings(arguments, recipe, progress)))


async def _print_findings(
    arguments: argparse.Namespace, recipe: ConfigSections | None, progress: ProgressLine
) -> bool:
    """Check an environment and, with a recipe's model, its texts; return whether a check failed."""
    renderer = None
    if recipe and recipe.model.path:
        renderer = load_turn_renderer(recipe.data, recipe.model.path)
    render_prompt = renderer.render_prompt if renderer else render_messages
    config, prompts = _choose_rows(arguments, recipe, render_prompt)
    generator = recipe.generator if recipe else GeneratorConfig()
    num_open = config.open_episodes or generator.max_concurrent_rollouts
    checks = [EnvironmentProbe(config, prompts, open_episodes=num_open).run()]
    if renderer:
        checks.append(check_model(config, renderer, prompts))
    has_failed = False
    for check in checks:
        async with aclosing(check) as findings:
            async for status, subject, text in findings:
                progress.print_line(f"{status:<4}  {subject:<11}  {text}")
                has_failed |= status == "fail"
    return has_failed


def _choose_rows(
    arguments: argparse.Namespace, recipe: ConfigSections | None, render_prompt: RenderPrompt
) -> tuple[EnvironmentConfig, list[Prompt]]:
    """Return the environment to check, by default that of the file's first row, and its rows."""
    settings = recipe.environment if recipe else EnvironmentConfig()
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
