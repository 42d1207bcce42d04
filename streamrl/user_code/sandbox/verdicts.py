"""Judge the reports of a jail's driver, on the host.

A report is untrusted, but forging a report gains nothing: expected outputs never enter the jail.
"""

import json
import math
import reprlib
import signal
from typing import Any

from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox import jail_driver
from streamrl.user_code.sandbox.compare import (
    can_be_value,
    decode_output,
    is_same_text,
    is_same_value,
    parse_value,
)
from streamrl.user_code.sandbox.jail import JailReport
from streamrl.user_code.sandbox.program import (
    MIB,
    CallTest,
    LanguageSpec,
    ProgramLimits,
    ProgramTestResult,
    SandboxProgram,
    StdinTest,
)

_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = 80
#: Last line of stderr of a program that ran out of memory. A program may print this falsely; the
#: outcome is a failure in any case.
_OUT_OF_MEMORY_TEXTS = ("MemoryError", "bad_alloc", "out of memory", "Cannot allocate memory")


def make_program_message(
    program: SandboxProgram, language: LanguageSpec, limits: ProgramLimits
) -> dict[str, Any]:
    """Return the first message to a jail's driver: program and limits, as marshal types."""
    return {
        "source": str(program.source),
        "file": language.file,
        "run": language.run,
        "compile": language.compile,
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


def make_test_message(test: StdinTest | CallTest, wall_s: float) -> dict[str, Any]:
    if isinstance(test, StdinTest):
        return {"stdin": str(test.stdin), "wall_s": wall_s}
    arguments = json.dumps(list(test.arguments))
    return {"call": test.function, "arguments": arguments, "wall_s": wall_s}


def judge_report(
    report: JailReport, test: StdinTest | CallTest, program: SandboxProgram, limits: ProgramLimits
) -> ProgramTestResult:
    outcome, detail = _classify_exit(report, limits)
    if outcome is RewardOutcome.PASS:
        outcome, detail = _compare_output(report.out, test, program)
    return ProgramTestResult(outcome, report.seconds, detail)


def describe_compile_failure(report: JailReport) -> str:
    if report.exit_kind == jail_driver.EXITED and report.exit_code == 0:
        return ""
    lines = report.err.decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if "error" in line]
    stopped = {
        jail_driver.WALL_TIMEOUT: "the compiler took too long",
        jail_driver.OUTPUT_LIMIT: "the compiler wrote too much",
        jail_driver.FILE_LIMIT: "the compiler created too many files",
    }
    return stopped.get(report.exit_kind) or [*errors, *lines, "the compiler failed"][0]


def _classify_exit(report: JailReport, limits: ProgramLimits) -> tuple[RewardOutcome, str]:
    """Judge by the exit alone; PASS for exit code 0 within all limits."""
    last_line = (report.err.decode(errors="replace").strip().splitlines() or [""])[-1]
    stopped = {
        jail_driver.COMPILE_FAILED: (RewardOutcome.COMPILE_ERROR, last_line),
        jail_driver.WALL_TIMEOUT: (RewardOutcome.TIMEOUT, f"ran for more than {limits.wall_s:g} s"),
        jail_driver.OUTPUT_LIMIT: (
            RewardOutcome.OUTPUT_LIMIT,
            f"wrote more than {limits.output_kib} KiB",
        ),
        jail_driver.FILE_LIMIT: (
            RewardOutcome.RUNTIME_ERROR,
            f"created more than {limits.files} files",
        ),
    }
    if report.exit_kind in stopped:
        return stopped[report.exit_kind]
    if report.exit_code == 0:
        return RewardOutcome.PASS, ""
    if report.exit_code == -signal.SIGXCPU or (
        report.exit_code < 0 and report.cpu_s > limits.cpu_s
    ):
        return RewardOutcome.TIMEOUT, f"used more than {limits.cpu_s:g} s of CPU time"
    if any(text in last_line for text in _OUT_OF_MEMORY_TEXTS):
        return RewardOutcome.MEMORY, last_line
    exit_status = (
        f"exit code {report.exit_code}"
        if report.exit_code > 0
        else f"killed by signal {-report.exit_code}"
    )
    return RewardOutcome.RUNTIME_ERROR, last_line or exit_status


def _compare_output(
    out: bytes, test: StdinTest | CallTest, program: SandboxProgram
) -> tuple[RewardOutcome, str]:
    if isinstance(test, StdinTest):
        actual = decode_output(out)
        if is_same_text(test.stdout, actual, loose_numbers=program.loose_numbers):
            return RewardOutcome.PASS, ""
        return (
            RewardOutcome.WRONG,
            f"wrote {_SHORT_REPR.repr(actual)}, not {_SHORT_REPR.repr(test.stdout)}",
        )
    accepted = " or ".join(map(_SHORT_REPR.repr, test.accepted))
    if not can_be_value(out, test.accepted):
        size_kib = len(out) >> 10
        return RewardOutcome.WRONG, f"returned {size_kib} KiB of other structure, not {accepted}"
    try:
        value = parse_value(out)
    except ValueError:
        return RewardOutcome.RUNTIME_ERROR, f"{test.function} ended without returning a value"
    if any(is_same_value(expected, value) for expected in test.accepted):
        return RewardOutcome.PASS, ""
    return RewardOutcome.WRONG, f"returned {_SHORT_REPR.repr(value)}, not {accepted}"
