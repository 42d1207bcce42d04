"""A user's Python file, imported: a reward, a filter, an algorithm."""

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from streamrl.errors import ConfigError


def import_file(path: str, *, setting: str) -> ModuleType:
    """The Python file as a module, executed anew.

    Raises ConfigError, which names the setting and the line of the file, if it is missing, no .py
    file or fails while it is imported.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"{setting}={path}: no such file")
    if file.suffix != ".py":
        raise ConfigError(f"{setting}={file}: must be a .py file")
    # A name of its own per file: two tasks may both have a reward.py.
    name = f"streamrl_user_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    # Whatever a user's module does wrong while it is imported, exit() included.
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{setting}={failure_place(str(file), error)}") from error
    return module


def split_reference(reference: str, *, setting: str) -> tuple[str, str]:
    """Path and name of what is written as `file.py:function`. Raises ConfigError if it is not."""
    path, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(f"{setting}={reference}: must be written as file.py:function")
    return path, name


def failure_place(path: str, error: BaseException) -> str:
    """`path:line: type: message`, the line being the innermost of that file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno)
    place = f"{path}:{lines[-1]}" if lines else path
    try:
        words = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - it is the user's own, and may be broken too
        words = "what it says cannot be read"
    return f"{place}: {type(error).__name__}: {words}"
