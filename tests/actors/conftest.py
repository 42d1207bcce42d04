"""One local Ray for all tests that need no cluster of their own."""

import os
from collections.abc import Iterator

import pytest
import ray

from streamrl.actors.cluster import _lean_ray
from streamrl.actors.fork_server import LOCAL_RAY_ENV

CPUS = 5


@pytest.fixture(scope="package")
def ray_ends() -> Iterator[None]:
    """Tests of other rooms start their own, in the same process."""
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def local_ray(ray_ends: None) -> None:
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
