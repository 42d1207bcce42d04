"""`streamrl config`: keys of a config, reward kinds, algorithms, and the model calls of a config.

Meanings and defaults come from the dataclasses of the settings. Each listing is a table, printed as
paragraphs or, for the pages of the docs, as markdown.
"""

import argparse
import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from omegaconf import MISSING

from streamrl.algorithms import ALGORITHMS, Algorithm
from streamrl.algorithms.config import load_specs
from streamrl.algorithms.table import DEFAULT_SETTINGS
from streamrl.config.run_config import RunConfig, load_config
from streamrl.dataflow import CallKind
from streamrl.engines.trainer_config import CriticConfig, RankLayout, TrainerConfig
from streamrl.environments.config import EnvironmentSpec
from streamrl.errors import ConfigError
from streamrl.files.printable_text import format_quantity
from streamrl.files.typed_settings import format_value, format_yaml, suggest_nearest
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import REMOVED_KINDS, REWARD_KINDS, RewardKind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "streamrl config [KEY] | --rewards [KIND] | --algorithms [NAME]"
        " | --graph CONFIG [key=value ...]"
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=[],
        metavar="NAME",
        help="key or section, e.g. trainer.lr or trainer; name of what an option below lists",
    )
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--rewards", action="store_true", help="list reward kinds and their options"
    )
    subject.add_argument(
        "--algorithms",
        action="store_true",
        help="list algorithms: required columns, functions, defaults, paper",
    )
    subject.add_argument(
        "--graph",
        action="store_true",
        help="show a config's model calls and the data between them; model and data need not exist",
    )
    parser.add_argument(
        "--path", default="", metavar="FILE", help="Python file with algorithms of yours"
    )
    parser.add_argument("--markdown", action="store_true", help="print markdown tables")


def run(arguments: argparse.Namespace) -> int:
    """Print what the options ask for. Raises ConfigError for an unknown name."""
    words = arguments.names
    for option, default, applies in (
        ("path", "", arguments.algorithms),
        ("markdown", False, not arguments.graph),
    ):
        if vars(arguments)[option] != default and not applies:
            raise ConfigError(f"config --{option}: has no effect here; see streamrl config --help")
    if arguments.graph:
        if not words or not words[0]:
            raise ConfigError("config --graph: name a config file or a run directory")
        print(show_graph(load_config(Path(words[0]), words[1:])), end="")
        return 0
    if len(words) > 1:
        raise ConfigError(f"config: one name at a time, not {' '.join(words)}")
    name = words[0] if words else None
    if arguments.rewards:
        tables = list_kinds(_select(REWARD_KINDS, name, "kind of reward", REMOVED_KINDS))
    elif arguments.algorithms:
        known = {**ALGORITHMS, **(load_specs(arguments.path) if arguments.path else {})}
        specs = _select(known, name if name in known else name and name.lower(), "algorithm")
        tables = [list_algorithms(specs.values())]
    else:
        tables = list_keys(_select_keys(name))
    render = format_markdown if arguments.markdown else format_text
    print("\n".join(map(render, tables)), end="")
    return 0


EntryT = typing.TypeVar("EntryT")


def _select(
    entries: Mapping[str, EntryT],
    name: str | None,
    noun: str,
    removed: Mapping[str, str] = MappingProxyType({}),
) -> Mapping[str, EntryT]:
    """Return the named entry, or all. Raises ConfigError for an unknown name.

    removed: names of earlier versions, with hints.
    """
    if name is None:
        return entries
    if name not in entries:
        hint = removed.get(name) or suggest_nearest(name, entries, noun.split()[0])
        raise ConfigError(f"{name}: no such {noun}; {hint}")
    return {name: entries[name]}


def show_graph(config: RunConfig) -> str:
    """Return the model calls of a config in flow order, then the columns between them.

    A version edge leads from training back to the stage that follows the trained model.
    """
    flow = config.dataflow
    lookahead = min(config.pipeline.max_steps_ahead, config.pipeline.max_staleness)
    size = f"{format_quantity(len(flow.calls), 'stage')}, versions at most {lookahead} behind"
    lines = [f"{config.algorithm.name}: {size}", ""]
    width = max(len(stage) for stage in (*flow.graph, "  produces")) + 2
    for call in flow.ordered_calls:
        is_hosted = call.kind is CallKind.SCORE and call.role in flow.trained_roles
        host = " (the ranks that train it)" * is_hosted
        lines.append(f"{call.stage:<{width}}{call.kind.value}, role {call.role}{host}")
        needs, produces = ", ".join(call.needs) or "prompts only", ", ".join(call.produces)
        facts = {"needs": needs, "produces": produces, "follows": call.followed_role}
        lines += [f"  {name:<{width - 2}}{fact}" for name, fact in facts.items() if fact]
    graph = flow.graph
    edges = {
        f"{source} -> {target}": ", ".join(dict.fromkeys(graph.edges[source, target]["columns"]))
        for source, target in graph.edges
    }
    later = f"{format_quantity(lookahead + 1, 'step')} later"
    for trainer, call in flow.version_edges:
        edges[f"{trainer.stage} -> {call.stage}"] = f"version of {call.followed_role}, {later}"
    widest = max(map(len, edges), default=0)
    lines += ["", "edges", *(f"  {ends:<{widest}}  {text}" for ends, text in edges.items())]
    return "\n".join([*lines, *(f"note: {note}" for note in _list_notes(config))]) + "\n"


