"""Files that a user names and that are read whole: no larger than such a file can sensibly be."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

MIB = 1 << 20
MOST_BYTES = MIB
"""Of a file of settings: a cluster of 16,384 nodes, each by itself, fits."""
FASTEST: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""The first is several times as fast."""


class Loader(FASTEST):  # type: ignore[misc]
    """Reads YAML as OmegaConf does: 1e-6 is a number, a date is text, a key is there only once."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in FASTEST.yaml_implicit_resolvers.items()
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
        _check_keys(node)
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


def _check_keys(node: yaml.Node) -> None:
    """Each is there once, also in what is merged in."""
    known: set[tuple[str, str]] = set()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in known:
                problem = f"{key.value}: must be there once"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            known.add((key.tag, key.value))
            if key.tag == "tag:yaml.org,2002:merge":
                _check_keys(value)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_small(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file.

    Raises OSError, or ValueError for what is no regular file (which may never end), larger, or no
    text.
    """
    # What is not there is told by open.
    if path.exists() and not path.is_file():
        raise ValueError("is a directory" if path.is_dir() else "not a regular file")
    with path.open("rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"more than {most_bytes // MIB} MiB: must be at most that")
    return found.decode()


def read_small_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """The same as JSON."""
    return parse_json(read_small(path, most_bytes=most_bytes))


def parse_json(text: str) -> Any:
    """Raises ValueError, also for what is nested too deeply to be read."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise ValueError("a number of too many digits") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_small_yaml(path: Path) -> Any:
    """The same as YAML, in which nothing is an alias: a few of them may stand for endless text."""
    text = read_small(path)
    try:
        for event in yaml.parse(text, Loader=Loader):
            if isinstance(event, yaml.AliasEvent):
                place = _place(event.start_mark)
                raise ValueError(f"{place}: *{event.anchor}: must be written out, no alias")
        return yaml.load(text, Loader=Loader)
    except yaml.constructor.ConstructorError as error:
        raise ValueError(_told(error)) from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {_told(error)}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _told(error: yaml.YAMLError) -> str:
    """What is wrong with YAML and where, and where that began if it is not there."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    told = f"{_place(error.problem_mark)}: {error.problem}"
    if error.context and error.context_mark is not None:
        told += f", {error.context} ({_place(error.context_mark)})"
    return told


def _place(mark: Any) -> str:
    """Of a mark, which the two loaders have a class each for."""
    return f"line {mark.line + 1}, column {mark.column + 1}"
