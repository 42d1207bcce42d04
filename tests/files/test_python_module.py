"""Import of user files: bounded in time, without side effects on the process."""

import os
import signal

import pytest

from streamrl.errors import ConfigError
from streamrl.files import python_module
from streamrl.files.python_module import import_file, load_referenced_function


def test_a_hanging_import_times_out_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(python_module, "IMPORT_TIMEOUT_S", 1.0)
    path = tmp_path / "reward.py"
    path.write_text("import time\n\ntime.sleep(600)\n")
    with pytest.raises(ConfigError) as caught:
        import_file(str(path), setting="rewards.path")
    words = "TimeoutError: import took longer than 1 s"
    assert str(caught.value) == f"rewards.path={path}:3: {words}"
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_a_huge_file_is_not_imported(tmp_path):
    path = tmp_path / "reward.py"
    path.touch()
    os.truncate(path, 10 << 30)
    with pytest.raises(ConfigError, match=r"^filter.path=.*reward.py: exceeds the limit of 64 MiB"):
        import_file(str(path), setting="filter.path")


def test_the_alarm_is_off_after_an_import(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("x = 1\n")
    assert import_file(str(path), setting="rewards.path").x == 1
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_an_existing_alarm_is_left_unchanged(tmp_path):
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
    ("source", "parameters"),
    [
        ("def f(): pass", ()),
        ("def f(b, a): pass", ("a", "b")),
        ("def f(b, other=1): pass", ("b",)),
        ("def f(*a, **rest): pass", ("a", "b")),
        ("def f(*a): pass", ()),
    ],
)
def test_a_function_receives_the_arguments_it_names(tmp_path, source, parameters):
    path = tmp_path / "mine.py"
    path.write_text(source)
    code = load_referenced_function(f"{path}:f", setting="scorer.combine")
    assert code.select_arguments(("a", "b")) == parameters
