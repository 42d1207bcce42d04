"""The garbage collector is off while any user pauses it, and on again afterwards."""

import gc
from collections.abc import Iterator

import pytest

from streamrl.engines.memory.gc_paused import pause_gc


@pytest.fixture(autouse=True)
def restore_gc() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_gc_stays_off_until_the_last_user_leaves():
    first, second = pause_gc(), pause_gc()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    with pause_gc():
        pass
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_disabled_gc_stays_disabled():
    gc.disable()
    with pause_gc():
        pass
    assert not gc.isenabled()
