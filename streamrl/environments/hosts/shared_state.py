"""State of a host process that all of its episodes share, and that code of users may change."""

import hashlib
import inspect
import locale
import os
import random
import reprlib
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

VARIABLE = "the variable "
_repr = reprlib.Repr()
_repr.maxlevel = 3
_repr.maxdict = _repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxdeque = 50
_repr.maxstring = _repr.maxother = 1000


def digest_shared_state(user_class: type) -> dict[str, str]:
    """Return a digest of each part of the state by name."""
    return {
        name: hashlib.blake2b(str(value).encode("utf-8", "backslashreplace")).hexdigest()
        for name, value in (*_list_settings(), *_list_variables(user_class))
    }


def _list_settings() -> Iterator[tuple[str, Any]]:
    """Yield the settings of a process that environments are known to change."""
    yield "the generator of random", random.getstate()
    if numpy := sys.modules.get("numpy"):
        _, key, *rest = numpy.random.get_state()
        yield "the generator of numpy.random", (key.tolist(), rest)
    if torch := sys.modules.get("torch"):
        yield "the generator of torch", torch.get_rng_state().tolist()
    yield "os.environ", sorted(os.environ.items())
    yield "the working directory", os.readlink("/proc/self/cwd")
    yield "the locale", locale.setlocale(locale.LC_ALL)
    yield "the time zone", time.tzname
    yield "the filters of warnings", warnings.filters
    yield "the default timeout of sockets", socket.getdefaulttimeout()
    yield "sys.path", sys.path


def _list_variables(user_class: type) -> Iterator[tuple[str, str]]:
    """Yield the global variables of the class's file and attributes of its classes, shortened."""
    module = dict(vars(sys.modules[user_class.__module__]))
    owners = {"": module} | {
        f"{name}.": dict(vars(value))
        for name, value in module.items()
        if inspect.isclass(value) and value.__module__ == user_class.__module__
    }
    for owner, variables in owners.items():
        for name, value in variables.items():
            if not (name.startswith("__") or callable(value) or inspect.ismodule(value)):
                yield f"{VARIABLE}{owner}{name}", _repr.repr(value)
