"""Tests in two lanes, for two cores: whole runs in one, engines and then all the rest in the other.

A run is a dozen processes that wait for one another, and tests of deadlines wait by intent: one
lane alone leaves much of two cores idle. What a lane has comes one after the other.
"""

from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

RECIPES = "tests/e2e/test_recipes.py"
LANES = {
    "engines": ("tests/engines/", "tests/actors/", "tests/examples/"),
    "runs": ("tests/e2e/", "tests/chaos/"),
}
"""What begins a lane, by name: where tests start engines and Ray, and where they start runs."""
ORDER = ("tests/e2e/", "tests/chaos/", RECIPES)
"""What comes behind all others, where there is one lane as where there are two."""


class Lanes(LoadScopeScheduling):
    """Gives each of two workers of pytest-xdist a lane of its own, and then what is left."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        for lane in LANES:
            if lane in self.workqueue:
                self.workqueue.move_to_end(lane, last=False)
        super()._assign_work_unit(node)


def unit(nodeid: str) -> str:
    """What a worker takes as a whole: a lane, a recipe, or else a file of tests."""
    if nodeid.startswith(RECIPES):
        return nodeid
    for lane, folders in LANES.items():
        if nodeid.startswith(folders):
            return lane
    return nodeid.partition("::")[0]


def place(nodeid: str) -> int:
    """Where a test comes among the others."""
    return max((i for i, start in enumerate(ORDER) if nodeid.startswith(start)), default=-1)
