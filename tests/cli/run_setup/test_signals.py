"""Signals that end a run."""

import contextlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from streamrl.cli.run_setup.signals import interrupt_on_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore pytest's signal handlers."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_with_a_swallowed_exception_still_interrupts(number: int):
    check = interrupt_on_signals()
    check()
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt):
        check()


def test_a_command_with_closed_stdout_succeeds():
    command = f"{shlex.quote(sys.executable)} -m streamrl.cli algorithms >&-"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


def test_opened_files_never_reuse_closed_standard_descriptors():
    program = "import os, sys; from streamrl.cli.main import main; main(['algorithms'])"
    program += "; sys.exit(min(os.open('/dev/null', os.O_RDONLY), 3) != 3)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 0


PROGRAM = """
import os, signal, sys
from streamrl.cli import main
from streamrl.errors import ConfigError

def interrupted(command):
    try:
        os.kill(os.getpid(), signal.{name})
    except KeyboardInterrupt:
        raise ConfigError("rewards: 'NoneType' object has no attribute") from None

main.build_parser = interrupted
sys.exit(main.main())
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_converted_by_a_library_is_still_an_interrupt(name: str):
    words = [sys.executable, "-c", PROGRAM.format(name=name)]
    process = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (130, "streamrl: interrupted\n")
