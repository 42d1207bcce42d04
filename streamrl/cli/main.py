"""Entry point of `streamrl`: parse the command line, run a command, print errors on one line.

Exit codes: 0 success, 1 the run failed, 2 bad input, 130 interrupted.
"""

import argparse
import errno
import faulthandler
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import Any, NoReturn

from streamrl import __version__
from streamrl.actors.launch.fork_server import is_serving, start_fork_server, stop_fork_server
from streamrl.cli.arguments.arg_types import parse_number, parse_whole_number
from streamrl.cli.run_setup.signals import INTERRUPTS
from streamrl.errors import ConfigError, StreamError
from streamrl.files.printable_text import make_printable
from streamrl.telemetry.progress import show_progress

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
COMMANDS = {
    "train": "train a model from a config, or resume a run",
    "scale": "add or remove replicas of a running run",
    "evaluate": "compute pass@k, mean@k and maj@k of a model or checkpoint on prompt files",
    "play": "play an episode of an environment in the terminal, or check it before a run",
    "score": "score existing completions with a run's rewards",
    "config": "list config keys, reward kinds and algorithms, or show a config's model calls",
    "data": "check prompt files and list rows that a run cannot use",
    "plan": "find the best placement of a run on a cluster",
    "simulate": "simulate a run's placement on a cluster in virtual time",
    "calibrate": "fit the planner's cost constants to a run",
    "episodes": "show recorded rollouts turn by turn, as text or JSON",
    "report": "find a run's bottleneck and possible fixes, or audit its prompts",
    "view": "serve a page of charts of runs, and follow those under way",
    "doctor": "check this machine's hardware and packages, and say what can run",
}
MOVED_COMMANDS = {
    "rewards": "config --rewards",
    "algorithms": "config --algorithms",
    "graph": "config --graph",
    "environment": "play --check",
}
"""Commands of earlier versions, with what replaces them."""


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that prints errors on one line, in words of this package."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", int, parse_whole_number)
        self.register("type", float, parse_number)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Build the parser of the command line with all subcommands.

    Only the module of the subcommand `command` is imported, which keeps --help fast.
    """
    parser = OneLineParser(prog="streamrl", description="Post-train language models with RL.")
    parser.add_argument("--version", action="version", version=f"streamrl {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=OneLineParser
    )
    for name, purpose in COMMANDS.items():
        sub = commands.add_parser(name, help=purpose, description=purpose)
        if name == command:
            module = importlib.import_module(f"streamrl.cli.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    argv: arguments without the program's name, by default those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Ray prints each actor's death to the terminal; the run logs the same death as an event.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    # A caller that passes argv owns the process, so leave its signal handlers alone.
    if argv is None:
        _install_handlers()
    command = next((a for a in arguments if a in COMMANDS), None)
    _reopen_standard_streams()
    if sys.stdout is None:
        # The caller closed stdout, as with `>&-`.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    is_help = bool({"-h", "--help"} & set(arguments))
    # Its workers are forked, see `streamrl.actors.launch.fork_server`.
    forks = command == "train" and not is_help and not is_serving()
    if forks:
        # Start first: the server imports the workers' libraries in parallel with this process.
        start_fork_server()
    try:
        with INTERRUPTS.preferred():
            # Only --help and --version name no command.
            with show_progress("loading") if command else nullcontext():
                parser = build_parser(command)
            parsed = _parse_arguments(parser, arguments)
            code = int(parsed.run(parsed))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _print_error(str(error), EXIT_BAD_INPUT)
    except StreamError as error:
        return _print_error(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _print_error("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout, such as `head`, exited.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        return _explain_os_error(error)
    finally:
        if forks:
            stop_fork_server()


def _parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> argparse.Namespace:
    """Accept key=value overrides and names after options, which argparse alone refuses."""
    if arguments and (moved := MOVED_COMMANDS.get(arguments[0])):
        raise ConfigError(f"{arguments[0]}: no longer a command; use streamrl {moved}")
    parsed, rest = parser.parse_known_args(arguments)
    for words in (vars(parsed)[name] for name in ("overrides", "names") if name in parsed):
        late = list(takewhile(lambda word: not word.startswith("-"), rest))
        words += late
        rest = rest[len(late) :]
    if rest:
        parsed.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def _install_handlers() -> None:
    """Let the signals that end a command raise KeyboardInterrupt.

    A crash of this process or one that it starts prints the stacks of all threads (faulthandler).
    """
    faulthandler.enable(2)
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    INTERRUPTS.install()


def _reopen_standard_streams() -> None:
    """Open closed standard streams on /dev/null, or the next opened file takes their number."""
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _explain_os_error(error: OSError) -> int:
    """Print what a file system refuses, if it says enough; otherwise raise the error."""
    if error.errno == errno.ENAMETOOLONG:
        return _print_error(f"{error.filename!s:.200}: {error.strerror}", EXIT_BAD_INPUT)
    if error.errno != errno.ENOSPC or error.filename:
        raise error
    # Discard the remaining buffered output; flushing it would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _print_error("standard output: no space left", EXIT_FAILED)


def _print_error(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"streamrl: {make_printable(message)}", file=sys.stderr)
    return code
