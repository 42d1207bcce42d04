"""Checks and formatting of values returned by user code."""

import contextlib
import reprlib
from numbers import Real
from typing import Any

import numpy as np

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def format_returned(value: Any) -> str:
    """Format any object on one line, abbreviated; its own repr may fail."""
    return " ".join(reprlib.repr(value).split())


def to_finite_float(value: Any) -> float | None:
    """Convert a number, bool or one-element tensor to float; None unless a finite float32."""
    if hasattr(value, "item") and not isinstance(value, Real | np.bool_):
        # item() raises for a tensor with more than one element.
        with contextlib.suppress(ValueError, RuntimeError):
            value = value.item()
    if isinstance(value, Real | np.bool_):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            if abs(float(value)) <= _MAX_FLOAT32:
                return float(value)
    return None
