"""Conversion of raw values to dataclasses of settings, with one-line errors."""

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from streamrl.errors import ConfigError, get_first_line, get_message

T = TypeVar("T")
Conflict = tuple[object, str, str]
"""Condition under which a setting is refused, the setting, and the reason."""
TYPE_RULES: Mapping[Any, str] = {
    int: "a whole number, as in 3",
    float: "a number, as in 0.5 or 1e-4",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}

CONTAINER_TYPES: Mapping[type, Any] = {list: list[Any], dict: dict[Any, Any]}
"""Types of values of a setting that may be anything: what they contain is checked, too."""


def read_settings(kind: type[T], values: Mapping[str, Any], *, section: str) -> T:
    """Convert a mapping of raw values to the settings dataclass `kind`.

    Fields without a default are required. Raises ConfigError that names the config section: for an
    unknown key (with the nearest valid key), a wrong type, a missing field, or an error of the
    dataclass itself.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section}: must be a mapping")
    raw = prepare_settings(dict(values), kind, section)
    try:
        settings = merge_settings(kind, raw, location=f"{section}.")
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(section) else f"{section}.{text}") from None
    assert isinstance(settings, kind)
    return settings


def merge_settings(kind: Any, raw: Any, *, location: str) -> Any:
    """Return an object of the settings dataclass `kind` with the prepared values `raw`.

    location: start of messages. Raises ConfigError, the dataclass's own unchanged: it checks rules
    between settings, after those on each.
    """
    # Worker processes of users' code import this module for its errors only.
    import omegaconf

    try:
        merged = omegaconf.OmegaConf.merge(_make_schema(kind), raw)
        # Interpolations have values only now.
        values = omegaconf.OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        prepare_settings(values, omegaconf.OmegaConf.get_type(merged))
    except ConfigError as error:
        raise ConfigError(f"{location}{error}") from None
    except omegaconf.errors.MissingMandatoryValue as error:
        raise ConfigError(f"{location}{error.full_key}: missing") from None
    except omegaconf.errors.OmegaConfBaseException as error:
        reason = get_first_line(error.msg or error)
        raise ConfigError(f"{location}{error.full_key or 'config'}: {reason}") from None
    return omegaconf.OmegaConf.to_object(merged)


@functools.cache
def _make_schema(kind: Any) -> Any:
    """Return the OmegaConf schema of a settings dataclass; making it takes a third of a load."""
    import omegaconf

    return omegaconf.OmegaConf.structured(kind)


KeyHint = Callable[[str, Any], str]
"""Function of an unknown key and its section's dataclass: what may have been meant."""


def suggest_sibling(key: str, kind: Any) -> str:
    return suggest_nearest(key.rpartition(".")[2], get_fields(kind))


def prepare_settings(raw: Any, hint: Any, key: str = "", suggest: KeyHint = suggest_sibling) -> Any:
    """Check the keys, types and declared rules of values; return them converted to their types.

    YAML reads `key=` and `key:` as null, which becomes "" for a text. hint: type of the values.
    key: their key, for errors. Raises ConfigError. An interpolation passes.
    """
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
        value = prepare_settings(raw, hint, key, suggest)
        _check_rules(key, value, marks)
        return value
    if hint is Any:
        hint = CONTAINER_TYPES.get(type(raw), Any)
    if dataclasses.is_dataclass(hint):
        return _prepare_section(raw, hint, key, suggest)
    if get_origin(hint) is list:
        if not isinstance(raw, list):
            raise ConfigError(
                f"{key}={quote_value(raw)}: must be a list, as in {_format_as_list(key, raw)}"
            )
        kind = get_args(hint)[0]
        return [prepare_settings(raw[i], kind, f"{key}[{i}]", suggest) for i in range(len(raw))]
    if get_origin(hint) is dict:
        if not isinstance(raw, dict):
            raise ConfigError(f"{key}={quote_value(raw)}: must be a mapping of names to settings")
        names, kind = get_args(hint)
        if odd := [name for name in raw if names is str and not isinstance(name, str)]:
            raise ConfigError(f"{key}.{odd[0]}: the name must be text; quote it")
        return {
            name: prepare_settings(value, kind, f"{key}.{name}", suggest)
            for name, value in raw.items()
        }
    if hint is str and raw is None:
        return ""
    return _convert_scalar(key, raw, get_args(hint) or (hint,))


