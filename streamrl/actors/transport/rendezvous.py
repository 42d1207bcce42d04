"""Where processes of a group find each other."""

import contextlib
import random
import socket

import ray

from streamrl.errors import ActorError

RENDEZVOUS_PORTS = range(20_000, 32_000)
"""Below those the system hands out: gloo's own sockets take these."""


def find_rendezvous() -> tuple[str, int]:
    """The address of this node, and a port of it that nobody listens at."""
    for port in random.sample(RENDEZVOUS_PORTS, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return ray.util.get_node_ip_address(), port
    raise ActorError(
        f"found no free port between {RENDEZVOUS_PORTS.start} and {RENDEZVOUS_PORTS.stop}"
    )
