"""What counts as a number where a user's code says what something is worth, and what did not."""

import contextlib
import reprlib
from numbers import Real
from typing import Any

import numpy as np

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def format_value(value: Any) -> str:
    """What a user's code gave, in short and on one line."""
    return " ".join(reprlib.repr(value).split())


def to_finite_float(value: Any) -> float | None:
    """A number, or a bool, that a float32 can hold; None for anything else."""
    if hasattr(value, "item") and not isinstance(value, Real | np.bool_):
        # A tensor of one number. One of more has no single item, and is none.
        with contextlib.suppress(ValueError, RuntimeError):
            value = value.item()
    if isinstance(value, Real | np.bool_):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            if abs(float(value)) <= _MAX_FLOAT32:
                return float(value)
    return None
