"""The store of torch.distributed through which processes find each other, on one address.

torch's own server listens on every interface of its machine, and nothing of torch.distributed asks
for a secret: a rank must not be reachable from where none of its peers can be.
"""

import socket
from datetime import timedelta

import torch.distributed as dist


def serve_tcp_store(
    host: str, port: int, timeout_s: float, *, world_size: int | None = None
) -> dist.TCPStore:
    """Serve a store at `host`:`port`; port 0 is any that is free.

    With a `world_size`, wait until so many have connected, this process among them. Raises OSError
    if nobody can listen there, RuntimeError if the others do not come within `timeout_s`, s.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            world_size,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=world_size is not None,
            master_listen_fd=listening.detach(),
        )
