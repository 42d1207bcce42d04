"""Files that a user names: regular ones alone, read whole if small, line by line if large.

A FIFO would be waited for, a device or a sparse file may never end, and JSON can be nested deeper
than Python's stack is. Whatever a user names is opened once, by `open_regular_file`, and read to a
bound.
"""

import contextlib
import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import describe_read_error

MIB = 1 << 20
MAX_SETTINGS_BYTES = MIB
"""Of a file of settings: a cluster of 16,384 nodes, each by itself, fits."""
MAX_LINE_BYTES = 64 * MIB
"""Of a line, or of one row of data: the tests of a hard programming problem take up some MiB."""
MAX_DEPTH = 100
"""How deep JSON may be nested: what walks through it afterwards has a stack, too."""
FAST_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""The first is several times as fast."""


class StrictYamlLoader(FAST_LOADER):  # type: ignore[misc]
    """Reads YAML as OmegaConf does: 1e-6 is a number, a date is text, a key is there only once."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in FAST_LOADER.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """What is not what its tag says, as in `!!int x`, is told as all else that is no YAML."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, LookupError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            problem = f"{node.value!r:.40}: no {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        """Raises ConstructorError for a key that is there twice, of which one would be lost."""
        _check_unique_keys(node)
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


def _check_unique_keys(node: yaml.Node) -> None:
    """Each is there once, also in what is merged in."""
    known: set[tuple[str, str]] = set()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in known:
                problem = f"{key.value}: must be there once"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            known.add((key.tag, key.value))
            if key.tag == "tag:yaml.org,2002:merge":
                _check_unique_keys(value)


StrictYamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class NotRegularError(OSError):
    """A directory, FIFO, socket or device where a regular file is wanted."""


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for anything.

    Raises NotRegularError for anything else, and OSError like `open`.
    """
    try:
        file = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115 - it is returned
    except IsADirectoryError:
        raise NotRegularError(errno.EISDIR, "is a directory", str(path)) from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise NotRegularError(errno.EINVAL, "not a regular file", str(path))


def _open_nonblocking(path: str, flags: int) -> int:
    """Open without waiting, as for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextlib.contextmanager
def wrap_file_errors(path: str | Path) -> Iterator[None]:
    """What is wrong with a file that a user names as ConfigError, which names it."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {describe_read_error(error)}") from None


def read_lines(file: BinaryIO, *, most_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file with their ends. Raises ValueError for one that is too long."""
    number = 0
    while line := file.readline(most_bytes + 1):
        number += 1
        if len(line) > most_bytes:
            raise ValueError(f"line {number}: more than {most_bytes // MIB} MiB without an end")
        yield line


def read_small_text(path: Path, *, most_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """The text of a file.

    Raises OSError, or ValueError for what is no regular file (which may never end), larger, or no
    text.
    """
    try:
        with open_regular_file(path) as file:
            found = file.read(most_bytes + 1)
    except NotRegularError as error:
        raise ValueError(error.strerror) from None
    if len(found) > most_bytes:
        raise ValueError(f"more than {most_bytes // MIB} MiB: must be at most that")
    return found.decode()


def read_small_json(path: Path, *, most_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    """The same as JSON."""
    return parse_json(read_small_text(path, most_bytes=most_bytes))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as strangers write it.

    Raises ValueError, also for nesting beyond MOST_DEPTH, a key that an object has twice, and a
    number of too many digits.
    """
    try:
        found = json.loads(text, object_pairs_hook=_make_unique_dict)
    except (json.JSONDecodeError, UnicodeDecodeError, RepeatedKeyError):
        raise
    except ValueError:
        raise ValueError("a number of too many digits") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(found)
    return found


class RepeatedKeyError(ValueError):
    """An object has a key twice."""


def _make_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise RepeatedKeyError(f"key {twice[:40]!r}: must be there once")
    return found


def check_depth(value: Any) -> None:
    """Raise ValueError for lists and dicts nested more than MOST_DEPTH deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH + 1):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def read_small_yaml(path: Path) -> Any:
    """The same as YAML, in which nothing is an alias: a few of them may stand for endless text."""
    text = read_small_text(path)
    try:
        for event in yaml.parse(text, Loader=StrictYamlLoader):
            if isinstance(event, yaml.AliasEvent):
                place = _format_mark(event.start_mark)
                raise ValueError(f"{place}: *{event.anchor}: must be written out, no alias")
        found = yaml.load(text, Loader=StrictYamlLoader)
    except yaml.constructor.ConstructorError as error:
        raise ValueError(_format_yaml_error(error)) from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {_format_yaml_error(error)}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(found)
    return found


def _format_yaml_error(error: yaml.YAMLError) -> str:
    """What is wrong with YAML and where, and where that began if it is not there."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    told = f"{_format_mark(error.problem_mark)}: {error.problem}"
    if error.context and error.context_mark is not None:
        told += f", {error.context} ({_format_mark(error.context_mark)})"
    return told


def _format_mark(mark: Any) -> str:
    """Of a mark, which the two loaders have a class each for."""
    return f"line {mark.line + 1}, column {mark.column + 1}"
