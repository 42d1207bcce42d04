"""`streamrl rewards`: every kind of reward with its options, as text, as markdown or as JSON."""

import argparse
import dataclasses
import inspect
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import MISSING

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import suggest_nearest
from streamrl.rewards import REWARD_KINDS, RewardConfig
from streamrl.rewards.kinds.function import FunctionOptions
from streamrl.rewards.user_code.plugins import list_installed_kinds, load_registered_kinds

REQUIRED = "required"


@dataclass(frozen=True)
class RewardOption:
    """A key of an entry: its default in YAML, or REQUIRED, and what it means."""

    default: str
    meaning: str


@dataclass(frozen=True)
class RewardKindEntry:
    """A kind as it is listed: in one line, where it is from, and its options by name."""

    summary: str
    source: str
    options: Mapping[str, RewardOption]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl rewards`."""
    parser.add_argument("kind", nargs="?", help="only this one")
    parser.add_argument("--path", default="", help="a Python file that registers kinds of your own")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--markdown", action="store_true", help="print markdown tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the kinds. Raises ConfigError if there is none of that name."""
    kinds = list_builtin_kinds()
    for name, entry in list_plugin_kinds(arguments.path).items():
        if name in kinds:
            said = f"{name}: {entry.source}: hidden by streamrl's own kind of that name"
            print(f"streamrl: {said}", file=sys.stderr)
        kinds.setdefault(name, entry)
    if arguments.kind is not None:
        if arguments.kind not in kinds:
            hint = suggest_nearest(arguments.kind, kinds).replace("key", "kind")
            raise ConfigError(f"{arguments.kind}: no such kind of reward; {hint}")
        kinds = {arguments.kind: kinds[arguments.kind]}
    if arguments.json:
        print(json.dumps({name: dataclasses.asdict(entry) for name, entry in kinds.items()}))
    elif arguments.markdown:
        print(format_markdown(kinds), end="")
    else:
        print("\n\n".join(describe_kind(name, entry) for name, entry in kinds.items()))
    return 0


def list_builtin_kinds() -> dict[str, RewardKindEntry]:
    """The kinds that come with streamrl."""
    return {
        name: RewardKindEntry(kind.summary, "streamrl", read_options(kind.options_type))
        for name, kind in REWARD_KINDS.items()
    }


def list_plugin_kinds(path: str) -> dict[str, RewardKindEntry]:
    """The kinds that installed packages bring, and those that a Python file registers.

    Raises ConfigError if the file cannot be imported.
    """
    options = read_options(FunctionOptions)
    del options["function"]
    brought = {
        kind: ("of an installed package", value) for kind, value in list_installed_kinds().items()
    }
    for kind, function in (load_registered_kinds(path, setting="--path") if path else {}).items():
        brought[kind] = (inspect.getdoc(function) or "of a file").splitlines()[0], path
    return {
        kind: RewardKindEntry(summary, source, options)
        for kind, (summary, source) in brought.items()
    }


def read_options(settings: type) -> dict[str, RewardOption]:
    """The fields of a dataclass whose docstring, or that of a class above it, explains them.

    Its own come first.
    """
    meanings: dict[str, str] = {}
    for above in settings.__mro__:
        for key, meaning in _parse_docstring_keys(above).items():
            meanings.setdefault(key, meaning)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    return {
        name: RewardOption(_format_default(fields[name]), meaning)
        for name, meaning in meanings.items()
        if name in fields
    }


def _parse_docstring_keys(settings: type) -> dict[str, str]:
    """The `key: meaning` lines of a docstring, with the indented ones that go on."""
    text = inspect.cleandoc(vars(settings).get("__doc__") or "")
    found = re.findall(r"^(\w+): (.+(?:\n[ ]+\S.*)*)", text, flags=re.MULTILINE)
    return {key: " ".join(meaning.split()).removesuffix(".") for key, meaning in found}


def _format_default(field: "dataclasses.Field[Any]") -> str:
    """The default as it would be written in a config."""
    made = field.default_factory
    value = field.default if made is dataclasses.MISSING else made()
    if value in (MISSING, dataclasses.MISSING):
        return REQUIRED
    # YAML ends a value that stands alone with a line of three dots.
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).split("\n")[0]


def describe_kind(name: str, entry: RewardKindEntry) -> str:
    """A kind as a paragraph."""
    source = "" if entry.source == "streamrl" else f" ({entry.source})"
    width = max((len(key) for key in entry.options), default=0)
    lines = [
        f"  {key:<{width}}  {option.meaning} [{option.default}]"
        for key, option in entry.options.items()
    ]
    return "\n".join([f"{name}: {entry.summary}{source}", *lines])


def format_markdown(kinds: Mapping[str, RewardKindEntry]) -> str:
    """A table of the kinds, and one of all options; those of every entry lead it."""
    lines = ["| kind | what it is | options |", "| --- | --- | --- |"]
    users: dict[tuple[str, RewardOption], list[str]] = {
        (key, option): ["all"]
        for key, option in read_options(RewardConfig).items()
        if key not in ("kind", "options")
    }
    for name, entry in kinds.items():
        keys = ", ".join(f"`{key}`" for key in entry.options)
        lines.append(f"| `{name}` | {_escape_cell(entry.summary)} | {keys} |")
        for key, option in entry.options.items():
            users.setdefault((key, option), []).append(f"`{name}`")
    lines += ["", "| option | of | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{key}` | {', '.join(names)} | {_format_code(option.default)} |"
        f" {_escape_cell(option.meaning)} |"
        for (key, option), names in users.items()
    ]
    return "\n".join(lines) + "\n"


def _format_code(text: str) -> str:
    """As code, between more backticks than it has in a row."""
    most = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (most + 1), " " if most else ""
    return fence + space + text.replace("|", "\\|") + space + fence


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")
