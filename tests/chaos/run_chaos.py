"""Kill -9 every kind of actor at every moment: `python -m tests.chaos.run_chaos --seed 3`.

A line per scenario; for one that fails what is wrong, where its run is, and how to repeat it.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.bench import Bench, Verdict
from tests.chaos.scenarios import MOMENTS, ROLES, Scenario, all_scenarios, short_scenarios


def main(argv: Sequence[str] | None = None) -> int:
    """Play the scenarios; 1 if one of them failed."""
    arguments = _parser().parse_args(argv)
    chosen = _chosen(arguments)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="streamrl-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder)
    verdicts = []
    for scenario in chosen:
        print(f"{scenario.name:26} {scenario} ... ", end="", flush=True)
        verdicts.append(bench.play(scenario))
        _report(verdicts[-1], bench, arguments.seed)
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    total_s = sum(verdict.seconds for verdict in verdicts)
    print(f"{len(verdicts) - failed} of {len(verdicts)} passed, seed {arguments.seed}, {total_s:.0f} s")
    if not failed and arguments.folder is None:
        shutil.rmtree(folder)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run_chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of who dies at which passage")
    parser.add_argument("--short", action="store_true", help="each role once")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROLE[:MOMENT]", help="may be repeated"
    )
    parser.add_argument("--folder", type=Path, help="where the runs go, and stay")
    return parser


def _chosen(arguments: argparse.Namespace) -> list[Scenario]:
    names = [f"{role}:{moment}" for role in ROLES for moment in MOMENTS]
    unknown = [o for o in arguments.only if o not in names and o not in ROLES]
    if unknown:
        sys.exit(f"--only {unknown[0]}: must be one of {', '.join([*ROLES, *names])}")
    scenarios = (short_scenarios if arguments.short else all_scenarios)(arguments.seed)
    wanted = set(arguments.only)
    return [s for s in scenarios if not wanted or wanted & {s.name, s.role}]


def _report(verdict: Verdict, bench: Bench, seed: int) -> None:
    scenario = verdict.scenario
    print(f"{'FAILED' if verdict.problems else 'ok'} in {verdict.seconds:.0f} s", flush=True)
    if verdict.problems:
        for problem in verdict.problems:
            print("   ", problem.replace("\n", "\n    "))
        print(f"    the run: {bench.run_dir(scenario.name.replace(':', '-'))}")
        again = f"python -m tests.chaos.run_chaos --seed {seed} --only {scenario.name}"
        print(f"    again: {again}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
