"""Training, weights and resharding on a simulated GPU: no operation mixes devices.

Claims are listed by area in `simulated_gpu_claims.py`. Taking out the lines that place tensors, one
by one, shows that mixing would be found.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.engines.simulated_gpu_claims import CLAIMS
from tests.placements import list_placements

QUICK = [
    *("maths", "scores", "offload", "resharding", "served on the CPU", "pieces", "pinning"),
    *("worker", "engine", "two heads", "batch on the CPU", "column on the CPU"),
]
SAMPLE = 8
"""Placements that the test takes out."""


def run_lines(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.engines.simulated_gpu_lines", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Outcomes of the quick areas, or of all if the session has slow tests of this module."""
    own = [item for item in request.session.items if item.path == request.path]
    areas = CLAIMS if any(item.get_closest_marker("slow") for item in own) else QUICK
    return json.loads(run_lines(*areas).splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("area", "claim"),
    [
        pytest.param(area, claim, marks=[] if area in QUICK else pytest.mark.slow)
        for area, claims in CLAIMS.items()
        for claim in claims
    ],
)
def test_on_a_simulated_gpu(area: str, claim: str, outcomes: dict[str, Any]):
    outcome = outcomes[area]
    assert claim not in outcome["broken"], outcome["result"]


@pytest.mark.slow
def test_every_line_that_places_a_tensor_is_reached(outcomes: dict[str, Any]):
    reached = {place for outcome in outcomes.values() for place in outcome["reached"]}
    assert sorted(list_placements().keys() - reached) == []


@pytest.mark.slow
def test_a_placement_that_is_taken_out_is_noticed():
    """All of them, in a quarter of an hour: `simulated_gpu_lines --faults`."""
    run_lines("--faults", "--sample", str(SAMPLE))
