"""Running programs that nobody vouches for, against tests, with no harm to who runs them."""

from streamrl.rewards.sandbox.backend_choice import explain_unavailability
from streamrl.rewards.sandbox.program import (
    LANGUAGES,
    CallTest,
    LanguageSpec,
    ProgramLimits,
    ProgramResult,
    ProgramTestResult,
    SandboxProgram,
    StdinTest,
)
from streamrl.rewards.sandbox.sandbox import Sandbox

__all__ = [
    "LANGUAGES",
    "CallTest",
    "LanguageSpec",
    "ProgramLimits",
    "ProgramResult",
    "ProgramTestResult",
    "Sandbox",
    "SandboxProgram",
    "StdinTest",
    "explain_unavailability",
]
