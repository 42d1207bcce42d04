"""A user's Python file, imported: a reward, a filter, an algorithm; and a function found in it."""

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

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import MIB

MAX_FILE_BYTES = 64 * MIB
"""Of a user's file, all of which is read before any of it runs."""
IMPORT_TIMEOUT_S = 100.0
"""Deadline of importing a user's file, s: it may load a model of its own."""
MAX_MESSAGE_CHARS = 500
"""Characters of what an error of a user's says that are told."""


@dataclass(frozen=True)
class FileFunction:
    """A function of a user's Python file, whose resolved path is `file`.

    `said` is how the user named it, for errors: setting=value.
    """

    file: str
    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    label: str

    @property
    def is_async(self) -> bool:
        """Whether a call gives an awaitable."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            type(self.function).__call__
        )

    @property
    def has_var_keyword(self) -> bool:
        """Whether it takes names that it does not list."""
        return any(p.kind is Parameter.VAR_KEYWORD for p in self.parameters.values())

    @property
    def keyword_names(self) -> set[str]:
        """The parameters that a call can give by name."""
        unnamed = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD, Parameter.POSITIONAL_ONLY)
        return {name for name, p in self.parameters.items() if p.kind not in unnamed}

    @property
    def required_names(self) -> set[str]:
        """The parameters that a call must give."""
        rest = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        return {
            name
            for name, p in self.parameters.items()
            if p.default is Parameter.empty and p.kind not in rest
        }

    @property
    def signature_text(self) -> str:
        """Its parameters as they stand in the file."""
        return str(inspect.Signature([*self.parameters.values()]))[1:-1]

    def select_arguments(self, offered: Sequence[str]) -> tuple[str, ...]:
        """Those of `offered` that it takes by name.

        Raises ConfigError if it must be given another, or is async.
        """
        self.check_not_async()
        only_by_place = {
            name for name, p in self.parameters.items() if p.kind is Parameter.POSITIONAL_ONLY
        }
        beyond = only_by_place | (self.required_names - {*offered})
        refused = [name for name in self.parameters if name in beyond]
        if refused:
            raise ConfigError(
                f"{self.label}: in {self.file} it asks for {', '.join(refused)};"
                f" it is given, by name, any of {', '.join(offered)}"
            )
        return tuple(name for name in offered if self.has_var_keyword or name in self.keyword_names)

    def check_not_async(self) -> None:
        """Raise ConfigError if it is async."""
        if self.is_async:
            raise ConfigError(f"{self.label}: in {self.file} it is async")

    def describe_error(self, error: BaseException) -> str:
        """What it raised, with the innermost line of the user's file."""
        return f"{self.name} at {format_failure(self.file, error)}"


def load_function(path: str, name: str, *, setting: str, said: str) -> FileFunction:
    """Function `name` of the Python file `path`, which `setting` names.

    Raises ConfigError as `import_file` does, or if the file has no such function; `said` is how
    the user named the function: setting=value.
    """
    module = import_file(path, setting=setting)
    if name not in vars(module):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{said}: not in {path}, which has {', '.join(names) or 'none'}")
    function = vars(module)[name]
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{said}: in {path} it is no function")
    return make_file_function(str(Path(path).resolve()), name, function, said=said)


def load_referenced_function(reference: str, *, setting: str) -> FileFunction:
    """The function that `setting` names as file.py:function. Raises ConfigError likewise."""
    path, name = split_reference(reference, setting=setting)
    return load_function(path, name, setting=setting, said=f"{setting}={reference}")


def make_file_function(
    file: str, name: str, function: Callable[..., Any], *, said: str
) -> FileFunction:
    """A function that is loaded already. Raises ConfigError if it does not tell its parameters."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:  # some functions written in C do not tell
        raise ConfigError(f"{said}: in {file}: {error}") from error
    return FileFunction(file, name, function, parameters, said)


def import_file(path: str, *, setting: str) -> ModuleType:
    """The Python file as a module, executed anew.

    Raises ConfigError, which names the setting and the line of the file, if it is missing, no .py
    file or a huge one, fails while it is imported, or takes longer than IMPORT_TIMEOUT_S in a main
    thread.
    """
    file = Path(path).resolve()
    if not file.is_file():
        problem = "not a regular file" if file.exists() else "no such file"
        raise ConfigError(f"{setting}={path}: {problem}")
    if file.suffix != ".py":
        raise ConfigError(f"{setting}={file}: must be a .py file")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(
            f"{setting}={file}: more than {MAX_FILE_BYTES // MIB} MiB: is this a program?"
        )
    # A name of its own per file: two tasks may both have a reward.py.
    name = f"streamrl_user_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Behind everything else: files beside it can be imported, and hide nothing.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module
    try:
        with limit_import_time():
            spec.loader.exec_module(module)
    # Whatever a user's module does wrong while it is imported, exit() included.
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{setting}={format_failure(str(file), error)}") from error
    return module


@contextmanager
def limit_import_time() -> Iterator[None]:
    """For imports of a user's: TimeoutError after IMPORT_TIMEOUT_S, if this is the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not imported in {IMPORT_TIMEOUT_S:g} s")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, IMPORT_TIMEOUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def split_reference(reference: str, *, setting: str) -> tuple[str, str]:
    """Path and name of what is written as `file.py:function`. Raises ConfigError if it is not."""
    path, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(f"{setting}={reference}: must be written as file.py:function")
    return path, name


def format_failure(path: str, error: BaseException) -> str:
    """`path:line: type: message`, the line being the innermost of that file.

    Of a long message it is the beginning; without one it is `path:line: type`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno)
    place = f"{path}:{lines[-1]}" if lines else path
    try:
        words = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - it is the user's own, and may be broken too
        words = "what it says cannot be read"
    if len(words) > MAX_MESSAGE_CHARS:
        words = f"{words[:MAX_MESSAGE_CHARS]}..."
    return f"{place}: {type(error).__name__}" + (f": {words}" if words else "")
