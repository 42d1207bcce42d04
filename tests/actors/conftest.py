"""One local Ray for all tests that need no cluster of their own."""

import contextlib

import pytest
import ray

from streamrl.actors.launch import local_ray as local

CPUS = 5
_instance = contextlib.ExitStack()


@pytest.hookimpl(trylast=True)  # behind the end of the fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Shut Ray down behind the last test of this room: others start their own in this process."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        end_instance()


def end_instance() -> None:
    """End the instance that the tests share, if there is one."""
    _instance.close()


@pytest.fixture(scope="module")
def local_ray() -> None:
    """A Ray of five CPUs and a GPU; it takes our word for what there is."""
    if not ray.is_initialized():
        end_instance()
        _instance.enter_context(local.start_local_ray(CPUS, 200 << 20, gpus=1))
