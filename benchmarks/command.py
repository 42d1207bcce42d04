"""The command line of every benchmark: `--quick`, progress on stderr, one JSON object on stdout.

A benchmark has `make_parser()`, which declares its options, and `measure(arguments)`, which returns
its figures. What goes wrong is one line and exit code 1; a bad argument is one line and 2.
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
"""The repository."""


class BenchmarkError(StreamError):
    """A part of a benchmark failed, or did not end in time; the message names it."""


class BenchmarkParser(OneLineParser):
    """Options of a benchmark, with other defaults under `--quick`."""

    def __init__(self, name: str, doc: str | None) -> None:
        description = (doc or "").partition("\n")[0]
        super().__init__(prog=name, description=description, allow_abbrev=False)
        self._quick: dict[str, Any] = {}
        self.add_argument(
            "--quick",
            action="store_true",
            help="the shortest form, to see that it runs: its figures mean nothing",
        )
        self.add_argument("--json", action="store_true", help="the object on one line")

    def set_quick(self, **defaults: Any) -> None:
        """Set the defaults of options under `--quick`, as `set_defaults` does those without."""
        self._quick |= defaults

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the command line, by default that of the process."""
        words = sys.argv[1:] if argv is None else list(argv)
        if "--quick" in words:
            self.set_defaults(**self._quick)
        return self.parse_args(words)


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of argument: whole numbers from `least` on."""

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
    """Parse, measure and print the figures; raises SystemExit where that fails."""
    arguments = parser.parse(argv)
    try:
        # Standard output is the JSON object alone, whatever a cluster has to say meanwhile.
        with contextlib.redirect_stdout(sys.stderr):
            figures = measure(arguments)
    except ConfigError as error:
        parser.error(str(error))
    except StreamError as error:
        line = str(error).partition("\n")[0]
        parser.exit(EXIT_FAILED, f"{parser.prog}: {line}\n")
    print(json.dumps(figures, indent=None if arguments.json else 1))


def report_progress(text: str) -> None:
    """Print a line to stderr, at the second of the process."""
    print(f"{time.perf_counter() - _STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


_STARTED = time.perf_counter()


def run_command(
    words: Sequence[str],
    what: str,
    *,
    timeout_s: float,
    stdin: str | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command and return its standard output; ends all processes of its group.

    Raises BenchmarkError naming `what`.
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
        raise BenchmarkError(f"{what}: {error}") from None
    try:
        output, errors = process.communicate(stdin, timeout_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{what}: not done after {timeout_s:g} s") from None
    finally:
        # Its children too, which would hold the pipes open; Ctrl-C here does not reach them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
        raise BenchmarkError(f"{what}: {lines[-1]}")
    return output
