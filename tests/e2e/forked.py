"""A module that trains with engines of its own, started as `streamrl train` is: module, its words.

The workers of its runs are forked from processes that have imported their libraries.
"""

import runpy
import sys

from streamrl.process_env import ONE_THREAD, changed_env

if __name__ == "__main__":
    from streamrl.actors.fork_server import start_fork_server

    with changed_env(ONE_THREAD):
        assert not start_fork_server()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
