"""Training, weights and resharding on a simulated GPU: no operation mixes devices.

Claims are listed by area in `simulated_gpu_claims.py`. Taking out the lines that place tensors, one
by one, shows that mixing would be found.
"""

import json
import re
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from tests.engines.simulated_gpu_claims import CLAIMS
from tests.placements import list_placements

QUICK = [
    *("maths", "scores", "offload", "resharding", "served on the CPU", "pieces", "pinning"),
    *("worker", "slices", "engine", "two heads", "batch on the CPU", "column on the CPU"),
]
SAMPLE = 8
"""Placements that the test takes out."""


class Lines(NamedTuple):
    """Output of `simulated_gpu_lines`: outcomes by area, and a line for each planted fault."""

    outcomes: dict[str, Any]
    faults: list[str]


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest) -> Lines:
    """Run the quick areas, or all and a sample of faults if slow tests of this module run, too."""
    own = [item for item in request.session.items if item.path == request.path]
    is_slow = any(item.get_closest_marker("slow") for item in own)
    arguments = ["--faults", "--sample", str(SAMPLE), *CLAIMS] if is_slow else QUICK
    command = [sys.executable, "-m", "tests.engines.simulated_gpu_lines", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400)
    outcomes = re.search(r"^{.*$", done.stdout, re.M)
    assert outcomes is not None, done.stderr[-4000:]
    return Lines(json.loads(outcomes[0]), re.findall(r"^\w\S+\.py:\d+:\d+: .*$", done.stdout, re.M))


@pytest.mark.parametrize(
    ("area", "claim"),
    [
        pytest.param(area, claim, marks=[] if area in QUICK else pytest.mark.slow)
        for area, claims in CLAIMS.items()
        for claim in claims
    ],
)
def test_on_a_simulated_gpu(area: str, claim: str, lines: Lines):
    outcome = lines.outcomes[area]
    assert "result" in outcome and claim not in outcome["broken"], outcome


@pytest.mark.slow
def test_every_line_that_places_a_tensor_is_reached(lines: Lines):
    reached = {place for outcome in lines.outcomes.values() for place in outcome["reached"]}
    assert sorted(list_placements().keys() - reached) == []


@pytest.mark.slow
def test_a_placement_that_is_taken_out_is_noticed(lines: Lines):
    """CONTRIBUTING.md says how to take out all of them."""
    assert len(lines.faults) == SAMPLE
    assert [line for line in lines.faults if line.endswith("SURVIVED")] == []
