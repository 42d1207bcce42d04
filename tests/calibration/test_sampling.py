"""What a decode step takes follows from when groups were done, slow moments or not."""

from dataclasses import replace

import numpy as np
import pytest

from streamrl.calibration.sampling import Asked, fit_sampling
from streamrl.messages import Array
from streamrl.placement import GeneratorTiming

TRUE = GeneratorTiming(1, 512, 1e6, 2e-4, 1e-7, 1.5e-5, 4e-3, 5e-5, 3e-5)
START = replace(TRUE, step_s=4e-3, rollout_s=1e-4, prefill_token_s=5e-5)


def asked(paces: list[float]) -> Asked:
    """A turn of 32 groups for each pace, which it went at."""
    rng, lengths = np.random.default_rng(0), []
    for _ in range(32 * len(paces)):
        lengths.append(rng.choice([2, 4, 6, 7, 8, 12], 8).tolist())
    turns = np.repeat(np.arange(len(paces)), 32)
    begins = 10.0 * turns
    none: Array = np.array([], np.float64)
    one = Asked(begins, begins, [5] * len(lengths), lengths, turns >= 0, none, turns)
    lasts = one.replay(TRUE, pause_s=0.0) - begins
    return replace(one, ends=begins + lasts * np.array(paces)[turns])


@pytest.mark.parametrize("paces", [[1.0] * 4, [1.0, 1.4, 0.9, 1.0, 1.2, 0.8, 1.0]])
def test_coefficients_are_those_of_the_usual_pace(paces: list[float]) -> None:
    found = fit_sampling([asked(paces)], START, pause_s=0.0)
    true = (TRUE.step_s, TRUE.rollout_s, TRUE.prefill_token_s)
    assert found.values == pytest.approx(true, rel=0.1)
    assert found.residual < 0.01
