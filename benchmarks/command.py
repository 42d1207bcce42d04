"""Command line of every benchmark: `--quick`, progress on stderr, one JSON object on stdout.

A benchmark module has `make_parser()`, which declares its options, and `measure(arguments)`, which
returns its results. An error is one line and exit code 1; an invalid argument is one line and exit
code 2.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.cli.main import EXIT_FAILED, OneLineParser
from streamrl.errors import ConfigError, StreamError

ROOT = Path(__file__).resolve().parent.parent


class BenchmarkError(StreamError):
    """Failure or timeout of a part of a benchmark; the message names the part."""


class BenchmarkParser(OneLineParser):
    """Argument parser with separate defaults for `--quick`."""

    def __init__(self, name: str, doc: str | None) -> None:
        description = (doc or "").partition("\n")[0]
        super().__init__(prog=name, description=description, allow_abbrev=False)
        self._quick: dict[str, Any] = {}
        self.add_argument(
            "--quick",
            action="store_true",
            help="shortest form, as a smoke test; the results are meaningless",
        )
        self.add_argument("--json", action="store_true", help="print the object on one line")

    def set_quick(self, **defaults: Any) -> None:
        """Set the defaults of options under `--quick`."""
        self._quick |= defaults

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        words = sys.argv[1:] if argv is None else list(argv)
        if "--quick" in words:
            self.set_defaults(**self._quick)
        return self.parse_args(words)


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type for integers of at least `least`."""

    def parse(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number, {least} or more")
        return int(text)

    return parse


def run_benchmark(
    parser: BenchmarkParser,
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    argv: Sequence[str] | None = None,
) -> None:
    """Parse, measure and print the results; raise SystemExit on failure."""
    arguments = parser.parse(argv)
    try:
        # Keep the output of Ray and its workers out of stdout, which holds only the JSON object.
        with contextlib.redirect_stdout(sys.stderr):
            figures = measure(arguments)
    except ConfigError as error:
        parser.error(str(error))
    except StreamError as error:
        line = str(error).partition("\n")[0]
        parser.exit(EXIT_FAILED, f"{parser.prog}: {line}\n")
    print(json.dumps(figures, indent=None if arguments.json else 1))


def replace_table(page: str, name: str, text: str) -> str:
    """Replace the text between the comments that name a table."""
    before, rest = page.split(f"<!-- {name} -->\n", 1)
    after = rest.split(f"<!-- end of {name} -->", 1)[1]
    return f"{before}<!-- {name} -->\n{text}\n<!-- end of {name} -->{after}"


def report_progress(text: str) -> None:
    """Print a line to stderr, with the seconds since the process started."""
    print(f"{time.perf_counter() - _STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


_STARTED = time.perf_counter()


def run_command(
    words: Sequence[str],
    description: str,
    *,
    timeout_s: float,
    stdin: str | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command and return its standard output; kill its process group at the end.

    Raises BenchmarkError with `description`.
    """
    try:
        process = subprocess.Popen(
            list(words),
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise BenchmarkError(f"{description}: {error}") from None
    try:
        output, errors = process.communicate(stdin, timeout_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{description}: not done after {timeout_s:g} s") from None
    finally:
        # Kill the children too: they would hold the pipes open, and Ctrl-C does not reach their
        # session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise BenchmarkError(f"{description}: {lines[-1]}")
    return output
