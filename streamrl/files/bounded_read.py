"""Bounded reads of files that a user names: small files as a whole, large files line by line.

A FIFO would block, a device or sparse file may never end, and nested JSON may overflow Python's
stack. So `open_regular_file` opens each file once, and every read has a limit.
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
"""Limit of a settings file; fits a cluster of 16,384 nodes listed one by one."""
MAX_LINE_BYTES = 64 * MIB
"""Limit of a line or data row; the tests of a hard programming problem take some MiB."""
MAX_DEPTH = 100
"""Limit of JSON nesting; code that later walks the value recurses too."""
# The C loader is several times as fast.
FAST_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class StrictYamlLoader(FAST_LOADER):  # type: ignore[misc]
    """YAML loader with OmegaConf's rules: 1e-6 is a number, a date is text, keys are unique."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [resolver for resolver in resolvers if resolver[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in FAST_LOADER.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct the value of a YAML node.

        Raises ConstructorError if the text contradicts its tag (`!!int x`).
        """
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, LookupError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            problem = f"{node.value!r:.40}: not a valid {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        _check_unique_keys(node)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _check_unique_keys(node: yaml.Node) -> None:
    """Raise ConstructorError for a duplicate key in a YAML mapping, even if merged (`<<`)."""
    seen: set[tuple[str, str]] = set()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                problem = f"{key.value}: must occur only once"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
            if key.tag == "tag:yaml.org,2002:merge":
                _check_unique_keys(value)


StrictYamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class NotRegularError(OSError):
    """Error: a path names a directory, FIFO, socket or device instead of a regular file."""


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, without blocking.

    Raises NotRegularError for other kinds of files, and OSError like `open`.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        file = open(  # noqa: SIM115 - the caller closes it
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        )
    except IsADirectoryError:
        raise NotRegularError(errno.EISDIR, "is a directory", str(path)) from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise NotRegularError(errno.EINVAL, "not a regular file", str(path))


@contextlib.contextmanager
def wrap_file_errors(path: str | Path) -> Iterator[None]:
    """Convert an OSError or ValueError in the block to a ConfigError that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {describe_read_error(error)}") from None


def read_lines(file: BinaryIO, *, most_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends.

    Raises ValueError for a line longer than `most_bytes`.
    """
    number = 0
    while line := file.readline(most_bytes + 1):
        number += 1
        if len(line) > most_bytes:
            raise ValueError(f"line {number}: longer than {most_bytes // MIB} MiB")
        yield line


def read_small_text(path: Path, *, most_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Read a text file as a whole.

    Raises OSError, or ValueError unless the file is regular, at most `most_bytes`, and UTF-8.
    """
    try:
        with open_regular_file(path) as file:
            content = file.read(most_bytes + 1)
    except NotRegularError as error:
        raise ValueError(error.strerror) from None
    if len(content) > most_bytes:
        raise ValueError(f"the file exceeds the limit of {most_bytes // MIB} MiB")
    return content.decode()


def read_small_json(path: Path, *, most_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    """Read and parse a JSON file of at most `most_bytes`.

    Raises OSError, or ValueError for a file too large, not regular, or invalid as JSON.
    """
    return parse_json(read_small_text(path, most_bytes=most_bytes))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text from an untrusted file.

    Raises ValueError, also for nesting beyond MAX_DEPTH, duplicate keys, and integers with too many
    digits (CPython's limit is 4300).
    """
    try:
        value = json.loads(text, object_pairs_hook=make_unique_dict)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(value)
    return value


def make_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from the pairs of a JSON object. Raises ValueError for a duplicate key."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"key {repeated[:40]!r}: must occur only once")
    return unique


def check_depth(value: Any) -> None:
    """Raise ValueError for lists and dicts nested more than MAX_DEPTH deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH + 1):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def read_small_yaml(path: Path) -> Any:
    """Read a YAML file of at most MAX_SETTINGS_BYTES that contains no aliases.

    Nested aliases expand exponentially ("billion laughs"). Raises OSError, or ValueError with line
    and column.
    """
    text = read_small_text(path)
    try:
        for event in yaml.parse(text, Loader=StrictYamlLoader):
            if isinstance(event, yaml.AliasEvent):
                location = _format_mark(event.start_mark)
                raise ValueError(
                    f"{location}: *{event.anchor}: aliases are not allowed; write the value out"
                )
        value = yaml.load(text, Loader=StrictYamlLoader)
    except yaml.constructor.ConstructorError as error:
        raise ValueError(_format_yaml_error(error)) from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {_format_yaml_error(error)}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(value)
    return value


def _format_yaml_error(error: yaml.YAMLError) -> str:
    """Format a YAML error: position, problem, and the start of the construct that contains it."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    text = f"{_format_mark(error.problem_mark)}: {error.problem}"
    if error.context and error.context_mark is not None:
        text += f", {error.context} ({_format_mark(error.context_mark)})"
    return text


def _format_mark(mark: Any) -> str:
    # The C and the Python loader have separate mark classes with the same attributes.
    return f"line {mark.line + 1}, column {mark.column + 1}"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file as `iter_jsonl` yields them."""
    return list(iter_jsonl(path))


def iter_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSONL file as dicts; none without a file.

    A last line torn by a crash is left out. Raises ConfigError with the line's number if another
    line is not JSON or not UTF-8, and for a path that is not a regular file.
    """
    if not path.exists():
        return
    torn_line = 0
    with wrap_file_errors(path), open_regular_file(path) as file:
        for number, line in enumerate(read_lines(file), start=1):
            if torn_line:
                raise ConfigError(f"{path}:{torn_line}: not a line of JSON")
            try:
                row = parse_json(line.decode())
            except json.JSONDecodeError:
                torn_line = number
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: {describe_read_error(error)}") from None
            else:
                yield row
