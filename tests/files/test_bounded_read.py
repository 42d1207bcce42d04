"""Bounded reads of files that a user names."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import (
    MAX_DEPTH,
    MAX_SETTINGS_BYTES,
    NotRegularError,
    open_regular_file,
    parse_json,
    read_lines,
    read_small_text,
    read_small_yaml,
    wrap_file_errors,
)


def write_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    return path


def test_exponential_yaml_aliases_are_refused(tmp_path: Path):
    levels = ["&l0 [x, x]", *(f"&l{i + 1} [*l{i}, *l{i}]" for i in range(99))]
    path = write_file(tmp_path, "".join(f"- {level}\n" for level in levels))
    message = r"^line 2, column 8: \*l0: aliases are not allowed; write the value out$"
    with pytest.raises(ValueError, match=message):
        read_small_yaml(path)


@pytest.mark.parametrize(
    "text",
    [
        *("a: 1e-6\nb: -1.5e6\nc: 1_0.e3\nd: 1e+2\ne: 3.\n", "a: 2026-01-31\nb: 1:30\nc: 0x1f\n"),
        *("a: .5\nb: .inf\nc: 1e\nd: e5\ne: 1_000\n", "a: yes\nb: ~\n1: on\n", "a: ${b.c}\n"),
        *("<<: {a: 1}\na: 2\n", "- [1, {b: 'x'}]\n- |\n  text\n", ""),
    ],
)
def test_yaml_scalars_parse_like_omegaconf(tmp_path: Path, text: str):
    value = read_small_yaml(write_file(tmp_path, text))
    expected = OmegaConf.to_container(OmegaConf.load(tmp_path / "file.yaml"))
    assert (value or {}) == expected
    assert repr(value or {}) == repr(expected)


@pytest.mark.parametrize(
    "text",
    [
        *("a: 1\nb: 2\na: 1\n", "1: 2\n2: 3\n1: 1\n", "a:\n\n  {a: 1, a: 2}\n"),
        "a:\n\n <<: {a: 1, a: 2}\n",
    ],
)
def test_a_duplicate_yaml_key_is_refused_with_its_position(tmp_path: Path, text: str):
    with pytest.raises(ValueError, match=r"^line 3, column (1|10|13): [a1]: must occur only once$"):
        read_small_yaml(write_file(tmp_path, text))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ('!!int ""', "'': not a valid int"),
        ("!!timestamp 2024-99-99", "'2024-99-99': not a valid timestamp"),
        ("9" * 5000, f"'{'9' * 39}: not a valid int"),
        ("!!map [1]", "expected a mapping node, but found sequence"),
        ("!own 1", "could not determine a constructor for the tag '!own'"),
        ("*gone", "*gone: aliases are not allowed; write the value out"),
    ],
)
def test_a_wrong_value_is_reported_with_its_position(tmp_path: Path, word: str, message: str):
    with pytest.raises(ValueError) as error:
        read_small_yaml(write_file(tmp_path, f"a:\n  - {word}\n"))
    assert str(error.value) == f"line 2, column 5: {message}"


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "a: [", "- \ud83d\t: }"])
def test_malformed_yaml_is_a_value_error(tmp_path: Path, text: str):
    path = tmp_path / "file.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ValueError):
        read_small_yaml(path)


def test_a_file_above_the_limit_is_not_read(tmp_path: Path):
    with pytest.raises(ValueError, match="exceeds the limit of 1 MiB"):
        read_small_text(write_file(tmp_path, "x" * (MAX_SETTINGS_BYTES + 1)))


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested(MAX_DEPTH + 2), "nested more than 100 levels deep"),
        ('{"a": ' * 200 + "1" + "}" * 200, "nested more than 100 levels deep"),
        (nested(100_000), "nested too deeply"),
        ('{"b": {"a": 1, "c": 2, "a": 1}}', "key 'a': must occur only once"),
        ("9" * 5000, "Exceeds the limit .4300 digits."),
        ("{", "Expecting property name"),
    ],
)
def test_malformed_json_is_refused_in_one_line(text: str, message: str):
    with pytest.raises(ValueError, match=message) as error:
        parse_json(text)
    assert "\n" not in str(error.value)


def test_json_is_read_up_to_the_nesting_limit():
    assert parse_json(nested(MAX_DEPTH)) is not None
    assert parse_json(b'{"a": [1, {"a": 2}]}') == {"a": [1, {"a": 2}]}


def make_fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


@pytest.mark.parametrize("make", [make_fifo, lambda path: Path("/dev/zero"), make_socket])
def test_fifos_sockets_and_devices_are_refused_without_blocking(
    tmp_path: Path, make: Callable[[Path], Path]
):
    path = make(tmp_path / "odd")
    with pytest.raises(OSError):
        open_regular_file(path)
    with pytest.raises(ConfigError, match=f"^{path}: ") as error, wrap_file_errors(path):
        open_regular_file(path)
    assert "\n" not in str(error.value)


def test_a_directory_is_refused(tmp_path: Path):
    with pytest.raises(NotRegularError, match="is a directory"):
        open_regular_file(tmp_path)


def test_an_overlong_line_is_refused(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo")
    with open_regular_file(path) as file:
        assert list(read_lines(file)) == [b"one\n", b"two"]
    with path.open("wb") as file:
        file.write(b"one\n")
        file.truncate(10 << 30)  # a sparse file takes no disk space
    with (
        open_regular_file(path) as file,
        pytest.raises(ValueError, match="line 2: longer than 1 MiB"),
    ):
        list(read_lines(file, most_bytes=1 << 20))
