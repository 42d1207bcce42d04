"""What all tests share: their order, and that how long one takes says nothing here."""

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer

from tests.lanes import Lanes, place

# On machines of any speed.
settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")
# What tests compute is small, and there may be others on the other core.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of whole runs come last: they are long, and others say sooner what is wrong."""
    items.sort(key=lambda item: place(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    """As two workers take the tests (`-n 2`): in lanes, see there."""
    config.option.loadscopereorder = False
    return Lanes(config, log)
