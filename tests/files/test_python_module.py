"""Import of user files: bounded in time, without side effects on the process."""

import os
import signal

import pytest

from streamrl.errors import ConfigError
from streamrl.files import python_module
from streamrl.files.python_module import import_file, load_function, load_referenced_function


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


def test_an_existing_alarm_is_left_unchanged(tmp_path):
    def handler(number, frame):
        raise AssertionError

    path = tmp_path / "reward.py"
    path.write_text("x = 1\n")
    before = signal.signal(signal.SIGALRM, handler)
    try:
        import_file(str(path), setting="rewards.path")
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("source", "parameters"),
    [
        ("def f(): pass", ()),
        ("def f(b, a): pass", ("a", "b")),
        ("def f(*a, **rest): pass", ("a", "b")),
        ("def f(*, a, c=1): pass", ("a",)),
        ("class F:\n    def __call__(self, b): pass\nf = F()", ("b",)),
    ],
)
def test_a_function_receives_the_arguments_it_names(tmp_path, source, parameters):
    path = tmp_path / "mine.py"
    path.write_text(source)
    code = load_referenced_function(f"{path}:f", setting="data.filter")
    assert code.select_arguments(("a", "b")) == parameters


@pytest.mark.parametrize(
    ("signature", "refused"),
    [("(d, a, c)", "d, c"), ("(a, *, c)", "c"), ("(a=1, /)", "a")],
)
def test_a_required_parameter_that_is_not_offered_is_refused(tmp_path, signature, refused):
    path = tmp_path / "mine.py"
    path.write_text(f"def f{signature}: pass")
    code = load_referenced_function(f"{path}:f", setting="data.filter")
    message = rf"^data.filter={path}:f: in {path} requires {refused}; available, by keyword: a, b$"
    with pytest.raises(ConfigError, match=message):
        code.select_arguments(("a", "b"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\ndef other(): pass", "{label}: not in {path}; its functions are other"),
        ("", "{label}: not in {path}; its functions are none"),
        ("f = 5", "{label}: in {path} it is not a function"),
        ("f = max", "{label}: in {path}: no signature"),
        ("x = 1\nimport no_such_module", "filter.path={path}:2: ModuleNotFoundError: No"),
        ("x = 1\ny = = 2", "filter.path={path}:2: SyntaxError"),
        ("raise SystemExit(1)", "filter.path={path}:1: SystemExit: 1"),
        ("raise ValueError('half \\ud800')", "filter.path={path}:1: ValueError: half \\ud800"),
    ],
)
def test_a_file_without_the_function_is_refused(tmp_path, source, words):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_function(str(path), "f", setting="filter.path", label="filter.function=f")
    assert str(caught.value).startswith(words.format(path=path, label="filter.function=f"))


def test_a_missing_file_and_another_kind_of_file_are_refused(tmp_path):
    (tmp_path / "mine.txt").touch()
    for name, words in (("none.py", "no such file"), ("mine.txt", "must be a .py file")):
        with pytest.raises(ConfigError, match=rf"^filter.path=/.*{name}: {words}$"):
            import_file(str(tmp_path / name), setting="filter.path")