def _prepare_section(raw: Any, kind: Any, key: str, suggest: KeyHint) -> dict[str, Any]:
    """Prepare the values of the settings dataclass `kind`.

    Keys that it lacks go into the mapping that it marks INLINE, if it has one.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{key}={quote_value(raw)}: must be a mapping of settings")
    types, prepared, others = get_fields(kind, with_marks=True), {}, {}
    inline = next((name for name, hint in types.items() if has_mark(hint, INLINE)), None)
    for name, value in raw.items():
        inner = f"{key}.{name}".removeprefix(".")
        if name in types:
            prepared[name] = prepare_settings(value, types[name], inner, suggest)
        elif inline:
            others[name] = prepare_settings(value, Any, inner, suggest)
        else:
            raise ConfigError(f"{inner}={quote_value(value)}: unknown; {suggest(inner, kind)}")
    if others:
        prepared[inline] = {**prepared.get(inline, {}), **others}
    return prepared


def _convert_scalar(key: str, value: Any, kinds: Sequence[Any]) -> Any:
    """Return a value converted to the one of these types that is not null; any other type passes.

    Raises ConfigError, also for a number that is not finite and for text with a zero byte.
    """
    if TYPE_RULES.keys() >= {*kinds} and not (value is None and NoneType in kinds):
        types = [kind for kind in kinds if kind is not NoneType]
        if type(value) not in types:
            value = _convert_type(key, value, kinds, types)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value}: must be a finite number")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{key}={quote_value(value)}: must not contain a zero byte")
    return value


def _convert_type(key: str, value: Any, kinds: Sequence[Any], types: Sequence[Any]) -> Any:
    """Convert a value as OmegaConf does; a setting of several types takes none of another type."""
    import omegaconf

    nodes: dict[Any, Any] = {
        int: omegaconf.IntegerNode,
        float: omegaconf.FloatNode,
        bool: omegaconf.BooleanNode,
        str: omegaconf.StringNode,
    }
    if isinstance(value, bool) and str in kinds:
        words = "on, yes and true" if value else "off, no and false"
        raise ConfigError(
            f"{key}={format_value(value)}: must be text; YAML reads unquoted {words} as a boolean"
        )
    if len(types) == 1:
        with contextlib.suppress(omegaconf.errors.OmegaConfBaseException, OverflowError):
            return nodes[types[0]](value, is_optional=False)._value()
    rule = " or ".join(TYPE_RULES[kind] for kind in kinds)
    raise ConfigError(f"{key}={quote_value(value)}: must be {rule}")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Rule on a number, declared in its field's type: `steps: Annotated[int, at_least(1)]`."""

    least: float = -math.inf
    most: float = math.inf
    excludes_least: bool = False
    excludes_most: bool = False

    def __str__(self) -> str:
        words = (
            (self.least, "above" if self.excludes_least else "at least"),
            (self.most, "below" if self.excludes_most else "at most"),
        )
        bounds = [f"{word} {bound:.15g}" for bound, word in words if math.isfinite(bound)]
        return f"must be {' and '.join(bounds)}"

    def holds(self, value: float) -> bool:
        is_above = value > self.least if self.excludes_least else value >= self.least
        return is_above and (value < self.most if self.excludes_most else value <= self.most)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Rule on a setting that has a few values, declared in its field's type."""

    choices: tuple[object, ...]

    def __str__(self) -> str:
        return f"must be one of {', '.join(map(format_value, self.choices))}"

    def holds(self, value: object) -> bool:
        return value in self.choices


def at_least(least: float, most: float = math.inf) -> Bounds:
    return Bounds(least, most)


def above(least: float, most: float = math.inf) -> Bounds:
    return Bounds(least, most, excludes_least=True)


def below(most: float) -> Bounds:
    return Bounds(most=most, excludes_most=True)


def one_of(*choices: object) -> OneOf:
    return OneOf(choices)