def _list_notes(config: RunConfig) -> list[str]:
    """List facts that the dataflow graph does not show, and likely config mistakes."""
    notes = [
        f"{stage} produces {column}, which no stage requires"
        for stage, column in config.dataflow.unused_columns
    ]
    if (every := config.weights.publish_every) > 1:
        notes.append(f"weights.publish_every={every}: publishes only one in {every} versions")
    if (every := config.reference.every) > 1:
        notes.append(
            f"reference.every={every}: the reference moves only at one in {every} versions"
        )
    return notes


# Tables


@dataclass(frozen=True)
class Table:
    """Cells of a listing, a row per key, kind or algorithm; the first cell of a row names it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


def format_text(table: Table) -> str:
    """Return a paragraph per row: its name, then a line for each other cell that is not empty."""
    width = max(map(len, table.header))
    text = ""
    for row in table.rows:
        text += f"\n{row[0]}\n"
        for name, cell in zip(table.header[1:], row[1:], strict=True):
            text += f"  {name:<{width}}  {cell}\n" if cell else ""
    return text.removeprefix("\n")


CODE_COLUMNS = ("key", "kind", "option", "name", "default")
"""Columns whose cells markdown shows as code."""


def format_markdown(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header)]
    for row in table.rows:
        named = zip(table.header, row, strict=True)
        lines.append([_quote_code(c) if name in CODE_COLUMNS else _escape(c) for name, c in named])
    title = f"## {table.title}\n\n" if table.title else ""
    return title + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _quote_code(text: str) -> str:
    """Quote text as markdown code in a table cell.

    The fence is one backtick longer than the longest run of backticks in the text.
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return fence + space + text.replace("|", "\\|") + space + fence


def _escape(text: str) -> str:
    """Escape characters that would end a cell of a markdown table or begin an HTML tag."""
    return text.replace("|", "\\|").replace("<", "\\<")


# Config keys


class ConfigKey(NamedTuple):
    """Key of the run's config as users write it, such as `trainer.lr`, with type and meaning.

    Keys of list entries contain brackets, such as `rewards[].kind`.
    """

    name: str
    type: str
    default: str
    meaning: str

    @property
    def section(self) -> str:
        return re.split(r"[.\[]", self.name)[0]


SAME_KEYS: Mapping[str, tuple[type, str]] = {
    "costs": (RewardConfig, "costs[]."),
    "environment.named": (EnvironmentSpec, "environment.named.NAME."),
    "critic.trainer": (TrainerConfig, "critic.trainer."),
    "critic.shadow": (RankLayout, "critic.shadow."),
}
"""Keys whose entries have the keys of another section, and are listed only by name."""


def list_config_keys(settings: type = RunConfig, prefix: str = "") -> Iterator[ConfigKey]:
    """Yield the keys of a settings dataclass and of those nested in it, as `streamrl config` lists.

    prefix: start of each key, such as "trainer.".
    """
    hints = typing.get_type_hints(settings)
    meanings = read_meanings(settings)
    for field in dataclasses.fields(settings):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        entry = next((a for a in typing.get_args(hint) if dataclasses.is_dataclass(a)), None)
        if dataclasses.is_dataclass(hint) and name not in SAME_KEYS:
            yield from list_config_keys(typing.cast(type, hint), f"{name}.")
        elif entry is not None and name not in SAME_KEYS:
            yield from list_config_keys(typing.cast(type, entry), f"{name}[].")
        else:
            meaning = meanings.get(field.name, "")
            yield ConfigKey(name, _format_type(hint), format_default(field), meaning)


def _select_keys(name: str | None) -> list[ConfigKey]:
    """Return the keys of a section, the key itself, or all."""
    keys = list(list_config_keys())
    if name is None:
        return keys
    listed = re.sub(r"\[\d*\]", "[]", re.sub(r"^(environment\.named)\.[^.]+", r"\1.NAME", name))
    for settings, start in SAME_KEYS.values():
        keys += list_config_keys(settings, start)
    # A separate critic has some defaults of its own.
    own = {f"critic.trainer.{key}": format_yaml(v) for key, v in CriticConfig().trainer.items()}
    keys = [key._replace(default=own.get(key.name, key.default)) for key in keys]
    prefix = re.compile(rf"{re.escape(listed)}(?:$|[.\[])")
    if matches := [key for key in keys if prefix.match(key.name)]:
        return matches
    names = {key.name for key in keys} | {key.section for key in keys}
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"the nearest key is {close[0]}" if close else "`streamrl config` lists all"
    raise ConfigError(f"{name}: no such config key; {hint}")


