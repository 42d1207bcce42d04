"""Sandbox: run untrusted programs against tests, isolated from the host.

Sandbox -> ProgramRun -> Jail -> | driver (process 1 of the jail) -> program
  pool      a program    host    | inside the jail
"""

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
