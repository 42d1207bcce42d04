"""`streamrl config`: every config key with its type, default and meaning."""

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from streamrl.cli.output.setting_docs import (
    escape_cell,
    format_code,
    format_default,
    format_yaml,
    read_meanings,
)
from streamrl.config.run_config import RunConfig
from streamrl.engines.trainer_config import CriticConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.rewards.group_filter import FILTER_KINDS

NAMED = ".NAME."
"""Place of an entry's name in keys."""


@dataclass(frozen=True)
class ConfigKey:
    """Key of the run's config as users write it, such as `trainer.lr`, with type and meaning.

    Keys of list entries contain brackets, such as `rewards[].kind`, keys of named entries the place
    of the name, such as `environment.named.NAME.path`.
    """

    name: str
    type: str
    default: str
    meaning: str

    @property
    def section(self) -> str:
        return re.split(r"[.\[]", self.name)[0]

    def __str__(self) -> str:
        return f"{self.name}: {self.type} [{self.default}]\n  {self.meaning}".rstrip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "key", nargs="?", metavar="KEY", help="key or section, e.g. trainer.lr or trainer"
    )
    parser.add_argument("--markdown", action="store_true", help="print markdown tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the config keys, all or those of one section.

    Raises ConfigError for an unknown key or section.
    """
    keys = list(list_config_keys())
    if arguments.key is not None:
        prefix = re.compile(rf"{re.escape(arguments.key)}(?:$|[.\[])")
        matches = [key for key in keys if prefix.match(key.name)]
        if not matches:
            names = {key.name for key in keys} | {key.section for key in keys}
            close = difflib.get_close_matches(arguments.key, names, n=1)
            hint = f"the nearest key is {close[0]}" if close else "`streamrl config` lists all"
            raise ConfigError(f"{arguments.key}: no such config key; {hint}")
        keys = matches
    print(format_markdown(keys) if arguments.markdown else "\n\n".join(map(str, keys)))
    return 0


def list_config_keys(settings: type = RunConfig, prefix: str = "") -> Iterator[ConfigKey]:
    """Yield the keys of a settings dataclass and of those nested in it, as `streamrl config` lists.

    prefix: start of each key, such as "trainer.". Lists in named entries are single keys: the same
    lists outside of them have the keys of their entries.
    """
    hints = typing.get_type_hints(settings)
    meanings = read_meanings(settings)
    for field in dataclasses.fields(settings):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        entry = next((a for a in typing.get_args(hint) if dataclasses.is_dataclass(a)), None)
        if dataclasses.is_dataclass(hint):
            yield from list_config_keys(typing.cast(type, hint), f"{name}.")
        elif typing.get_origin(hint) is list and entry is not None and NAMED not in prefix:
            yield from list_config_keys(typing.cast(type, entry), f"{name}[].")
        elif typing.get_origin(hint) is dict and entry is not None:
            yield ConfigKey(name, "mapping", format_default(field), meanings.get(field.name, ""))
            yield from list_config_keys(typing.cast(type, entry), f"{name}{NAMED}")
        else:
            default = format_default(field)
            yield ConfigKey(name, _format_type(hint), default, meanings.get(field.name, ""))
        if name == "filter.options":
            yield from _list_filter_options()
        elif name == "critic.trainer":
            yield from _list_critic_trainer_keys()


def _list_filter_options() -> Iterator[ConfigKey]:
    for kind, filter_kind in FILTER_KINDS.items():
        for key in list_config_keys(filter_kind.options_type, "filter."):
            yield dataclasses.replace(key, meaning=f"only kind {kind}: {key.meaning}")


def _list_critic_trainer_keys() -> Iterator[ConfigKey]:
    """Yield the trainer's keys as keys of `critic.trainer`; those not set there are inherited."""
    own_defaults = CriticConfig().trainer
    for key in list_config_keys(TrainerConfig, "critic.trainer."):
        name = key.name.removeprefix("critic.trainer.")
        inherited = f"trainer.{name}"
        default = format_yaml(own_defaults[name]) if name in own_defaults else inherited
        yield dataclasses.replace(
            key, default=default, meaning=f"{inherited}, but for a separate critic"
        )


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


def format_markdown(keys: list[ConfigKey]) -> str:
    lines: list[str] = []
    sections = dict.fromkeys(key.section for key in keys)
    for section in sections:
        lines += [f"## {section}", "", "| key | type | default | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        for key in keys:
            if key.section == section:
                cells = (format_code(key.name), key.type, format_code(key.default), key.meaning)
                lines.append(f"| {' | '.join(cells[:3])} | {escape_cell(cells[3])} |")
        lines.append("")
    return "\n".join(lines).rstrip()
