"""From what came out of a jail to a verdict. A forged report can only say that this came out."""

import json
import math
import reprlib
import signal
from typing import Any

from streamrl.rewards.interface.verdict import Verdict
from streamrl.rewards.sandbox import driver
from streamrl.rewards.sandbox.compare import (
    may_be_value,
    read_text,
    read_value,
    same_text,
    same_value,
)
from streamrl.rewards.sandbox.jail import Report
from streamrl.rewards.sandbox.program import (
    MIB,
    CallTest,
    Language,
    Limits,
    Program,
    Result,
    StdinTest,
)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
#: How a program says, on its last line, that it got no memory. It may say so untruly, and so
#: choose among the verdicts of a failure.
_NO_MEMORY = ("MemoryError", "bad_alloc", "out of memory", "Cannot allocate memory")


def program_message(program: Program, language: Language, limits: Limits) -> dict[str, Any]:
    """What a jail is told of a program, with the limits its driver keeps; of plain types only."""
    return {
        "source": str(program.source),
        "file": language.file,
        "run": list(language.run),
        "compile": list(language.compile),
        "compile_s": limits.compile_s,
        "stdin": "",
        "limit_address_space": language.limit_address_space,
        "cpu_s": math.ceil(limits.cpu_s),
        "memory_bytes": limits.memory_mib * MIB,
        "disk_bytes": limits.disk_mib * MIB,
        "output_bytes": limits.output_kib * 1024,
        "files": limits.files,
        "processes": limits.processes,
        "open_files": limits.open_files,
    }


def test_message(test: StdinTest | CallTest, wall_s: float) -> dict[str, Any]:
    """What a jail is told of a test: not what is to come out."""
    if isinstance(test, StdinTest):
        return {"stdin": str(test.stdin), "wall_s": wall_s}
    arguments = json.dumps(list(test.arguments))
    return {"call": test.function, "arguments": arguments, "wall_s": wall_s}


def judge(report: Report, test: StdinTest | CallTest, program: Program, limits: Limits) -> Result:
    """The verdict on one test."""
    verdict, detail = _ending(report, limits)
    if verdict is Verdict.PASS:
        verdict, detail = _answer(report.out, test, program)
    return Result(verdict, report.seconds, detail)


def compiler_trouble(report: Report) -> str:
    """Why there is nothing to run, in a line; empty if there is."""
    if report.how == driver.EXITED and report.code == 0:
        return ""
    lines = report.err.decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if "error" in line]
    stopped = {
        driver.WALL: "the compiler took too long",
        driver.OUTPUT: "the compiler wrote too much",
        driver.FILES: "the compiler made too many files",
    }
    return stopped.get(report.how) or [*errors, *lines, "the compiler failed"][0]


def _ending(report: Report, limits: Limits) -> tuple[Verdict, str]:
    """What is to be said of how it ended, whatever it gave; a pass if nothing is."""
    last_line = (report.err.decode(errors="replace").strip().splitlines() or [""])[-1]
    stopped = {
        driver.NOT_COMPILED: (Verdict.COMPILE_ERROR, last_line),
        driver.WALL: (Verdict.TIMEOUT, f"ran for more than {limits.wall_s:g} s"),
        driver.OUTPUT: (Verdict.OUTPUT_LIMIT, f"wrote more than {limits.output_kib} KiB"),
        driver.FILES: (Verdict.RUNTIME_ERROR, f"made more than {limits.files} files"),
    }
    if report.how in stopped:
        return stopped[report.how]
    if report.code == 0:
        return Verdict.PASS, ""
    if report.code == -signal.SIGXCPU or (report.code < 0 and report.cpu_s > limits.cpu_s):
        return Verdict.TIMEOUT, f"computed for more than {limits.cpu_s:g} s"
    if any(words in last_line for words in _NO_MEMORY):
        return Verdict.MEMORY, last_line
    how = f"exit code {report.code}" if report.code > 0 else f"killed by signal {-report.code}"
    return Verdict.RUNTIME_ERROR, last_line or how


def _answer(out: bytes, test: StdinTest | CallTest, program: Program) -> tuple[Verdict, str]:
    if isinstance(test, StdinTest):
        got = read_text(out)
        if same_text(test.stdout, got, loose_numbers=program.loose_numbers):
            return Verdict.PASS, ""
        return Verdict.WRONG, f"wrote {_SHORT.repr(got)}, not {_SHORT.repr(test.stdout)}"
    wanted = " or ".join(map(_SHORT.repr, test.accepted))
    if not may_be_value(out, test.accepted):
        return Verdict.WRONG, f"returned {len(out) >> 10} KiB of other parts, not {wanted}"
    try:
        value = read_value(out)
    except ValueError:
        return Verdict.RUNTIME_ERROR, f"{test.function} ended without returning a value"
    if any(same_value(wanted, value) for wanted in test.accepted):
        return Verdict.PASS, ""
    return Verdict.WRONG, f"returned {_SHORT.repr(value)}, not {wanted}"
