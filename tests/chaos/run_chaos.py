"""Kill -9 every kind of process at every fault point: `python -m tests.chaos.run_chaos --seed 3`.

Print a line per scenario; for a failed scenario also its problems, its run folder, and the command
to repeat it.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.bench import Bench, ScenarioResult
from tests.chaos.scenarios import Scenario, all_scenarios, short_scenarios


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenarios; return 1 if any fails."""
    arguments = _parser().parse_args(argv)
    chosen = _choose_scenarios(arguments)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="streamrl-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder)
    results = []
    for scenario in chosen:
        print(f"{scenario.name:26} {scenario} ... ", end="", flush=True)
        results.append(bench.run_scenario(scenario))
        _report(results[-1], bench, arguments.seed)
    failed = sum(bool(result.problems) for result in results)
    total_s = sum(result.seconds for result in results)
    print(f"{len(results) - failed} of {len(results)} passed in {total_s:.0f} s")
    if not failed and arguments.folder is None:
        shutil.rmtree(folder)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run_chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="chooses actors, hits and delays")
    parser.add_argument("--short", action="store_true", help="a scenario per role")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROLE[:POINT]", help="may be repeated"
    )
    parser.add_argument("--folder", type=Path, help="folder to write runs to and keep")
    return parser


def _choose_scenarios(arguments: argparse.Namespace) -> list[Scenario]:
    seed, names = arguments.seed, set(arguments.only)
    valid = {scenario.name for scenario in all_scenarios(seed)}
    valid |= {name.partition(":")[0] for name in valid}
    if names - valid:
        sys.exit(f"--only {min(names - valid)}: must be one of {', '.join(sorted(valid))}")
    scenarios = short_scenarios(seed) if arguments.short else all_scenarios(seed)
    exact = [s for s in scenarios if s.name in names]
    return exact + [s for s in scenarios if not names or (s.role in names and s not in exact)]


def _report(result: ScenarioResult, bench: Bench, seed: int) -> None:
    scenario = result.scenario
    print(f"{'FAILED' if result.problems else 'ok'} in {result.seconds:.0f} s", flush=True)
    if result.problems:
        for problem in result.problems:
            print("   ", problem.replace("\n", "\n    "))
        print(f"    the run: {bench.get_run_dir(scenario.name.replace(':', '-'))}")
        again = f"python -m tests.chaos.run_chaos --seed {seed} --only {scenario.name}"
        print(f"    again: {again}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
