"""One local Ray for all tests that need no cluster of their own."""

import os

import pytest
import ray

from streamrl.actors.cluster import _lean_ray
from streamrl.actors.fork_server import LOCAL_RAY_ENV

CPUS = 5


@pytest.hookimpl(trylast=True)  # behind the end of the fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Shut Ray down behind the last test of this room: others start their own in this process."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        ray.shutdown()


@pytest.fixture(scope="module")
def local_ray() -> None:
    """A Ray of five CPUs and a GPU; it takes our word for what there is."""
    if ray.is_initialized():
        return
    # As any local instance of ours.
    for name, value in LOCAL_RAY_ENV.items():
        os.environ.setdefault(name, value)
    with _lean_ray():
        ray.init(
            address="local",
            num_cpus=CPUS,
            num_gpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200 << 20,
        )
