"""Findings of a probe."""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial


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


report_ok = partial(Finding, FindingStatus.OK)
report_warning = partial(Finding, FindingStatus.WARN)
report_failure = partial(Finding, FindingStatus.FAIL)
