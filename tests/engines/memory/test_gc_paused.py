"""The garbage collector is off while any user pauses it, and on again afterwards."""

import gc

from streamrl.engines.memory.gc_paused import pause_gc


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
    gc.disable()
    try:
        with pause_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
