"""Running programs that nobody vouches for, against tests, with no harm to who runs them."""

from streamrl.rewards.sandbox.program import (
    LANGUAGES,
    CallTest,
    Language,
    Limits,
    Outcome,
    Program,
    Result,
    StdinTest,
)
from streamrl.rewards.sandbox.sandbox import Sandbox
from streamrl.rewards.sandbox.selection import why_unavailable

__all__ = [
    "LANGUAGES",
    "CallTest",
    "Language",
    "Limits",
    "Outcome",
    "Program",
    "Result",
    "Sandbox",
    "StdinTest",
    "why_unavailable",
]
