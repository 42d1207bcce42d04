"""Address at which the ranks of a model meet to form their torch.distributed group."""

import contextlib
import random
import socket

import ray

from streamrl.errors import ActorError

RENDEZVOUS_PORTS = range(20_000, 32_000)
"""Ports below Linux's ephemeral ones (32768 and up), which gloo's own sockets use."""


def find_rendezvous() -> tuple[str, int]:
    """Return the IP address of this node and a port that is free now."""
    for port in random.sample(RENDEZVOUS_PORTS, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return ray.util.get_node_ip_address(), port
    raise ActorError(
        f"no free port between {RENDEZVOUS_PORTS.start} and {RENDEZVOUS_PORTS.stop} in 50 tries"
    )
