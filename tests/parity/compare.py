"""Compare our pure functions with those of verl and TRL: `make parity ARGS="--seed 3"`.

A line per function: its peer, the largest absolute difference of its value and of its gradient over
random batches, and the bound of both. Then a line per matcher: the number of answers with equal
scores, and each difference with its reason. Exit code 1 if a difference is beyond its bound, or an
answer is not as listed. The peers' own installed code runs; notes name what only one side defines.
"""

import argparse
import sys
from collections.abc import Sequence

for engine in ("deepspeed", "vllm"):
    # TRL would import them, which takes longer than the comparison.
    sys.modules[engine] = None  # type: ignore[assignment]  # None blocks an import

from tests.parity import trl_cases, verl_advantages, verl_losses, verl_rewards  # noqa: E402
from tests.parity.case import Difference, ParityCase, measure, score_all  # noqa: E402

CASES = [
    *(("verl", case) for case in (*verl_advantages.CASES, *verl_losses.CASES)),
    *(("trl", case) for case in trl_cases.CASES),
]
FUNCTION_WIDTH = max(len(case.function) for _, case in CASES)
PEER_WIDTH = max(len(f"{peer} {case.peer}") for peer, case in CASES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; return 1 if a difference is beyond its bound or an answer not as listed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    seed = parser.parse_args(argv).seed
    functions, answers = compare_functions(seed), compare_answers()
    return 0 if functions and answers else 1


def compare_functions(seed: int) -> bool:
    """Return whether all functions are within their bounds."""
    print(_line("function", "peer", ("value", "gradient", "bound"), "note"))
    agreeing = 0
    for peer, case in CASES:
        difference = measure(case, seed)
        agreeing += difference.within(case.bound)
        print(_report(peer, case, difference), flush=True)
    print(f"{agreeing} of {len(CASES)} agree")
    return agreeing == len(CASES)


def compare_answers() -> bool:
    """Return whether all matchers score the table alike, except for listed answers."""
    cases, as_listed = verl_rewards.CASES, 0
    for case in cases:
        agreement = score_all(case, verl_rewards.TABLE)
        as_listed += agreement.as_listed
        alike = f"{agreement.num_agreeing} of {agreement.num_compared} alike"
        if agreement.num_refused:
            alike += f"; ours refuses the ground truth of {agreement.num_refused}"
        print(f"{case.function:{FUNCTION_WIDTH}}  {f'verl {case.peer}':{PEER_WIDTH}}  {alike}")
        print("".join(f"    on purpose  {entry}\n" for entry in case.on_purpose), end="")
        print("".join(f"    DIFFERS     {line}\n" for line in agreement.unlisted), end="")
    print(f"{as_listed} of {len(cases)} rules score as listed")
    return as_listed == len(cases)


def _report(peer: str, case: ParityCase, difference: Difference) -> str:
    gradient = "" if difference.gradient is None else f"{difference.gradient:.1e}"
    figures = (f"{difference.value:.1e}", gradient, f"{case.bound:.0e}")
    verdict = "" if difference.within(case.bound) else "DIFFERS "
    return _line(case.function, f"{peer} {case.peer}", figures, verdict + case.note)


def _line(function: str, peer: str, figures: Sequence[str], note: str) -> str:
    names = [f"{function:{FUNCTION_WIDTH}}", f"{peer:{PEER_WIDTH}}"]
    return "  ".join([*names, *(f"{figure:>8}" for figure in figures), note]).rstrip()


if __name__ == "__main__":
    sys.exit(main())
