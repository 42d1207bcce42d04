"""Where processes of a group find each other."""

import contextlib
import random
import socket

import ray

from streamrl.errors import ActorError

PORTS = range(20_000, 32_000)
"""Below those the system hands out: gloo's own sockets take these."""


def meeting_place() -> tuple[str, int]:
    """The address of this node, and a port of it that nobody listens at."""
    for port in random.sample(PORTS, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return ray.util.get_node_ip_address(), port
    raise ActorError(f"found no free port between {PORTS.start} and {PORTS.stop}")