def _check_rules(key: str, value: Any, marks: Sequence[Any]) -> None:
    """Raise ConfigError if a value breaks one of the rules among the marks of its type."""
    if value is None or (isinstance(value, str) and "${" in value):
        return
    for rule in marks:
        if isinstance(rule, Bounds | OneOf) and not rule.holds(value):
            raise ConfigError(f"{key}={format_value(value)}: {rule}")


def check_settings(settings: Any, key: str = "") -> None:
    """Check settings that were not read, or were changed after that, as `prepare_settings` does."""
    prepare_settings(dataclasses.asdict(settings), type(settings), key)


FIXED_ON_RESUME = "fixed on resume"
"""Mark of a setting that a resumed run must keep, declared in its field's type."""
INLINE = "inline"
"""Mark of a mapping whose keys users may write beside those of its section."""


def has_mark(hint: Any, mark: str) -> bool:
    return get_origin(hint) is Annotated and mark in get_args(hint)


def iter_settings(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key and type, with its marks, of each setting of a dataclass and of those in it.

    Keys of entries of lists begin with the list's, as in `rewards.kind`.
    """
    types = get_fields(kind)
    for name, hint in get_fields(kind, with_marks=True).items():
        yield f"{prefix}{name}", hint
        entry = get_args(types[name])[0] if get_origin(types[name]) is list else types[name]
        if dataclasses.is_dataclass(entry):
            yield from iter_settings(entry, f"{prefix}{name}.")


def list_fixed_settings(kind: Any) -> list[str]:
    """Return the keys of a settings dataclass, and of those in it, marked FIXED_ON_RESUME."""
    return [key for key, hint in iter_settings(kind) if has_mark(hint, FIXED_ON_RESUME)]


def find_conflict(settings: Any, conflicts: Iterable[Conflict], section: str = "") -> str:
    """Return the first conflict that applies as setting, value and reason; "" if none does.

    settings: a section, or a whole config with settings as "trainer.lr". section: as "scorer.".
    """
    for applies, key, reason in conflicts:
        if applies:
            return f"{section}{key}={format_value(get_setting(settings, key))}: {reason}"
    return ""


def check_conflicts(settings: Any, conflicts: Iterable[Conflict], section: str = "") -> None:
    """Raise ConfigError for the first conflict that applies, as `find_conflict` returns it."""
    if conflict := find_conflict(settings, conflicts, section):
        raise ConfigError(conflict)


def get_setting(settings: Any, key: str) -> Any:
    """Return the value of a dotted key; a name in a dict may have dots."""
    for index, name in enumerate(names := key.split(".")):
        if isinstance(settings, dict):
            return settings[".".join(names[index:])]
        settings = vars(settings)[name]
    return settings


@functools.cache
def get_fields(kind: Any, *, with_marks: bool = False) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name.

    with_marks: with rules and other marks, as in Annotated[int, at_least(1)].
    """
    hints = get_type_hints(kind, include_extras=with_marks)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def describe_read_error(error: Exception) -> str:
    """Describe why a file cannot be read, without its path."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return get_message(error)


def suggest_nearest(name: str, names: Iterable[str], noun: str = "key") -> str:
    """Return a hint for errors: the valid name similar to `name`, else the list of valid names.

    noun: kind of the names, for the hint.
    """
    options = list(names)
    if close := difflib.get_close_matches(name, options, n=1):
        return f"the nearest {noun} is {close[0]}"
    return f"the {noun}s are {', '.join(options)}" if options else f"no {noun}s are allowed"


def _format_as_list(key: str, value: Any) -> str:
    """Format key=[value] as a shell word, the form in which a list is set on the command line."""
    entries = [] if value is None else [value]
    return shlex.quote(f"{key}={json.dumps(entries, ensure_ascii=False, default=str)}")


def format_yaml(value: Any) -> str:
    """Format a value on one line, as in an override."""
    # PyYAML ends a bare scalar with a "..." line.
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).split("\n")[0]


def format_value(value: object) -> str:
    """Format a value on one line in YAML's words, for messages; a text stays as it is."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)


def quote_value(value: object) -> str:
    """Format a value that may be of a wrong type: a text in quotes, the first 200 characters."""
    return f"{value!r:.200}" if isinstance(value, str) else f"{format_value(value):.200}"
