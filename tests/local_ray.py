"""A local Ray shared by all tests that need no cluster of their own."""

import contextlib

import pytest
import ray

from streamrl.actors.launch import local_ray as local
from streamrl.actors.launch.fork_server import ForkLevel, start_fork_server, stop_fork_server

CPUS = 5
MODULES = ("streamrl.actors.queue_shard", "streamrl.own_loops.worker_group")
LEVEL = ForkLevel("base", "", ("ray._private.workers.default_worker", *MODULES))
"""Modules without torch, which workers of Ray would import for a second each."""
_instance = contextlib.ExitStack()


@pytest.hookimpl(trylast=True)  # after the fixtures are torn down
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Shut Ray down after the last test of their folder; other folders start their own instance."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        end_instance()


def end_instance() -> None:
    _instance.close()


@pytest.fixture(scope="module")
def local_ray() -> None:
    """Start a Ray with five CPUs and a GPU; Ray trusts the declared resources."""
    if not ray.is_initialized():
        end_instance()
        start_fork_server([LEVEL])
        _instance.callback(stop_fork_server)
        _instance.enter_context(local.start_local_ray(CPUS, 200 << 20, gpus=1))
