"""A user's file is imported in time, and the process is left as it was."""

import os
import signal

import pytest

from streamrl.errors import ConfigError
from streamrl.files import python_module
from streamrl.files.python_module import import_file, load_referenced_function


def test_an_import_that_hangs_is_ended_with_the_line_where_it_did(tmp_path, monkeypatch):
    monkeypatch.setattr(python_module, "IMPORT_TIMEOUT_S", 1.0)
    path = tmp_path / "reward.py"
    path.write_text("import time\n\ntime.sleep(600)\n")
    with pytest.raises(ConfigError) as caught:
        import_file(str(path), setting="rewards.path")
    words = "TimeoutError: import took longer than 1 s"
    assert str(caught.value) == f"rewards.path={path}:3: {words}"
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_a_file_that_is_no_program_is_not_read_whole(tmp_path):
    path = tmp_path / "reward.py"
    path.touch()
    os.truncate(path, 10 << 30)
    with pytest.raises(ConfigError, match=r"^filter.path=.*reward.py: exceeds the limit of 64 MiB"):
        import_file(str(path), setting="filter.path")


def test_after_an_import_the_alarm_is_off(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("x = 1\n")
    assert import_file(str(path), setting="rewards.path").x == 1
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_an_alarm_that_somebody_else_set_is_left_alone(tmp_path):
    def other(number, frame):
        raise AssertionError

    path = tmp_path / "reward.py"
    path.write_text("x = 1\n")
    before = signal.signal(signal.SIGALRM, other)
    try:
        import_file(str(path), setting="rewards.path")
        assert signal.getsignal(signal.SIGALRM) is other
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("def f(): pass", ()),
        ("def f(b, a): pass", ("a", "b")),
        ("def f(b, other=1): pass", ("b",)),
        ("def f(*a, **rest): pass", ("a", "b")),
        ("def f(*a): pass", ()),
    ],
)
def test_a_function_is_given_what_it_asks_for(tmp_path, source, asked):
    path = tmp_path / "mine.py"
    path.write_text(source)
    code = load_referenced_function(f"{path}:f", setting="scorer.combine")
    assert code.select_arguments(("a", "b")) == asked
