"""Running programs that nobody vouches for, against tests, with no harm to who runs them."""

from streamrl.rewards.sandbox.backend_choice import why_unavailable
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
