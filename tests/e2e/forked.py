"""A module that trains with engines of its own, started as `streamrl train` is: module, its words.

The workers of its runs are forked from processes that have imported their libraries.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from streamrl.actors import fork_server

    fork_server.import_base()
    fork_server.start_fork_server()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
