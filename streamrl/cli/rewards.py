"""`streamrl rewards`: print all reward kinds with their options as text, markdown or JSON."""

import argparse
import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.cli.output.setting_docs import escape_cell, format_code, format_default, read_meanings
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import suggest_nearest
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.kinds.function import FunctionOptions
from streamrl.rewards.registry import REWARD_KINDS
from streamrl.user_code.reward_function import list_installed_kinds, load_registered_kinds


@dataclass(frozen=True)
class RewardOption:
    """Key of a reward entry in the config: its default as YAML (or REQUIRED), and its meaning."""

    default: str
    meaning: str


@dataclass(frozen=True)
class RewardKindEntry:
    """Kind of reward in the printed list: one-line summary, source, and options by name.

    The source is streamrl, an installed package, or a Python file.
    """

    summary: str
    source: str
    options: Mapping[str, RewardOption]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help="print only this kind")
    parser.add_argument(
        "--path", default="", metavar="FILE", help="Python file that registers kinds of your own"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--markdown", action="store_true", help="print markdown tables")


def run(arguments: argparse.Namespace) -> int:
    """Print all reward kinds, or the named kind. Raises ConfigError for an unknown kind."""
    kinds = list_builtin_kinds()
    for name, entry in list_plugin_kinds(arguments.path).items():
        if name in kinds:
            note = f"{name}: {entry.source}: hidden by streamrl's built-in kind of the same name"
            print(f"streamrl: {note}", file=sys.stderr)
        kinds.setdefault(name, entry)
    if arguments.kind is not None:
        if arguments.kind not in kinds:
            hint = suggest_nearest(arguments.kind, kinds, "kind")
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
    return {
        name: RewardKindEntry(kind.summary, "streamrl", read_options(kind.options_type))
        for name, kind in REWARD_KINDS.items()
    }


def list_plugin_kinds(path: str) -> dict[str, RewardKindEntry]:
    """Return reward kinds of installed packages, and kinds that a user's Python file registers.

    path: the Python file, may be empty. Raises ConfigError if the file cannot be imported.
    """
    options = read_options(FunctionOptions)
    del options["function"]
    sources = {
        kind: ("from an installed package", value) for kind, value in list_installed_kinds().items()
    }
    for kind, function in (load_registered_kinds(path, setting="--path") if path else {}).items():
        sources[kind] = (inspect.getdoc(function) or "from a file").splitlines()[0], path
    return {
        kind: RewardKindEntry(summary, source, options)
        for kind, (summary, source) in sources.items()
    }


def read_options(settings: type) -> dict[str, RewardOption]:
    """Return the options in a dataclass of reward settings, with their defaults and meanings.

    Options of the class itself precede inherited options.
    """
    fields = {field.name: field for field in dataclasses.fields(settings)}
    return {
        name: RewardOption(format_default(fields[name]), meaning)
        for name, meaning in read_meanings(settings).items()
        if name in fields
    }


def describe_kind(name: str, entry: RewardKindEntry) -> str:
    source = "" if entry.source == "streamrl" else f" ({entry.source})"
    width = max((len(key) for key in entry.options), default=0)
    lines = [
        f"  {key:<{width}}  {option.meaning} [{option.default}]"
        for key, option in entry.options.items()
    ]
    return "\n".join([f"{name}: {entry.summary}{source}", *lines])


def format_markdown(kinds: Mapping[str, RewardKindEntry]) -> str:
    """Format reward kinds as markdown: a table of kinds and a table of options.

    Options common to all kinds come first.
    """
    lines = ["| kind | what it is | options |", "| --- | --- | --- |"]
    users: dict[tuple[str, RewardOption], list[str]] = {
        (key, option): ["all"]
        for key, option in read_options(RewardConfig).items()
        if key not in ("kind", "options")
    }
    for name, entry in kinds.items():
        keys = ", ".join(f"`{key}`" for key in entry.options)
        lines.append(f"| `{name}` | {escape_cell(entry.summary)} | {keys} |")
        for key, option in entry.options.items():
            users.setdefault((key, option), []).append(f"`{name}`")
    lines += ["", "| option | of | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{key}` | {', '.join(names)} | {format_code(option.default)} |"
        f" {escape_cell(option.meaning)} |"
        for (key, option), names in users.items()
    ]
    return "\n".join(lines) + "\n"
