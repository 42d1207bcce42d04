"""Conversion of raw values to dataclasses of settings, with one-line errors."""

import contextlib
import dataclasses
import difflib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from streamrl.errors import ConfigError

T = TypeVar("T")
TYPE_RULES: Mapping[Any, str] = {
    int: "a whole number, as in 3",
    float: "a number, as in 0.5 or 1e-4",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def read_settings(kind: type[T], values: Mapping[str, Any], *, section: str) -> T:
    """Convert a mapping of raw values to the settings dataclass `kind`.

    Fields without a default are required. Raises ConfigError that names the config section: for an
    unknown key (with the nearest valid key), a wrong type, a missing field, or an error of the
    dataclass itself.
    """
    # Worker processes of users' code import this module for its errors only.
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if not isinstance(values, Mapping):
        raise ConfigError(f"{section}: must be a mapping")
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in names:
            raise ConfigError(
                f"{section}.{name}={value!r}: unknown; {suggest_nearest(str(name), names)}"
            )
    filled, hints = fill_empty_text(dict(values), kind), get_type_hints(kind)
    for name, value in filled.items():
        check_type(f"{section}.{name}", value, hints[name])
    try:
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), filled))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{section}.{error.full_key}: missing") from None
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{section}.{error.full_key}: {reason}") from None
    except ConfigError as error:
        raise ConfigError(f"{section}.{error}") from None
    assert isinstance(settings, kind)
    return settings


def check_type(key: str, value: Any, hint: Any) -> None:
    """Raise ConfigError if a value as read cannot become a setting of type `hint`.

    Checks entries of lists and mappings too, but not inside sections. An interpolation passes.
    """
    if dataclasses.is_dataclass(hint) and not isinstance(value, dict):
        raise ConfigError(f"{key}={value!r:.200}: must be a mapping of settings")
    if get_origin(hint) is list:
        if not isinstance(value, list):
            example = format_as_list(key, value)
            raise ConfigError(f"{key}={value!r:.200}: must be a list, as in {example}")
        for i, entry in enumerate(value):
            check_type(f"{key}[{i}]", entry, get_args(hint)[0])
    elif get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{key}={value!r:.200}: must be a mapping of names to settings")
        for name, entry in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{key}.{name}: the name must be text; quote it")
            check_type(f"{key}.{name}", entry, get_args(hint)[1])
    else:
        _check_scalar(key, value, get_args(hint) or (hint,))


def _check_scalar(key: str, value: Any, kinds: Sequence[Any]) -> None:
    """Raise ConfigError unless OmegaConf converts a value to one of these types; skip others."""
    from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode
    from omegaconf.errors import OmegaConfBaseException

    nodes: dict[Any, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}
    if not TYPE_RULES.keys() >= set(kinds) or (value is None and NoneType in kinds):
        return
    # A setting of several types takes a value as it is.
    is_exact = len({*kinds} - {NoneType}) > 1
    for kind in nodes.keys() & set(kinds):
        with contextlib.suppress(OmegaConfBaseException, OverflowError):
            nodes[kind](value, is_optional=False)
            if not is_exact or type(value) in kinds:
                return
    rule = " or ".join(TYPE_RULES[kind] for kind in kinds)
    raise ConfigError(f"{key}={value!r:.200}: must be {rule}")


def fill_empty_text(raw: Any, kind: Any) -> Any:
    """Replace null by "" for settings of type str, as YAML reads `key=` and `key:` as null.

    raw: settings as read. kind: type of those settings. Settings that may be null keep null.
    """
    if get_origin(kind) is list and isinstance(raw, list):
        return [fill_empty_text(entry, get_args(kind)[0]) for entry in raw]
    if get_origin(kind) is dict and isinstance(raw, dict):
        return {name: fill_empty_text(entry, get_args(kind)[1]) for name, entry in raw.items()}
    if kind is str and raw is None:
        return ""
    if not (dataclasses.is_dataclass(kind) and isinstance(raw, dict)):
        return raw
    hints = get_type_hints(kind)
    return {name: fill_empty_text(value, hints.get(str(name))) for name, value in raw.items()}


def check_minimums(settings: Any, minimums: Mapping[str, int], *, section: str = "") -> None:
    """Raise ConfigError for a setting below its minimum; null passes. section: as "scorer."."""
    for key, minimum in minimums.items():
        value = vars(settings)[key]
        if value is not None and not value >= minimum:
            raise ConfigError(f"{section}{key}={value}: must be {minimum} or more")


def check_choices(
    settings: Any, choices: Mapping[str, Sequence[str]], *, section: str = ""
) -> None:
    """Raise ConfigError for a setting that is none of its choices."""
    for key, allowed in choices.items():
        if vars(settings)[key] not in allowed:
            value = vars(settings)[key]
            raise ConfigError(f"{section}{key}={value}: must be one of {', '.join(allowed)}")


def describe_read_error(error: Exception) -> str:
    """Describe why a file cannot be read, without its path."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def suggest_nearest(name: str, names: Iterable[str], noun: str = "key") -> str:
    """Return a hint for errors: the valid name similar to `name`, else the list of valid names.

    noun: kind of the names, for the hint.
    """
    options = list(names)
    if close := difflib.get_close_matches(name, options, n=1):
        return f"the nearest {noun} is {close[0]}"
    return f"the {noun}s are {', '.join(options)}" if options else f"no {noun}s are allowed"


def format_as_list(key: str, value: Any) -> str:
    """Format key=[value] as a shell word, the form in which a list is set on the command line."""
    entries = [] if value is None else [value]
    return shlex.quote(f"{key}={json.dumps(entries, ensure_ascii=False, default=str)}")


def rename_error_section(
    error: ConfigError, changes: Mapping[str, Any], *, section: str
) -> ConfigError:
    """Return an error about `trainer` in the words of a section that inherits from `trainer`.

    changes: settings that this section sets itself; other settings are called inherited.
    """
    name = str(error).removeprefix("trainer.").partition("=")[0]
    message = str(error).replace("trainer.", f"{section}.")
    if name not in changes:
        message += f"; inherited from trainer.{name}, unless {section}.{name} is set"
    return ConfigError(message)
