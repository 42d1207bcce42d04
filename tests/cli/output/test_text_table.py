"""Number formats for people."""

import pytest

from streamrl.planner.plan_report import format_inner_percent


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (0.5, "50%"),
        (0.999, "99.9%"),
        (0.995, "99.5%"),
        (0.9999999, "99.99999%"),
        (0.001, "0.1%"),
        (1e-300, "1e-300"),
    ],
)
def test_an_inner_percentage_never_reads_0_or_100(part: float, text: str):
    assert format_inner_percent(part) == text
