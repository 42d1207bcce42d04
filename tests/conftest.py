"""Shared run fixtures, randomized-test budgets, and the distribution of tests to xdist workers."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadGroupScheduling

from tests.budget import Budget

# Fixtures that several folders share: runs, a tokenizer, Ray.
pytest_plugins = ("tests.e2e.shared_runs", "tests.bpe_tokenizer", "tests.local_ray")

LONGEST_FIRST = (
    *("e2e", "chaos", "examples", "test_lint.py", "benchmarks", "engines", "actors", "rewards"),
    *("test_planned_runs.py", "cli", "planner", "resharding", "user_code"),
)
"""Folders and files that start first, so that all xdist workers end together."""


class FileOrGroupScheduling(LoadGroupScheduling):
    """Scheduling that assigns each file, or each `xdist_group`, to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        group: str = super()._split_scope(nodeid)
        return group if group != nodeid else nodeid.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget())
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False


def pytest_collection_finish() -> None:
    # The libraries are two million objects, which each gc.collect() of a test would walk.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FileOrGroupScheduling:
    return FileOrGroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_get_priority)


def _get_priority(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.fixture(scope="module")
def process_group_of_models() -> Iterator[None]:
    """End the process group that a model of this module has joined, if none was there before."""
    import torch.distributed as dist

    was_joined = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_joined:
        dist.destroy_process_group()
