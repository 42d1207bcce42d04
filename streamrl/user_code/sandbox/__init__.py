"""Sandbox: run untrusted programs against tests, and interpreters, isolated from the host.

Sandbox -> ProgramRun -> Jail -> | driver (process 1 of the jail) -> program
  pool      a program    host    | inside the jail

PythonSession -> Jail -> | driver (process 1 of the jail) -> interpreter
  calls of an episode
"""