def _format_type(hint: Any) -> str:
    """Format a type hint in the words of YAML: `float or null`, `list of int`, `text`."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_format_type(arg) for arg in args)
    if hint is type(None):
        return "null"
    if hint is Any:
        return "any"
    if typing.get_origin(hint) is list:
        return f"list of {_format_type(args[0])}"
    if typing.get_origin(hint) is dict or hint is dict or dataclasses.is_dataclass(hint):
        return "mapping"
    return {"str": "text", "bool": "true or false"}.get(hint.__name__, hint.__name__)


def list_keys(keys: Sequence[ConfigKey]) -> list[Table]:
    """Return a table per config section of these keys."""
    sections = dict.fromkeys(key.section for key in keys)
    return [
        Table(
            ("key", "type", "default", "meaning"),
            [key for key in keys if key.section == section],
            title=section,
        )
        for section in sections
    ]


# Reward kinds


def list_kinds(kinds: Mapping[str, RewardKind]) -> list[Table]:
    """Return a table of reward kinds and a table of their options; options of all come first."""
    users = {
        option: ["all"]
        for option in list_config_keys(RewardConfig)
        if option.name not in ("kind", "options")
    }
    rows = []
    for name, kind in kinds.items():
        options = list(list_config_keys(kind.options_type))
        rows.append((name, kind.summary, ", ".join(option.name for option in options)))
        for option in options:
            users.setdefault(option, []).append(name)
    return [
        Table(("kind", "what it is", "options"), rows),
        Table(
            ("option", "type", "default", "meaning", "of"),
            [(*option, ", ".join(names)) for option, names in users.items()],
        ),
    ]


# Algorithms


def list_algorithms(specs: Iterable[Algorithm]) -> Table:
    """Return the table of algorithm specs, and the defaults of settings that a row leaves out."""
    rows = []
    for spec in specs:
        changed = {k: v for k, v in spec.defaults.items() if v != DEFAULT_SETTINGS.get(k)}
        own = _format_settings({**changed, **spec.params})
        functions = (spec.advantages, spec.token_loss, *spec.derived.values(), *spec.dials.values())
        names = ", ".join(dict.fromkeys(function.__name__ for function in functions))
        columns, scope = ", ".join(spec.columns), _choose_scope(spec)
        rows.append((spec.name, columns, names, scope, own, spec.paper))
    common = _format_settings(DEFAULT_SETTINGS)
    rows.append(("(any row)", "", "", "", common, "unless its own defaults differ"))
    return Table(("name", "columns", "advantages, loss", "scope", "defaults", "paper"), rows)


def _choose_scope(spec: Algorithm) -> str:
    """Return the scope of an algorithm with its own defaults."""
    defaults = {**DEFAULT_SETTINGS, **spec.defaults}
    needs_step = defaults["whiten_advantages"] or defaults["advantage_scale"] == "batch"
    return "step" if needs_step else spec.scope


def _format_settings(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={format_value(value)}" for key, value in values.items())


# Meanings and defaults

REQUIRED = "required"


def read_meanings(settings: type) -> dict[str, str]:
    """Return the meaning of each field of a settings dataclass, by field name.

    Meanings stand in `name: ...` lines of docstrings and in `#:` comments. The text of a class wins
    over the text of its base classes.
    """
    meanings: dict[str, str] = {}
    for owner in settings.__mro__:
        if dataclasses.is_dataclass(owner):
            for name, meaning in (_parse_docstring_keys(owner) | _parse_comments(owner)).items():
                meanings.setdefault(name, meaning)
    return meanings


def _parse_docstring_keys(settings: type) -> dict[str, str]:
    """Return meanings by key from the `key: meaning` lines; indented lines continue one."""
    text = inspect.cleandoc(vars(settings).get("__doc__") or "")
    matches = re.findall(r"^(\w+): (.+(?:\n[ ]+\S.*)*)", text, flags=re.MULTILINE)
    return {key: " ".join(meaning.split()).removesuffix(".") for key, meaning in matches}


def _parse_comments(settings: type) -> dict[str, str]:
    """Return the `#:` comment above each field of a settings dataclass, by field name."""
    source = inspect.cleandoc(inspect.getsource(settings))
    comments = re.findall(r"((?:^ *#: .*\n)+) *(\w+):", source, flags=re.MULTILINE)
    return {
        name: " ".join(text.replace("#: ", "").split()).removesuffix(".") for text, name in comments
    }


def format_default(field: "dataclasses.Field[Any]") -> str:
    """Return the default of a dataclass field as YAML, or REQUIRED if the field has none."""
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    if value in (MISSING, dataclasses.MISSING):
        return REQUIRED
    return format_yaml(vars(value) if dataclasses.is_dataclass(value) else value)
