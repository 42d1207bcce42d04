"""What NeMo-RL's constants are fitted on: `python -m benchmarks.published.nemo_fit` fits them anew.

Least squares of logarithms over synchronous steps, nothing else. Prints the constants found, and
every step, printed and as they say.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.published.nemo import CONSTANTS, is_fitted, step_s
from benchmarks.published.points import NEMO
from streamrl.messages import Array
from streamrl.placement.costs import Constants

NAMES = ("expert_layer_s", "train_step_s", "network_hop_s")


def of_logarithms(logarithms: Array) -> Constants:
    """Constants, of the logarithms of what is fitted."""
    return replace(CONSTANTS, **dict(zip(NAMES, np.exp(logarithms).tolist(), strict=True)))


def errors(constants: Constants) -> Iterator[float]:
    """Logarithms of what is predicted to what is printed."""
    for run in NEMO:
        if is_fitted(run):
            yield math.log(step_s(run, constants) / run.step_s)


def fit() -> Constants:
    """Those with the least squares, looked for from those there are."""
    start = np.log([vars(CONSTANTS)[name] for name in NAMES])
    found = least_squares(
        lambda logarithms: list(errors(of_logarithms(logarithms))), start, diff_step=0.01
    )
    return of_logarithms(found.x)


def main() -> None:
    """Fit, and print what comes of it."""
    constants = fit()
    told = {
        "constants": {name: vars(constants)[name] for name in NAMES},
        "steps": {
            f"{run.model}, {run.gpus} {run.device}": [
                run.step_s,
                round(step_s(run, constants), 1),
            ]
            for run in NEMO
            if is_fitted(run)
        },
        "squares": sum(error**2 for error in errors(constants)),
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
