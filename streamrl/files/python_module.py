"""User Python files: import a reward, filter or algorithm file and look up functions in it."""

import hashlib
import importlib.util
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from streamrl.errors import ConfigError, format_error
from streamrl.files.bounded_read import MIB
from streamrl.files.printable_text import shorten_text

MAX_FILE_BYTES = 64 * MIB
"""Limit of a user's file, read as a whole before it runs."""
IMPORT_TIMEOUT_S = 100.0
"""Import deadline of a user's file in seconds; generous, because the file may load a model."""
MAX_MESSAGE_CHARS = 500
"""Maximum length of a user error's message in our own messages."""


@dataclass(frozen=True)
class FileFunction:
    """Function of a user's Python file.

    file: resolved path. label: setting=value as the user wrote it, for errors.
    """

    file: str
    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    label: str

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            type(self.function).__call__
        )

    @property
    def has_var_keyword(self) -> bool:
        """True if the function takes any keyword argument (`**kwargs`)."""
        return any(p.kind is Parameter.VAR_KEYWORD for p in self.parameters.values())

    @property
    def keyword_names(self) -> set[str]:
        """Names of the parameters that callers may pass by keyword."""
        unnamed = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD, Parameter.POSITIONAL_ONLY)
        return {name for name, p in self.parameters.items() if p.kind not in unnamed}

    @property
    def required_names(self) -> set[str]:
        """Names of the parameters without a default."""
        variadic = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        return {
            name
            for name, p in self.parameters.items()
            if p.default is Parameter.empty and p.kind not in variadic
        }

    @property
    def signature_text(self) -> str:
        """Parameters of the function as in its source, without parentheses."""
        return str(inspect.Signature([*self.parameters.values()]))[1:-1]

    def select_arguments(self, offered: Sequence[str]) -> tuple[str, ...]:
        """Return the offered arguments that the function takes by keyword.

        offered: names of the arguments that the caller can pass. Raises ConfigError for a required
        parameter that is not offered.
        """
        positional_only = {
            name for name, p in self.parameters.items() if p.kind is Parameter.POSITIONAL_ONLY
        }
        unavailable = positional_only | (self.required_names - {*offered})
        refused = [name for name in self.parameters if name in unavailable]
        if refused:
            raise ConfigError(
                f"{self.label}: in {self.file} requires {', '.join(refused)};"
                f" available, by keyword: {', '.join(offered)}"
            )
        return tuple(name for name in offered if self.has_var_keyword or name in self.keyword_names)

    def check_not_async(self) -> None:
        if self.is_async:
            raise ConfigError(f"{self.label}: in {self.file} must not be async")

    def check_positional(self, arguments: Sequence[str]) -> None:
        """Raise ConfigError unless the function takes these positional arguments."""
        try:
            inspect.Signature([*self.parameters.values()]).bind(*arguments)
        except TypeError:
            owner, _, name = self.name.rpartition(".")
            after = " after self" if owner else ""
            wanted = ", ".join([*(["self"] if owner else []), *arguments])
            raise ConfigError(
                f"{self.label}: in {self.file} has parameters ({self.signature_text}){after};"
                f" write it as {name}({wanted})"
            ) from None

    def describe_error(self, error: BaseException) -> str:
        """Format an exception from the function, with the innermost line of the user's file."""
        return f"{self.name} at {format_failure(self.file, error)}"


def load_function(path: str, name: str, *, setting: str, label: str) -> FileFunction:
    """Load function `name` of a user's Python file.

    setting: config key of the path. label: setting=value with which the user named the function,
    for errors. Raises ConfigError if the file cannot be imported or has no such function.
    """
    module = import_file(path, setting=setting)
    if name not in vars(module):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{label}: not in {path}; its functions are {', '.join(names) or 'none'}")
    function = vars(module)[name]
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{label}: in {path} it is not a function")
    return make_file_function(str(Path(path).resolve()), name, function, label=label)


