"""Judge a program's outputs, on the host: reports of a jail's driver, and replies of a server.

A report is untrusted, but forging a report gains nothing: expected outputs never enter the jail.
Output is hostile input: long, and built to be slow to parse. All comparisons work in blocks, so
that no single call into C holds the GIL for long.
"""

import codecs
import json
import math
import re
import reprlib
import signal
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any

from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox import jail_driver
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
    by_exit = _classify_exit(report, limits)
    passes = by_exit.outcome is RewardOutcome.PASS
    return compare_output(report.out, test, program) if passes else by_exit


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


def _classify_exit(report: JailReport, limits: ProgramLimits) -> ProgramTestResult:
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
    code = report.exit_code
    if report.exit_kind in stopped:
        return ProgramTestResult(*stopped[report.exit_kind])
    if code == 0:
        return ProgramTestResult(RewardOutcome.PASS)
    if code == -signal.SIGXCPU or (code < 0 and report.cpu_s > limits.cpu_s):
        detail = f"used more than {limits.cpu_s:g} s of CPU time"
        return ProgramTestResult(RewardOutcome.TIMEOUT, detail)
    if any(text in last_line for text in _OUT_OF_MEMORY_TEXTS):
        return ProgramTestResult(RewardOutcome.MEMORY, last_line)
    status = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
    return ProgramTestResult(RewardOutcome.RUNTIME_ERROR, last_line or status)


def compare_output(
    out: bytes, test: StdinTest | CallTest, program: SandboxProgram
) -> ProgramTestResult:
    """Return PASS for the expected output, else the outcome and its explanation.

    out: stdout, or the return value as JSON.
    """
    show = _SHORT_REPR.repr
    if isinstance(test, StdinTest):
        actual = decode_output(out)
        if is_same_text(test.stdout, actual, loose_numbers=program.loose_numbers):
            return ProgramTestResult(RewardOutcome.PASS)
        detail = f"wrote {show(actual)}, not {show(test.stdout)}"
        return ProgramTestResult(RewardOutcome.WRONG, detail)
    accepted = " or ".join(map(show, test.accepted))
    if not can_be_value(out, test.accepted):
        detail = f"returned {len(out) >> 10} KiB of other structure, not {accepted}"
        return ProgramTestResult(RewardOutcome.WRONG, detail)
    try:
        value = parse_value(out)
    except ValueError:
        detail = f"{test.function} ended without returning a value"
        return ProgramTestResult(RewardOutcome.RUNTIME_ERROR, detail)
    if any(is_same_value(expected, value) for expected in test.accepted):
        return ProgramTestResult(RewardOutcome.PASS)
    return ProgramTestResult(RewardOutcome.WRONG, f"returned {show(value)}, not {accepted}")


#: Tolerances of numpy.allclose; they apply only if the expected value is a float.
_RELATIVE_TOLERANCE = 1e-5
_ABSOLUTE_TOLERANCE = 1e-8
#: Bytes or characters decoded or split per call.
_BLOCK_SIZE = 1 << 16
_BLANK = re.compile(r"\s")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
#: JSON of this size is parsed only if its structure matches an accepted value (see can_be_value).
_LONG_VALUE_BYTES = 1 << 16
_PART_MARKERS = b"[{,"


def decode_output(data: bytes) -> str:
    """Decode UTF-8 in blocks; invalid bytes become U+FFFD."""
    blocks = (data[start : start + _BLOCK_SIZE] for start in range(0, len(data), _BLOCK_SIZE))
    return "".join(codecs.iterdecode(blocks, "utf-8", errors="replace"))


def is_same_text(expected: str, actual: str, *, loose_numbers: bool) -> bool:
    """Return True if two outputs are equal, ignoring whitespace at the end of lines and text.

    loose_numbers: compare word by word, ignoring all other whitespace. Words that are numbers are
    equal as numbers, approximately if the expected number is a float.
    """
    expected, actual = expected.rstrip(), actual.rstrip()
    if expected == actual:
        return True
    if not loose_numbers:
        lines = zip_longest(_iter_lines(expected), _iter_lines(actual))
        return all(line == actual_line for line, actual_line in lines)
    words = zip_longest(_iter_words(expected), _iter_words(actual))
    return all(_is_same_word(word, actual_word) for word, actual_word in words)


def _iter_lines(text: str) -> Iterator[str]:
    start = 0
    while start <= len(text):
        end = text.find("\n", start + _BLOCK_SIZE)
        end = len(text) if end < 0 else end
        yield from (line.rstrip() for line in text[start:end].split("\n"))
        start = end + 1


def _iter_words(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        blank = _BLANK.search(text, start + _BLOCK_SIZE)
        end = blank.start() if blank else len(text)
        yield from text[start:end].split()
        start = end


def _is_same_word(expected: str | None, actual: str | None) -> bool:
    """Compare two words as text, then as numbers; None: the text has no further words."""
    if expected is None or actual is None or expected == actual:
        return expected == actual
    try:
        if _WHOLE_NUMBER.fullmatch(expected):
            return Decimal(actual) == Decimal(expected)
        return _is_close(float(expected), float(actual))
    except (ValueError, InvalidOperation):
        return False


def is_same_value(expected: Any, actual: Any) -> bool:
    """Return True if two values of JSON types are equal.

    An expected integer is compared exactly, an expected float approximately. Tuples equal lists;
    true differs from 1.
    """
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return expected == actual if isinstance(expected, int) else _is_close(expected, actual)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        is_list = isinstance(actual, list) and len(actual) == len(expected)
        return is_list and all(map(is_same_value, expected, actual))
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or {str(key) for key in expected} != actual.keys():
            return False
        return all(is_same_value(value, actual[str(key)]) for key, value in expected.items())
    return type(expected) is type(actual) and bool(expected == actual)


def _is_close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer too large for a float
        return False


def can_be_value(data: bytes, accepted: Sequence[Any]) -> bool:
    """Return False if JSON `data` cannot equal any accepted value; does not parse the data.

    json.loads holds the GIL, for longer the more containers and elements the data has. Data that
    differs from every accepted value in the counts of "[", "{" and "," is rejected here. Short data
    passes unchecked.
    """
    if len(data) < _LONG_VALUE_BYTES:
        return True
    counts = _count_parts(data)
    return any(counts == _count_parts(json.dumps(value).encode()) for value in accepted)


def _count_parts(data: bytes) -> list[int]:
    blocks = range(0, len(data), _BLOCK_SIZE)
    return [sum(data.count(part, at, at + _BLOCK_SIZE) for at in blocks) for part in _PART_MARKERS]


def parse_value(data: bytes) -> Any:
    """Parse a return value from JSON. Raises ValueError for invalid or too deeply nested data."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
