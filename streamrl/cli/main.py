"""`streamrl`: reads the command line, runs a command, turns errors into one line and a code.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted.
"""

import argparse
import errno
import faulthandler
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NoReturn

from streamrl import __version__
from streamrl.cli.run_setup.signals import interrupt_on_signals
from streamrl.errors import ConfigError, StreamError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
COMMANDS = {
    "train": "train a model from a config, or go on with a run",
    "scale": "let replicas join or leave a run that is under way",
    "evaluate": "pass@k, mean@k and maj@k of a model or checkpoint on files of prompts",
    "score": "judge completions that are there already, as a run would",
    "rewards": "every kind of reward: what it is and its options",
    "data": "what files of prompts hold, and which rows a run could not use",
    "algorithms": "every algorithm: what it reads, its functions, its defaults, its paper",
    "graph": "the model calls of a config and what flows between them: text, DOT or a picture",
    "plan": "which placement is best for a run on a cluster, and why the others lost",
    "simulate": "a run's placement on a cluster, played in virtual time",
    "calibrate": "how long things took in a run, as constants for the planner",
    "report": "what bounds a run, and what would help; where every prompt of it is",
    "doctor": "what this machine has and what would run on it",
}

FORKING_COMMANDS = ("train",)
"""Commands whose workers are forked, see `streamrl.actors.launch.fork_server`."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the rule and where help is, then exit with 2."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Build the parser; only the named command's module is loaded, so that help is quick."""
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
            sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Ray prints a death into whatever is on the screen; it is an event of the run already.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    # Whoever calls this with words of its own has a process of its own.
    check_interrupted = _install_handlers() if argv is None else lambda: None
    command = next((a for a in arguments if a in COMMANDS), None)
    _reopen_standard_streams()
    if sys.stdout is None:
        # It was closed before the start, as by >&-.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if command in FORKING_COMMANDS and not {"-h", "--help"} & set(arguments):
        # First of all: it imports the workers' libraries while this process imports its own.
        from streamrl.actors.launch.fork_server import start_fork_server

        start_fork_server()
    try:
        try:
            parsed = _parse_arguments(build_parser(command), arguments)
            code = int(parsed.run(parsed))
        except Exception:
            # What was interrupted may have made another error of it.
            check_interrupted()
            raise
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _print_error(str(error), EXIT_BAD_INPUT)
    except StreamError as error:
        return _print_error(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _print_error("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output is gone; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename:
            raise
        # What is left to be written goes nowhere either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _print_error("standard output: no space left", EXIT_FAILED)


def _parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> argparse.Namespace:
    """Parse; a command's overrides may stand behind its options, which argparse refuses."""
    parsed, rest = parser.parse_known_args(arguments)
    if "overrides" in parsed:
        late = list(takewhile(lambda word: not word.startswith("-"), rest))
        parsed.overrides += late
        rest = rest[len(late) :]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def _install_handlers() -> Callable[[], None]:
    """See to signals; that of a crash, here or in what is started, prints all threads' stacks.

    Returns what raises KeyboardInterrupt if there has been Ctrl-C or SIGTERM.
    """
    faulthandler.enable(2)
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    return interrupt_on_signals()


def _reopen_standard_streams() -> None:
    """Open the standard streams that the caller has closed, as by <&-, before others take them."""
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _print_error(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"streamrl: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
