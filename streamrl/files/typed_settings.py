"""Loose values read into a dataclass of settings, with one line for what is wrong."""

import dataclasses
import difflib
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from streamrl.errors import ConfigError

T = TypeVar("T")


def read_settings(kind: type[T], values: Mapping[str, Any], *, section: str) -> T:
    """`values` as an object of the dataclass `kind`; a field without a default must be given.

    Raises ConfigError that names `section`: an unknown key with the nearest right one, a value of
    another type, a missing one, or what the dataclass itself refuses, which begins with its key.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section}: must be a mapping")
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in names:
            raise ConfigError(
                f"{section}.{name}={value!r}: unknown; {suggest_nearest(str(name), names)}"
            )
    try:
        given = fill_empty_text(dict(values), kind)
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), given))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{section}.{error.full_key}: missing") from None
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{section}.{error.full_key}: {reason}") from None
    except ConfigError as error:
        raise ConfigError(f"{section}.{error}") from None
    assert isinstance(found, kind)
    return found


def fill_empty_text(loose: Any, kind: Any) -> Any:
    """The settings, where text that is left empty, as in `key=` or `key:`, is empty text.

    YAML has nothing there; for settings that may be null it stays so.
    """
    if get_origin(kind) is list and isinstance(loose, list):
        return [fill_empty_text(entry, get_args(kind)[0]) for entry in loose]
    if kind is str and loose is None:
        return ""
    if not (dataclasses.is_dataclass(kind) and isinstance(loose, dict)):
        return loose
    hints = get_type_hints(kind)
    return {name: fill_empty_text(value, hints.get(str(name))) for name, value in loose.items()}


def describe_read_error(error: Exception) -> str:
    """Why a file cannot be read, or is not what it should be, in one line."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def suggest_nearest(name: str, names: Iterable[str]) -> str:
    """Which of `names` may have been meant, in words."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.0)
    return f"the nearest key is {close[0]}" if close else "there is nothing to set"


def format_as_list(key: str, value: Any) -> str:
    """Write on a command line the list that a setting may be where a value was given alone."""
    entries = [] if value is None else [value]
    return shlex.quote(f"{key}={json.dumps(entries, ensure_ascii=False, default=str)}")


def rename_error_section(
    error: ConfigError, changes: Mapping[str, Any], *, section: str
) -> ConfigError:
    """An error of `trainer` as one of a section that has its settings, but for some changes."""
    name = str(error).removeprefix("trainer.").partition("=")[0]
    said = str(error).replace("trainer.", f"{section}.")
    if name not in changes:
        said += f"; it is that of trainer.{name}, unless {section}.{name} says another"
    return ConfigError(said)
