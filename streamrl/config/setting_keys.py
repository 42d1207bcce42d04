"""Keys of settings as users write them: unknown ones are refused with the nearest valid key."""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from streamrl.data.config import DataConfig
from streamrl.data.files import FILE_KEYS
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import check_type, suggest_nearest

#: Settings of other systems that streamrl refuses on purpose, with the reason.
UNSUPPORTED_SETTINGS = dict.fromkeys(
    ("generator.top_p", "generator.top_k", "generator.min_p"),
    "not supported in training: tokens would come from another distribution than the one whose"
    " log-probabilities are trained; evaluation.top_p and evaluation.top_k exist",
)


def check_setting_keys(raw: Any, root: type, *, source: str) -> None:
    """Raise ConfigError for an unknown or unsupported key, or a value of the wrong structure.

    raw: settings as read. root: their dataclass. source: file or override that has them.
    """
    for key, value, section in _iter_settings(raw, root, ""):
        _check_key(key, value, section, root, source)


def _iter_settings(raw: Any, kind: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (full key, value, dataclass that should have the key) for every setting the user wrote.

    raw: settings as read. kind: type of those settings. prefix: start of the keys.
    """
    if get_origin(kind) is list and isinstance(raw, list):
        for i, item in enumerate(raw):
            yield from _iter_settings(item, get_args(kind)[0], f"{prefix.removesuffix('.')}[{i}].")
    elif get_origin(kind) is dict and isinstance(raw, dict):
        for name, value in raw.items():
            yield from _iter_settings(value, get_args(kind)[1], f"{prefix}{name}.")
    elif is_dataclass(kind) and isinstance(raw, dict):
        hints = get_type_hints(kind)
        for name, value in raw.items():
            yield f"{prefix}{name}", value, kind
            yield from _iter_settings(value, hints.get(str(name)), f"{prefix}{name}.")


def _check_key(key: str, value: Any, section: Any, root: type, source: str) -> None:
    """Check one key; section: dataclass that should have it."""
    hints = get_type_hints(section)
    parent, _, name = key.rpartition(".")
    if section is DataConfig and name in FILE_KEYS and name not in hints:
        hint = f"set it per file, as in data.train={{path: ..., {name}: ...}}"
        raise ConfigError(f"{source}: unknown key {key}={value!r}; {hint}")
    if key in UNSUPPORTED_SETTINGS:
        raise ConfigError(f"{source}: {key}={value!r}: {UNSUPPORTED_SETTINGS[key]}")
    if name not in hints:
        hint = _suggest_key(parent, name, hints, root)
        raise ConfigError(f"{source}: unknown key {key}={value!r}; {hint}")
    kinds = (hints[name], *get_args(hints[name]))
    if isinstance(value, bool) and str in kinds and bool not in kinds:
        words = "on, yes and true" if value else "off, no and false"
        raise ConfigError(
            f"{source}: {key}={value}: must be text; YAML reads unquoted {words} as a boolean"
        )
    try:
        check_type(key, value, hints[name])
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _suggest_key(parent: str, name: str, siblings: Iterable[str], root: type) -> str:
    """Return a hint for an unknown key: a similar key of its section, or one of another section.

    parent: dotted key of the section, "" at the top. name: unknown key within the section.
    """
    if close := difflib.get_close_matches(name, siblings, n=1):
        return f"the nearest key is {f'{parent}.{close[0]}'.removeprefix('.')}"
    elsewhere = [key for key in _iter_keys(root) if key.rpartition(".")[2] == name]
    if close := difflib.get_close_matches(f"{parent}.{name}", elsewhere, n=1, cutoff=0.0):
        return f"the nearest key is {close[0]}"
    return suggest_nearest(name, siblings)


def _iter_keys(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a settings dataclass and of dataclasses nested in it."""
    for name, hint in get_type_hints(kind).items():
        item = get_args(hint)[0] if get_origin(hint) is list else hint
        yield f"{prefix}{name}"
        if is_dataclass(item):
            yield from _iter_keys(item, f"{prefix}{name}.")
