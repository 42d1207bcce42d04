"""Compare our pure functions with those of verl and TRL: `make parity ARGS="--seed 3"`.

A line per function: whose it is compared with, the largest absolute difference of its value and of
its gradient over a few random batches, and the bound that both are held to. Exit code 1 if one is
beyond it. The peers' own installed code runs; a note tells what only one of the two defines.
"""

import argparse
import sys
from collections.abc import Sequence

for engine in ("deepspeed", "vllm"):
    # Not used here. TRL would import them, which takes longer than the comparison.
    sys.modules[engine] = None

from tests.parity import (  # noqa: E402
    trl_cases,
    verl_advantages,
    verl_correction,
    verl_losses,
    verl_recipes,
    verl_shaping,
)
from tests.parity.case import Case, Difference, measure  # noqa: E402

VERL = (verl_advantages, verl_losses, verl_shaping, verl_correction, verl_recipes)
CASES = [
    *(("verl", case) for module in VERL for case in module.CASES),
    *(("trl", case) for case in trl_cases.CASES),
]
FUNCTION_WIDTH = max(len(case.function) for _, case in CASES)
PEER_WIDTH = max(len(f"{peer} {case.peer}") for peer, case in CASES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; 1 if a difference is beyond its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    seed = parser.parse_args(argv).seed
    print(_line("function", "peer", ("value", "gradient", "bound"), "note"))
    agreeing = 0
    for peer, case in CASES:
        difference = measure(case, seed)
        agreeing += difference.within(case.bound)
        print(_report(peer, case, difference), flush=True)
    print(f"{agreeing} of {len(CASES)} agree")
    return 0 if agreeing == len(CASES) else 1


def _report(peer: str, case: Case, difference: Difference) -> str:
    gradient = "" if difference.gradient is None else f"{difference.gradient:.1e}"
    figures = (f"{difference.value:.1e}", gradient, f"{case.bound:.0e}")
    verdict = "" if difference.within(case.bound) else "DIFFERS "
    return _line(case.function, f"{peer} {case.peer}", figures, verdict + case.note)


def _line(function: str, peer: str, figures: Sequence[str], note: str) -> str:
    names = [f"{function:{FUNCTION_WIDTH}}", f"{peer:{PEER_WIDTH}}"]
    return "  ".join([*names, *(f"{figure:>8}" for figure in figures), note]).rstrip()


if __name__ == "__main__":
    sys.exit(main())
