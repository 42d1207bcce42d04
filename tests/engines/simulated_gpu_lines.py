"""Run areas on the simulated GPU, and note the lines that place tensors on devices as they run.

usage: python -m tests.engines.simulated_gpu_lines [--without PLACE] [AREA ...]

With `--without`, that placement is taken out. Prints the results by area as JSON, and the places
that each area reached.
"""

import argparse
import json

from tests import placements


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", default="")
    parser.add_argument("areas", nargs="*")
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    reached: dict[str, set[str]] = {"": set()}
    current = reached[""]

    def note(place: str) -> None:
        current.add(place)

    def begin(area: str) -> None:
        nonlocal current
        current = reached[area] = set()

    placements.install(note, without=arguments.without)
    # Imports the package, whose code is changed from now on.
    from tests.engines.simulated_gpu_run import AREAS, run_areas

    results = run_areas(arguments.areas or AREAS, begin)
    by_area = {area: sorted(places) for area, places in reached.items() if area}
    print(json.dumps({"results": results, "reached": by_area}))


if __name__ == "__main__":
    main()
