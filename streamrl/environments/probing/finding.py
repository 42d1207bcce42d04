"""Findings of a probe."""

from dataclasses import dataclass
from enum import StrEnum


class FindingStatus(StrEnum):
    """Status of a finding; FAIL: a run with this environment would drop groups or train wrongly."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """Result of one check of an environment.

    subject: aspect that was checked. text: what was found and, unless it is OK, what to do.
    """

    status: FindingStatus
    subject: str
    text: str


def report_ok(subject: str, text: str) -> Finding:
    return Finding(FindingStatus.OK, subject, text)


def report_warning(subject: str, text: str) -> Finding:
    return Finding(FindingStatus.WARN, subject, text)


def report_failure(subject: str, text: str) -> Finding:
    return Finding(FindingStatus.FAIL, subject, text)
