"""A module that trains with engines of its own, started as `streamrl train` is: module, its words.

The workers of its runs are forked from processes that have imported their libraries.
"""

import runpy
import sys

from streamrl.actors.fork_server import refusal, start_fork_server

if __name__ == "__main__":
    start_fork_server()
    assert not refusal()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
