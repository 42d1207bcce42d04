"""Work without the collector of garbage: it rests for all who do without it, and then goes on."""

import gc
from collections.abc import Iterator

import pytest

from streamrl.engines.memory.gc_paused import pause_gc


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_nothing_is_collected_until_the_last_is_done() -> None:
    one, other = pause_gc(), pause_gc()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not gc.isenabled()
    with pause_gc():
        pass
    assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()


def test_it_goes_on_after_a_failure() -> None:
    with pytest.raises(ValueError, match="no model"), pause_gc():
        raise ValueError("no model")
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    with pause_gc():
        pass
    assert not gc.isenabled()
