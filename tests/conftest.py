"""What all tests share: whole runs, budgets, and which process of several runs which test."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from xdist.scheduler import LoadGroupScheduling

from streamrl.simulator.replicas.virtual_loop import VirtualEventLoop
from tests.budget import Budget

# Fixtures of the runs that several tests read.
pytest_plugins = ("tests.e2e.shared_runs",)

LONGEST_FIRST = (
    *("e2e", "chaos", "examples", "test_lint.py", "benchmarks", "engines", "actors", "rewards"),
    *("test_planned_runs.py", "cli", "placement", "resharding", "process_pool"),
)
"""Rooms that are handed out before the others, so that both cores end together."""


class FileOrGroupScheduling(LoadGroupScheduling):
    """Hand a process the tests of one file, or of one `xdist_group`."""

    def _split_scope(self, nodeid: str) -> str:
        group: str = super()._split_scope(nodeid)
        return group if group != nodeid else nodeid.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget())
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FileOrGroupScheduling:
    return FileOrGroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST_FIRST.index(room) if room in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run async tests that are marked `virtual_time` on a virtual clock."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualEventLoop}
    return {"real": asyncio.new_event_loop}
