"""Run areas on the simulated GPU, each in a process; take out placements of tensors in turn.

usage: python -m tests.engines.simulated_gpu_lines [AREA ...]
       python -m tests.engines.simulated_gpu_lines --faults [--sample N --seed S] [AREA ...]

Prints a line of JSON: by area its result, the placements that it reached, and the claims that do
not hold. With `--faults` each placement that an area reaches is taken out, and a line each says
which area notices: it raises, or a claim of it does not hold any more. Ends with 1 if a placement
goes unnoticed, or an area failed before.
"""

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tests import placements

DEADLINE_S = 300.0
Outcome = dict[str, Any]
"""Of an area: result, reached, seconds, broken (claims), and error if it raised."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--sample", type=int, help="placements to take out; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--places", nargs="*", help="placements to take out; default: all")
    parser.add_argument("areas", nargs="*")
    return parser


class FaultRunner:
    """Runs areas in processes forked from this one, which has imported what they need."""

    def __init__(self, areas: Mapping[str, Any], path: str, groups: Any) -> None:
        self._areas, self._path, self._groups = areas, path, groups

    def run_area(self, area: str, *, without: str = "") -> Outcome:
        """Run an area in a process, without the placement at `without`; return its outcome."""
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=self._answer, args=(sender, area, without))
        begun = time.monotonic()
        process.start()
        sender.close()
        outcome: Outcome = {"error": f"no answer in {DEADLINE_S:g} s"}
        if receiver.poll(DEADLINE_S):
            try:
                outcome = json.loads(receiver.recv())
            except EOFError:
                outcome = {"error": "the process died"}
        process.kill()
        process.join()
        return {**outcome, "seconds": round(time.monotonic() - begun, 1)}

    def _answer(self, pipe: Any, area: str, without: str) -> None:
        from tests.engines.simulated_gpu_claims import list_broken_claims

        placements.LOG.without = without
        placements.LOG.reached.clear()
        outcome: Outcome = {"broken": []}
        try:
            outcome["result"] = self._areas[area](self._path, self._groups)
            outcome["broken"] = list_broken_claims(area, outcome["result"])
        except Exception as error:
            if not without:
                raise
            outcome["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        pipe.send(json.dumps({**outcome, "reached": sorted(placements.LOG.reached)}))

    def find_noticing_area(self, place: str, areas: Iterable[str]) -> tuple[str, str]:
        """Return the first area that notices a planted fault, and by what; two empty strings."""
        for area in areas:
            outcome = self.run_area(area, without=place)
            if notice := outcome.get("error") or "; ".join(outcome["broken"]):
                return area, notice
        return "", ""


def main() -> None:
    arguments = make_parser().parse_args()
    placements.install()
    # Imports the package, whose code is changed from now on.
    from tests.engines.simulated_gpu_run import AREAS, prepare_areas

    with prepare_areas() as (path, groups):
        runner = FaultRunner(AREAS, path, groups)
        names = arguments.areas or AREAS
        outcomes = {name: runner.run_area(name) for name in names}
        print(json.dumps(outcomes), flush=True)
        if not arguments.faults:
            return
        failed = {name: outcome for name, outcome in outcomes.items() if has_failed(outcome)}
        working = {name: outcomes[name] for name in outcomes.keys() - failed.keys()}
        sys.exit(1 if take_out_in_turn(runner, working, arguments) or failed else 0)


def has_failed(outcome: Outcome) -> bool:
    return bool(outcome.get("error") or outcome["broken"])


def take_out_in_turn(
    runner: FaultRunner, outcomes: Mapping[str, Outcome], arguments: argparse.Namespace
) -> list[str]:
    """Take out reached placements in turn; print who notices; return those that nothing notices."""
    texts = placements.list_placements()
    fastest = sorted(outcomes, key=lambda name: outcomes[name]["seconds"])
    by_place = {
        place: [name for name in fastest if place in outcomes[name]["reached"]]
        for place in arguments.places or texts
    }
    reached = [place for place, names in by_place.items() if names]
    if arguments.sample is not None:
        reached = random.Random(arguments.seed).sample(reached, arguments.sample)
    survived = []
    for place in reached:
        area, notice = runner.find_noticing_area(place, by_place[place])
        print(f"{place}: {texts[place]}: {f'{area}: {notice}' if area else 'SURVIVED'}", flush=True)
        survived += [] if area else [place]
    print(f"caught {len(reached) - len(survived)} of {len(reached)}; placements: {len(texts)}")
    return survived


if __name__ == "__main__":
    main()