def load_referenced_function(reference: str, *, setting: str) -> FileFunction:
    """Load the function to which the value of a setting refers as file.py:function."""
    path, name = split_reference(reference, setting=setting)
    return load_function(path, name, setting=setting, label=f"{setting}={reference}")


def load_referenced_class(reference: str, *, setting: str) -> tuple[str, type]:
    """Load the class to which the value of a setting refers as file.py or file.py:Class.

    Returns the resolved path of the file and the class. Without a name, the file must define a
    single public class. Raises ConfigError.
    """
    path, _, name = (reference, "", "") if reference.endswith(".py") else reference.rpartition(":")
    if not path or (name and not name.isidentifier()):
        raise ConfigError(f"{setting}={reference}: write it as file.py or file.py:Class")
    module = import_file(path, setting=setting)
    classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and key[0] != "_"
    }
    names = ", ".join(classes) or "none"
    if not name and len(classes) != 1:
        raise ConfigError(
            f"{setting}={reference}: must define one class, or be written as file.py:Class;"
            f" its classes are {names}"
        )
    found = vars(module).get(name) if name else next(iter(classes.values()))
    if not inspect.isclass(found):
        raise ConfigError(f"{setting}={reference}: no such class; its classes are {names}")
    return str(Path(path).resolve()), found


def make_file_function(
    file: str, name: str, function: Callable[..., Any], *, label: str
) -> FileFunction:
    """Wrap a function loaded from a user's file. Raises ConfigError if it has no signature.

    label: setting=value with which the user named the function, for errors.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:  # some C functions have no signature
        raise ConfigError(f"{label}: in {file}: {error}") from error
    return FileFunction(file, name, function, parameters, label)


def import_file(path: str, *, setting: str) -> ModuleType:
    """Import a user's Python file as a new module.

    setting: config key of the path. Raises ConfigError with setting and line for a missing, huge or
    non-.py file, an exception during the import, or (in the main thread) an import longer than
    IMPORT_TIMEOUT_S.
    """
    file = Path(path).resolve()
    if not file.is_file():
        problem = "not a regular file" if file.exists() else "no such file"
        raise ConfigError(f"{setting}={path}: {problem}")
    if file.suffix != ".py":
        raise ConfigError(f"{setting}={file}: must be a .py file")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(
            f"{setting}={file}: exceeds the limit of {MAX_FILE_BYTES // MIB} MiB for a Python file"
        )
    # Unique per file: two user folders may each contain a reward.py.
    name = f"streamrl_user_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Append to sys.path, so that neighboring files can be imported and shadow no installed package.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module
    try:
        with limit_import_time():
            spec.loader.exec_module(module)
    # SystemExit too: a user's file may call exit().
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{setting}={format_failure(str(file), error)}") from error
    return module


@contextmanager
def limit_import_time() -> Iterator[None]:
    """Raise TimeoutError in the block after IMPORT_TIMEOUT_S seconds.

    The timer needs the main thread and SIGALRM without a handler; otherwise the time is not
    limited.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"import took longer than {IMPORT_TIMEOUT_S:g} s")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, IMPORT_TIMEOUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def split_reference(reference: str, *, setting: str) -> tuple[str, str]:
    """Split a reference file.py:function into path and name. Raises ConfigError if malformed."""
    path, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(f"{setting}={reference}: write it as file.py:function")
    return path, name


def format_failure(path: str, error: BaseException) -> str:
    """Format an exception as `path:line: type: message` with the innermost line in the file `path`.

    Truncates long messages, and escapes what UTF-8 cannot encode; an empty message is omitted.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno)
    location = f"{path}:{lines[-1]}" if lines else path
    try:
        failure = format_error(error).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        failure = f"{type(error).__name__}: (its message cannot be formatted)"
    return f"{location}: {shorten_text(failure, MAX_MESSAGE_CHARS)}"
