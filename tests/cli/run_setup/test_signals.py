"""Signals that end a run."""

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.cli.run_setup.signals import Interrupts, catch_first_interrupt
from streamrl.errors import StreamError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore pytest's signal handlers; nothing is ignored, as it would be under nohup."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_with_a_swallowed_exception_still_interrupts(number: int):
    interrupts = Interrupts()
    interrupts.install()
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt):
        interrupts.install()
    with pytest.raises(KeyboardInterrupt), interrupts.preferred():
        raise StreamError("generator-0 died")
    interrupts.check()  # the signal counted once


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_stops_and_only_a_second_sighup_does_not_abort(number: int):
    with catch_first_interrupt() as stopping:
        assert not stopping()
        signal.raise_signal(number)
        assert stopping()
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


ON_TERMINAL = """
import sys, time
from pathlib import Path
from streamrl.cli.run_setup.signals import catch_first_interrupt
with catch_first_interrupt() as stopping:
    print("started", flush=True)
    while not stopping():
        time.sleep(0.01)
    print("saving", flush=True)
    Path(sys.argv[1]).write_text("saved")
"""


def test_a_run_on_a_closed_terminal_can_print_and_save(tmp_path: Path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execl(sys.executable, sys.executable, "-c", ON_TERMINAL, str(tmp_path / "state"))
    assert os.read(terminal, 7) == b"started"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "state").read_text() == "saved"


def test_a_command_with_closed_stdout_succeeds():
    command = f"{shlex.quote(sys.executable)} -m streamrl.cli config >&-"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


PROGRAM = """
import os, signal, sys
from streamrl.cli import main
from streamrl.errors import ConfigError

def interrupted(command):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        raise ConfigError("rewards: 'NoneType' object has no attribute") from None

main.build_parser = interrupted
sys.exit(main.main())
"""


def test_an_interrupt_converted_by_a_library_is_still_an_interrupt():
    words = [sys.executable, "-c", PROGRAM]
    process = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (130, "streamrl: interrupted\n")
